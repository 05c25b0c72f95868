"""A run that diverges is told so, once and with numbers; one that brings nothing but NaN ends and does not go on."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import simulate
from paceline.backends.sources import Data
from paceline.backends.watch import GROWTH, USELESS_ROUNDS, Watch
from paceline.errors import PacelineError
from paceline.record import MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.strategies import create


class Watched:
    """A watch, and what it said."""

    def __init__(self, rank: int = 0) -> None:
        self.said: list[str] = []
        self._watch, self._round = Watch(rank, self.said.append), 0

    def see(self, *norms: float, count: int = 8, working: bool = True) -> Watched:
        for norm in norms:
            self._watch.see(self._round, norm, count, working, learning_rate=0.3)
            self._round += 1
        return self

    def nothing(self, times: int, working: bool = True, dropped: bool = True) -> Watched:
        """Rounds over no samples: because this rank's were dropped, or because it had none."""
        for _ in range(times):
            if dropped:
                self.drop(8)
            self.see(0.0, count=0, working=working)
        return self

    def drop(self, count: int) -> None:
        self._watch.non_finite(count, self._round)


# ---- divergence


def test_divergence_is_told_once_and_with_numbers() -> None:
    watched = Watched().see(2.0, 2.0, 2.0, 300.0, 400.0)
    assert watched.said == []
    watched.see(500.0, 600.0, *[10.0**power for power in range(3, 30)])
    [said] = watched.said
    assert "in round 5 the gradient's norm is 500, over 100 times the smallest so far (2)" in said
    assert "learning rate 0.3" in said and "clip_norm" in said


def test_one_bad_batch_is_no_divergence() -> None:
    watched = Watched().see(1.0)
    for _ in range(10):
        watched.see(1e6, 1e6, 1.0)
    assert watched.said == []


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_ordinary_noise_is_no_divergence(spread: float) -> None:
    """Norms that vary by a factor of up to 2.7 a standard deviation, while training makes them ten times smaller."""
    dice = random.Random(0)
    watched = Watched()
    for number in range(3000):
        watched.see(math.exp(dice.gauss(0.0, spread) - 2.3 * number / 3000))
    assert watched.said == []


def test_a_growth_up_to_the_limit_is_no_divergence() -> None:
    assert Watched().see(1.0, *[0.99 * GROWTH] * 2).said == []
    assert len(Watched().see(1.0, *[1.01 * GROWTH] * 3).said) == 1


def test_of_what_all_see_the_first_rank_tells() -> None:
    assert Watched(rank=1).see(1.0, *[1e6] * 9).said == []


def test_each_rank_tells_once_of_what_it_has_dropped() -> None:
    watched = Watched(rank=3).see(1.0, 1.0)
    watched.drop(8)
    watched.drop(16)
    [said] = watched.said
    assert said.startswith("Rank 3 dropped 8 samples of round 2: their gradient has NaN or infinity.")


# ---- the end


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_rounds_without_a_finite_gradient_end_the_run(norm: float) -> None:
    watched = Watched().see(1.0).see(*[norm] * (USELESS_ROUNDS - 1))
    with pytest.raises(PacelineError, match=rf"diverged.*last {USELESS_ROUNDS} rounds.*round {USELESS_ROUNDS}.*resume"):
        watched.see(norm)


def test_rounds_over_no_samples_count_only_while_somebody_has_data() -> None:
    watched = Watched().nothing(USELESS_ROUNDS - 1).nothing(5 * USELESS_ROUNDS, working=False)
    watched.nothing(USELESS_ROUNDS - 1)
    with pytest.raises(PacelineError, match="diverged"):
        watched.nothing(1)


def test_ranks_that_wait_for_data_have_not_diverged() -> None:
    """What a lost rank has left goes out again when all have said what they know of it: rounds may pass until then."""
    watched = Watched().nothing(10 * USELESS_ROUNDS, dropped=False).nothing(USELESS_ROUNDS - 1)
    with pytest.raises(PacelineError, match="diverged"):
        watched.nothing(1)


@pytest.mark.parametrize("norm", [1.0, 0.0])
def test_one_finite_gradient_is_enough_to_go_on(norm: float) -> None:
    watched = Watched()
    for _ in range(10):
        watched.nothing(USELESS_ROUNDS - 1).see(norm)


def learner(rank: int, good_for: int) -> ReplicaLearner:
    """Its loss is not a number from some micro-batch on."""
    model, done = nn.Linear(2, 1), [0]
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)

    def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
        done[0] += 1
        loss = model(torch.ones(len(indices), 2)).square().mean()
        (loss * (math.nan if done[0] > good_for else 1.0)).backward()

    return ReplicaLearner(
        Replica(model, torch.optim.SGD(model.parameters(), lr=0.01)), backward, samples=400, rank=rank
    )


EXCHANGE_GRADIENTS = [
    "all-reduce",
    "balanced",
    "rennala",
    "rennala:target=16:unfinished=discard",
    "abs-sgd",
    "abs-sgd --paper",
    "abs-sgd:trigger=target:target=16",
    "abs-sgd:delay_cure=acco",
]


@pytest.mark.parametrize("strategy", EXCHANGE_GRADIENTS)
def test_a_run_whose_loss_is_no_number_ends(strategy: str) -> None:
    recorder = MemoryRecorder()
    learners = [learner(rank, good_for=5) for rank in range(3)]
    cluster = Cluster.from_speeds([1.0, 0.7, 0.3])
    with pytest.raises(PacelineError, match="no rank has brought one finite gradient"):
        simulate(create(strategy), cluster, micro_batch=4, data=Data(400, 50), learners=learners, recorder=recorder)
    warned = [event["rank"] for event in recorder.events if event["kind"] == "warning"]
    assert sorted(warned) == [0, 1, 2], "each rank says once that it drops its gradients"
    assert all(each.parameters.isfinite().all() for each in learners)


@pytest.mark.parametrize("strategy", EXCHANGE_GRADIENTS)
def test_one_rank_that_still_learns_keeps_the_run_going(strategy: str) -> None:
    learners = [learner(rank, good_for=10**9 if rank == 1 else 3) for rank in range(3)]
    run = simulate(
        create(strategy), Cluster.from_speeds([1.0, 0.7, 0.3]), micro_batch=4, data=Data(400, 3), learners=learners
    )
    assert run.samples_applied > 200 and run.samples_applied + run.samples_discarded == run.samples_computed == 1200


def test_sparse_gradients_are_told_once_and_by_one_rank() -> None:
    for rank, times in ((0, 1), (1, 0)):
        said: list[str] = []
        watch = Watch(rank, said.append)
        for _ in range(3):
            watch.sparse(dense_bytes=69_585_408, of_bytes=415_352_876)
        assert len(said) == times
        assert all("69.6 MB of the 415.4 MB that each rank brings to a round" in each for each in said)
