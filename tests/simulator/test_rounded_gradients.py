"""Rounded gradients in virtual time: the bytes follow, counts are never rounded, and learning goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.backends.learners import TimingLearner
from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, Simulation, simulate
from paceline.errors import PacelineError
from paceline.rules.codes import CODES, code_bytes
from paceline.rules.rounding import Rounded
from paceline.simulator.cluster import Cluster
from paceline.simulator.network import Network
from paceline.strategies import AllReduce, Strategy, create

SAMPLES, RANKS = 120, 3
X = torch.randn(SAMPLES, 40, generator=torch.Generator().manual_seed(3))
Y = (X[:, 0] > 0).long()
CODED = [code for code in CODES if code != "none"]
FAMILY = [*(("all-reduce", code) for code in CODED), *((name, "int8") for name in ("balanced", "rennala", "abs-sgd"))]


def classify(model: nn.Module, indices: NDArray[np.int64]) -> None:
    chosen = torch.from_numpy(indices)
    nn.functional.cross_entropy(model(X[chosen]), Y[chosen]).backward()


def learners() -> list[ReplicaLearner]:
    made = []
    for rank in range(RANKS):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        made.append(ReplicaLearner(Replica(model, optimizer), classify, samples=SAMPLES, rank=rank))
    return made


def trained(strategy: Strategy, epochs: int = 4) -> tuple[Simulation, list[ReplicaLearner]]:
    own = learners()
    network = Network(latency=1e-3, bandwidth=1e6)
    cluster = Cluster.from_speeds([1, 1, 0.5], micro_batch_seconds=0.05, network=network)
    return simulate(strategy, cluster, micro_batch=8, data=Data(SAMPLES, epochs), learners=own), own


def loss_of(learner: ReplicaLearner) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(learner.replica.model(X), Y))


@pytest.mark.parametrize(("name", "code"), FAMILY)
def test_all_ranks_hold_the_same_bits_and_every_sample_counts_once(name: str, code: str) -> None:
    outcome, own = trained(create(f"{name}:compress={code}"))
    assert outcome.samples_applied == outcome.samples_computed == 4 * SAMPLES, "counts travel as they are"
    assert all(torch.equal(own[0].parameters, other.parameters) for other in own)
    _, plain = trained(create(name))
    assert loss_of(own[0]) == pytest.approx(loss_of(plain[0]), abs=0.05), "and learns as without"


@pytest.mark.parametrize("code", CODED)
def test_a_round_is_the_rounded_sum_of_the_rounded_gradients(code: str) -> None:
    """One step of two ranks, beside the same by hand; the trailer's sums are exact."""
    own = [learner.sending_as(code) for learner in learners()[:2]]
    given = [learner.compute([range(8 * rank, 8 * rank + 8)]) for rank, learner in enumerate(own)]
    sums = [torch.cat([part.flatten() * 8 for part in gradient.values.parts]) for gradient in given]
    pushed = [learner.contribution(gradient, True)[0] for learner, gradient in zip(own, given, strict=True)]
    exact = sum(each.trailer.clone() for each in pushed)
    total = own[0].reduce(pushed)
    by_hand = [Rounded(torch.empty(len(sums[0])), code) for _ in range(2)]
    codes = [rounding.push(each) for rounding, each in zip(by_hand, sums, strict=True)]
    for rank, rounding in enumerate(by_hand):
        rounding.arrange(rank, 2)
    parts = [rounding.add_up([each.part(rank, 2) for each in codes])[0] for rank, rounding in enumerate(by_hand)]
    wanted = torch.empty(len(sums[0]))
    by_hand[0].unpack(parts, wanted)
    assert torch.equal(total[: len(wanted)], wanted)
    assert torch.equal(total[len(wanted) :], exact) and exact[0] == 16, "the count and all beside it are never rounded"


@pytest.mark.parametrize("code", CODES)
def test_bytes_and_time_follow_the_code(code: str) -> None:
    """With gradients and without: the same bytes, and a network that is slow becomes as much faster."""
    (outcome, own), (plain, _) = trained(AllReduce(compress=code), epochs=1), trained(AllReduce(), epochs=1)
    size = own[0].replica.size
    assert outcome.bytes_sent * code_bytes("none", size) == plain.bytes_sent * code_bytes(code, size)
    network = Network(bandwidth=1e6)
    cluster = Cluster.from_speeds([1, 1], micro_batch_seconds=1e-9, network=network)
    timed = simulate(AllReduce(compress=code), cluster, seconds=20.0, learners=[TimingLearner(nbytes=400_000)] * 2)
    each = timed.bytes_sent / timed.rounds / 2
    assert each == pytest.approx(code_bytes(code, 100_000), rel=0.02)
    assert timed.seconds / timed.rounds == pytest.approx(each / 1e6, rel=0.05)


def test_without_it_nothing_changes() -> None:
    _, plain = trained(AllReduce())
    _, same = trained(AllReduce(compress="none"))
    assert torch.equal(plain[0].parameters, same[0].parameters)


def test_a_gradient_that_is_not_finite_is_left_out_and_what_was_kept_still_goes() -> None:
    (learner,) = [each.sending_as("int8") for each in learners()[:1]]
    sent, _ = learner.contribution(learner.compute([range(8)]), True)
    learner.total(sent, learner.reduce([sent]))
    broken = learner.compute([range(8, 16)])
    broken.values.parts[0][0] = float("nan")
    contribution, sound = learner.contribution(broken, True)
    assert not sound and contribution.trailer[0] == 0
    assert contribution.codes.decoded(torch.float32).isfinite().all() and contribution.codes.numbers.any()


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(PacelineError, match=r"compress='fp8'"):
        create("abs-sgd:compress=fp8")
