"""Ranks that step alone, in virtual time: what `settle`, `mean_model` and `called_together` promise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, simulate
from paceline.errors import PacelineError
from paceline.node import Gradient, Node
from paceline.record import Event, MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import Strategy
from paceline.summary import account

SAMPLES, MICRO_BATCH = 203, 8


@dataclass(frozen=True, kw_only=True)
class Alone(Strategy):
    """Steps alone, so many times between two meetings; what it saw there is kept for the test."""

    name: ClassVar[str] = "alone"
    between: int = 10**9
    sends: int = 0
    waste: bool = False
    empty: bool = False
    meetings: dict[int, list[tuple[Tensor, bool]]] = field(default_factory=dict)

    @property
    def steps_alone(self) -> bool:
        return True

    async def worker(self, node: Node) -> None:
        seen = self.meetings.setdefault(node.rank, [])
        while not node.finished:
            for _ in range(self.between):
                own = await node.gradient()
                if not own.count:
                    break
                if self.waste:
                    node.discard(await node.gradient(3), "for the test")
                for _ in range(self.sends):
                    node.send(node.rank, "note", node.parameters)
                node.apply(own)
                node.settle(own)
                if self.empty:
                    node.settle(Gradient(None, 0))
                assert not node.called_together, "in virtual time nobody calls"
            node.adopt(await node.mean_model())
            seen.append((node.parameters.clone(), node.finished))


def learner(rank: int, start: float = 0.0, bad: int = 0) -> ReplicaLearner:
    """Three numbers that go by their gradients; those of the first `bad` samples are none."""
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.constant_(model.weight, start)
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:bad] = float("nan")

    def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
        (model(x[torch.from_numpy(indices)]) - 1).square().mean().backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return ReplicaLearner(Replica(model, optimizer), backward, samples=SAMPLES, rank=rank)


def cluster(*speeds: float, seed: int = 0) -> Cluster:
    jitter, network = LogNormal(0.2), Network(latency=0.002, bandwidth=1e9)
    return Cluster.from_speeds(speeds, jitter=jitter, network=network, seed=seed)


def events_of(recorder: MemoryRecorder, kind: str, rank: int | None = None) -> list[Event]:
    return [event for event in recorder.events if event["kind"] == kind and rank in (None, event["rank"])]


# ---- settling


def test_a_step_alone_is_a_round_of_its_own_and_its_samples_are_used() -> None:
    recorder, told = MemoryRecorder(), list[tuple[int, float, int]]()
    run = simulate(
        Alone(),
        cluster(1, 0.5, 0.25),
        micro_batch=MICRO_BATCH,
        data=Data(SAMPLES, 2),
        recorder=recorder,
        on_applied=lambda rank, t, samples: told.append((rank, t, samples)),
    )
    books = account(recorder.events)
    assert books.errors == () and books.in_flight == 0 and books.applied == run.samples_applied == 2 * SAMPLES
    for rank, totals in enumerate(run.workers):
        steps = events_of(recorder, "step", rank)
        assert [event["round"] for event in steps] == list(range(len(steps))), "counted by each rank for itself"
        assert sum(event["samples"] for event in steps) == totals.applied
    assert run.rounds == max(len(events_of(recorder, "step", rank)) for rank in range(3))
    made = [(event["rank"], event["t"]) for event in events_of(recorder, "step")]
    assert [(rank, t) for rank, t, _ in told][: len(made)] == made, "told after each, and after the meeting"
    assert len(told) == len(made) + 3
    counts = [samples for _, _, samples in told[: len(made)]]
    assert counts == sorted(counts) and counts[-1] == 2 * SAMPLES, "as many as all ranks have used"


def test_after_a_meeting_every_rank_knows_how_many_samples_all_have_used() -> None:
    told: dict[int, int] = {}
    simulate(
        Alone(),
        cluster(1, 0.5, 0.25),
        micro_batch=MICRO_BATCH,
        data=Data(SAMPLES, 2),
        on_applied=lambda rank, t, samples: told.update({rank: samples}),
    )
    assert set(told.values()) == {2 * SAMPLES}


def test_a_step_over_nothing_is_a_round_too() -> None:
    recorder = MemoryRecorder()
    run = simulate(
        Alone(empty=True), cluster(1, 0.5), micro_batch=MICRO_BATCH, data=Data(SAMPLES, 1), recorder=recorder
    )
    sizes = [event["samples"] for event in events_of(recorder, "step", 0)]
    assert sizes[1::2] == [0] * (len(sizes) // 2) and all(sizes[::2])
    assert run.samples_applied == SAMPLES and account(recorder.events).errors == ()


def test_what_was_sent_since_the_last_step_is_told_with_the_next() -> None:
    recorder, ranks = MemoryRecorder(), [learner(rank) for rank in range(2)]
    run = simulate(
        Alone(sends=2),
        cluster(1, 0.5),
        micro_batch=MICRO_BATCH,
        data=Data(SAMPLES, 1),
        learners=ranks,
        recorder=recorder,
    )
    assert {event["bytes"] for event in events_of(recorder, "step")} == {2 * 3 * 8}
    joined = sum(event["bytes"] for event in events_of(recorder, "join"))
    assert run.bytes_sent == joined + 48 * len(events_of(recorder, "step"))


def test_what_is_discarded_between_steps_is_settled_with_the_next() -> None:
    recorder = MemoryRecorder()
    run = simulate(
        Alone(waste=True), cluster(1, 0.6, 0.3), micro_batch=MICRO_BATCH, data=Data(SAMPLES, 2), recorder=recorder
    )
    assert run.samples_discarded > 0 and run.samples_applied + run.samples_discarded == 2 * SAMPLES
    books = account(recorder.events)
    assert books.errors == () and books.in_flight == 0 and books.discarded == run.samples_discarded


def test_a_gradient_that_is_no_number_moves_nothing_and_is_counted() -> None:
    recorder, ranks, start = MemoryRecorder(), [learner(rank, bad=20) for rank in range(2)], torch.zeros(3)
    run = simulate(
        Alone(),
        cluster(1, 0.5),
        micro_batch=MICRO_BATCH,
        data=Data(SAMPLES, 1),
        learners=ranks,
        recorder=recorder,
    )
    dropped = events_of(recorder, "discard")
    assert {event["reason"] for event in dropped} == {"non-finite gradient"}
    assert run.samples_discarded == sum(event["samples"] for event in dropped) >= 20
    assert run.samples_applied + run.samples_discarded == SAMPLES
    empty = [event for event in events_of(recorder, "step") if not event["samples"]]
    assert len(empty) == len(dropped), "the round of each is over all the same"
    assert torch.isfinite(ranks[0].parameters).all() and not torch.equal(ranks[0].parameters, start.double())


@dataclass(frozen=True, kw_only=True)
class Careless(Strategy):
    """Steps and never settles."""

    name: ClassVar[str] = "careless"

    async def worker(self, node: Node) -> None:
        while (own := await node.gradient()).count:
            node.apply(own)


def test_a_step_that_nobody_settles_is_left_over_and_said_to_be() -> None:
    recorder = MemoryRecorder()
    run = simulate(Careless(), cluster(1, 0.5), micro_batch=MICRO_BATCH, data=Data(80, 1), recorder=recorder)
    assert run.samples_applied == 0 and run.samples_discarded == run.samples_computed >= 80
    assert {event["reason"] for event in events_of(recorder, "discard")} == {"left over by the strategy"}


# ---- the mean of all models


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=5), st.integers(0, 100))
def test_the_mean_gives_every_rank_the_same_weight(starts: list[float], seed: int) -> None:
    """However many samples each has used: ranks far apart in speed, and a learning rate of zero."""
    ranks = [learner(rank, start) for rank, start in enumerate(starts)]
    for each in ranks:
        each.replica.optimizer.param_groups[0]["lr"] = 0.0
    strategy = Alone()
    speeds = [0.2 + 0.8 * (rank % 2) for rank in range(len(starts))]
    run = simulate(
        strategy, cluster(*speeds, seed=seed), micro_batch=MICRO_BATCH, data=Data(SAMPLES, 1), learners=ranks
    )
    mean = torch.full((3,), sum(starts) / len(starts), dtype=torch.float64)
    for rank in range(len(starts)):
        [(met, finished)] = strategy.meetings[rank]
        torch.testing.assert_close(met, mean, rtol=1e-12, atol=1e-12)
        assert finished and torch.equal(met, strategy.meetings[0][0][0]), "the same bits on all"
    assert run.samples_applied == SAMPLES


@pytest.mark.parametrize("between", [1, 3])
def test_meetings_are_rounds_of_all_over_no_samples_and_the_last_is_the_end(between: int) -> None:
    recorder, ranks, strategy = MemoryRecorder(), [learner(rank) for rank in range(3)], Alone(between=between)
    simulate(
        strategy,
        cluster(1, 0.7, 0.3),
        micro_batch=MICRO_BATCH,
        data=Data(SAMPLES, 1),
        learners=ranks,
        recorder=recorder,
    )
    met = strategy.meetings
    assert len(met[0]) == len(met[1]) == len(met[2]) > 3
    for number in range(len(met[0])):
        assert all(torch.equal(met[rank][number][0], met[0][number][0]) for rank in range(3))
        assert {met[rank][number][1] for rank in range(3)} == {number == len(met[0]) - 1}, "known by all at once"
    for kind in ("join", "applied"):
        for rank in range(3):
            rounds = events_of(recorder, kind, rank)
            assert [event["round"] for event in rounds] == list(range(len(met[0])))
            assert {event["samples"] for event in rounds} == {0}
    assert account(recorder.events).errors == ()


@dataclass(frozen=True, kw_only=True)
class Confused(Strategy):
    """One rank averages models where the others add gradients."""

    name: ClassVar[str] = "confused"

    async def worker(self, node: Node) -> None:
        own = await node.gradient()
        if node.rank == 1:
            await node.mean_model()
        else:
            await node.all_reduce(own)


def test_a_mean_of_models_is_no_all_reduce() -> None:
    with pytest.raises(PacelineError, match=r"different orders: number 0 is .* on rank .* and .* on rank"):
        simulate(Confused(), Cluster.from_speeds([1, 1, 1]), seconds=1.0)
