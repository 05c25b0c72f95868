"""Real gradients in virtual time: the strategies' equations hold, bit for bit where they must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, Simulation, simulate
from paceline.errors import PacelineError
from paceline.node import Node
from paceline.record import MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Crash
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import AbsSgd, AllReduce, Balanced, Strategy

EVERY = [AllReduce(), Balanced(), AbsSgd(), AbsSgd(delay_cure="none", min_micro_batches=2)]
SAMPLES = 200
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(3))
Y = (X[:, 0] > 0).long()


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def classify(model: nn.Module, indices: NDArray[np.int64]) -> None:
    chosen = torch.from_numpy(indices)
    nn.functional.cross_entropy(model(X[chosen]), Y[chosen]).backward()


def learners(
    count: int,
    model: Callable[[], nn.Module] = net,
    backward: Callable[[nn.Module, NDArray[np.int64]], object] = classify,
    **options: float,
) -> list[ReplicaLearner]:
    made = []
    for rank in range(count):
        own = model()
        optimizer = torch.optim.SGD(own.parameters(), **{"lr": 0.1, **options})
        made.append(ReplicaLearner(Replica(own, optimizer), backward, samples=SAMPLES, rank=rank))
    return made


def mixed(*speeds: float, seed: int = 0) -> Cluster:
    network = Network(latency=1e-3, bandwidth=1e6)
    return Cluster.from_speeds(speeds, micro_batch_seconds=0.1, jitter=LogNormal(0.2), network=network, seed=seed)


# ---- the quadratic a·w²/2


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))


def descend(strategy: Strategy, lr: float, rounds: int = 40, a: float = 1.0) -> list[float]:
    """w before the first step and after each, on one rank."""

    def backward(model: nn.Module, _: NDArray[np.int64]) -> None:
        (0.5 * a * next(model.parameters()) ** 2).sum().backward()

    path, seen = [1.0], [0]
    [learner] = learners(1, Scalar, backward, lr=lr)

    def on_applied(rank: int, time: float, samples: int) -> None:
        if samples > seen[0]:
            seen[0] = samples
            path.append(float(learner.parameters))

    simulate(strategy, Cluster.from_speeds([1]), data=Data(rounds * 32, 1), learners=[learner], on_applied=on_applied)
    return path


def test_abs_sgd_alone_is_sgd_one_round_late() -> None:
    path = descend(AbsSgd(delay_cure="none"), lr=0.25, a=2.0)
    expected = [1.0]
    for r in range(len(path) - 1):
        expected.append(expected[r] - 0.25 * 2.0 * expected[max(r - 1, 0)])
    assert len(path) == 41
    assert path == expected, "exactly"


def test_all_reduce_alone_is_sgd() -> None:
    path = descend(AllReduce(), lr=0.25)
    assert path == pytest.approx([0.75**r for r in range(41)], rel=1e-12)


@pytest.mark.parametrize(("lr", "stable"), [(0.05, True), (0.5, True), (0.97, True), (1.03, False), (1.5, False)])
def test_one_round_of_delay_is_stable_up_to_one(lr: float, stable: bool) -> None:
    path = descend(AbsSgd(delay_cure="none"), lr=lr, rounds=1000)
    tail = max(map(abs, path[-12:]))
    assert tail < 1e-3 if stable else tail > 1e3


# ---- many ranks


def test_all_reduce_equals_sgd_on_the_joined_batch() -> None:
    def squares(model: nn.Module, indices: NDArray[np.int64]) -> None:
        chosen = torch.from_numpy(indices)
        model(X[chosen].double()).square().mean().backward()

    def linear() -> nn.Module:
        return net()[0].double()

    together, alone = learners(4, linear, squares), learners(1, linear, squares)
    four, one = Cluster.from_speeds([1, 1, 0.5, 0.25]), Cluster.from_speeds([1])
    simulate(AllReduce(), four, data=Data(SAMPLES, 2), learners=together, micro_batch=5)
    simulate(AllReduce(), one, data=Data(SAMPLES, 2), learners=alone, micro_batch=20)
    torch.testing.assert_close(together[0].parameters, alone[0].parameters, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", EVERY, ids=str)
def test_all_ranks_are_bitwise_equal_after_every_round(strategy: Strategy) -> None:
    ranks = learners(4, momentum=0.9)
    after: dict[int, list[Tensor]] = {rank: [] for rank in range(4)}

    def keep(rank: int, time: float, samples: int) -> None:
        after[rank].append(ranks[rank].parameters.clone())

    cluster, data = mixed(1, 1, 0.5, 0.25), Data(SAMPLES, 5)
    run = simulate(strategy, cluster, data=data, learners=ranks, micro_batch=8, on_applied=keep)
    assert run.samples_applied == run.samples_computed == 5 * SAMPLES
    assert len(after[0]) >= run.rounds > 5
    for rank in (1, 2, 3):
        assert all(torch.equal(mine, first) for mine, first in zip(after[rank], after[0], strict=True))
    assert all(torch.equal(learner.parameters, after[0][-1]) for learner in ranks)


@pytest.mark.parametrize("strategy", EVERY, ids=str)
def test_every_sample_exactly_once_an_epoch(strategy: Strategy) -> None:
    used: list[int] = []

    def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
        used.extend(indices.tolist())
        classify(model, indices)

    simulate(strategy, mixed(1, 0.5, 0.3), data=Data(SAMPLES, 2), learners=learners(3, net, backward), micro_batch=7)
    assert sorted(used) == sorted([*range(SAMPLES)] * 2)
    assert used[:7] != list(range(7)), "shuffled"


@pytest.mark.parametrize("strategy", EVERY, ids=str)
def test_a_run_replays_bit_for_bit(strategy: Strategy) -> None:
    def run(seed: int) -> tuple[Simulation, Tensor]:
        ranks = learners(3, momentum=0.9)
        cluster = mixed(1, 0.5, 0.3, seed=seed)
        outcome = simulate(strategy, cluster, data=Data(SAMPLES, 2), learners=ranks, micro_batch=8)
        return outcome, ranks[0].parameters

    (first, weights), (again, same), (_, other) = run(0), run(0), run(1)
    assert first == again
    assert torch.equal(weights, same)
    assert not torch.equal(weights, other)


def test_learning_works() -> None:
    ranks = learners(4, lr=0.3)
    simulate(AbsSgd(), mixed(1, 1, 0.5, 0.25), data=Data(SAMPLES, 40), learners=ranks, micro_batch=8)
    model = ranks[2].replica.model.eval()
    assert (model(X).argmax(1) == Y).float().mean() > 0.9


def test_ranks_draw_their_own_dropout_and_leave_the_users_randomness_alone() -> None:
    drawn: list[float] = []

    def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
        drawn.append(float(torch.rand(1)))
        classify(model, indices)

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    for _ in range(2):
        ranks = learners(2, net, backward)
        simulate(AllReduce(), Cluster.from_speeds([1, 1]), data=Data(SAMPLES, 1), learners=ranks, micro_batch=50)
    assert torch.equal(torch.rand(1), expected)
    assert drawn[:4] == drawn[4:]
    assert len(set(drawn)) == 4


def test_non_finite_gradients_are_dropped_counted_and_reported_once() -> None:
    calls = [0]

    def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
        calls[0] += 1
        classify(model, indices)
        if calls[0] in (3, 6):
            next(model.parameters()).grad[0, 0] = float("nan")

    recorder, ranks = MemoryRecorder(), learners(1, net, backward)
    run = simulate(
        AllReduce(), Cluster.from_speeds([1]), data=Data(SAMPLES, 1), learners=ranks, micro_batch=20, recorder=recorder
    )
    assert (run.samples_applied, run.samples_discarded) == (SAMPLES - 40, 40)
    assert [event["reason"] for event in recorder.events if event["kind"] == "discard"] == ["non-finite gradient"] * 2
    assert sum(event["kind"] == "warning" for event in recorder.events) == 1
    assert ranks[0].parameters.isfinite().all()


@dataclass(frozen=True, kw_only=True)
class Leaky(Strategy):
    name: ClassVar[str] = "leaky"
    mode: str

    async def worker(self, node: Node) -> None:
        with torch.no_grad() if self.mode == "torch.no_grad" else torch.autocast("cpu", torch.bfloat16):
            await node.gradient()


@pytest.mark.parametrize("mode", ["torch.no_grad", "torch.autocast"])
def test_a_mode_that_leaks_over_an_await_is_caught(mode: str) -> None:
    with pytest.raises(PacelineError, match=mode):
        simulate(Leaky(mode=mode), Cluster.from_speeds([1, 1]), seconds=1, data=Data(SAMPLES), learners=learners(2))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@dataclass(frozen=True, kw_only=True)
class Gift(Strategy):
    """Sends its parameters, and changes them the moment after."""

    name: ClassVar[str] = "gift"
    got: ClassVar[list[Tensor]] = []

    async def worker(self, node: Node) -> None:
        if node.rank == 0:
            node.send(1, "weights", node.parameters, torch.arange(3))
            node.parameters.zero_()
        else:
            self.got[:] = (await node.receive()).tensors


def test_a_message_carries_what_was_sent() -> None:
    ranks = learners(2)
    before, network = ranks[0].parameters.clone(), Network(latency=0.1, bandwidth=1000.0)
    run = simulate(Gift(), Cluster.from_speeds([1, 1], network=network), seconds=1, data=Data(SAMPLES), learners=ranks)
    assert torch.equal(Gift.got[0], before)
    assert Gift.got[1].tolist() == [0, 1, 2]
    nbytes = before.numel() * 4 + 24
    assert run.bytes_sent == nbytes
    assert run.workers[1].ended == pytest.approx(0.1 + nbytes / 1000)


def test_the_leases_of_a_crashed_rank_go_to_the_others() -> None:
    """Rank 1 dies in its only micro-batch, before anybody needs it for a collective."""

    @dataclass(frozen=True, kw_only=True)
    class Alone(Strategy):
        name: ClassVar[str] = "alone"

        async def worker(self, node: Node) -> None:
            while (await node.gradient()).count:
                pass

    used: list[int] = []
    ranks = learners(2, net, lambda model, indices: used.extend(indices.tolist()))
    cluster = Cluster.from_speeds([1, 0.01], micro_batch_seconds=0.1, faults=[Crash(rank=1, at=0.05)])
    run = simulate(Alone(), cluster, data=Data(SAMPLES, 1), learners=ranks, micro_batch=20)
    assert run.workers[0].samples == SAMPLES
    assert len(used) == SAMPLES + 20, "the lost micro-batch was begun twice"
    assert set(used) == set(range(SAMPLES))


def test_real_gradients_need_data() -> None:
    with pytest.raises(PacelineError, match="need data"):
        simulate(AllReduce(), Cluster.from_speeds([1]), seconds=1, learners=learners(1))
