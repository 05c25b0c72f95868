"""What a strategy asks of a node in virtual time: sizes of micro-batches, counting, notes, what is not used."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, simulate
from paceline.errors import PacelineError
from paceline.node import Gradient, Node
from paceline.record import MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import SlowDowns
from paceline.simulator.network import Network
from paceline.strategies import Strategy
from paceline.summary import account


@dataclass(frozen=True, kw_only=True)
class Cutter(Strategy):
    """Asks for micro-batches of these sizes, over and over, and remembers what it was given."""

    name: ClassVar[str] = "cutter"
    sizes: tuple[int | None, ...]
    given: list[tuple[int | None, Gradient]] = field(default_factory=list)

    async def worker(self, node: Node) -> None:
        for size in itertools.cycle(self.sizes):
            if node.finished:
                return
            batch = await node.gradient(size)
            if batch.count:
                self.given.append((size, Gradient(None, batch.count, list(batch.samples))))
            node.apply(await node.all_reduce(batch))


# ---- sizes


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(1, 12)), min_size=1, max_size=7),
    st.integers(1, 100),
    st.lists(st.sampled_from([1.0, 0.7, 0.3]), min_size=1, max_size=4),
)
def test_every_sample_is_used_once_whatever_the_sizes(
    sizes: list[int | None], samples: int, speeds: list[float]
) -> None:
    cutter = Cutter(sizes=tuple(sizes))
    run = simulate(cutter, Cluster.from_speeds(speeds), micro_batch=8, data=Data(samples, 2))
    assert run.samples_applied == run.samples_computed == 2 * samples
    used = [position for _, batch in cutter.given for part in batch.samples for position in part]
    assert sorted(used) == list(range(2 * samples))
    for size, batch in cutter.given:
        [part] = batch.samples
        assert batch.count == len(part) <= min(size or 8, 8)
        places = {(position // samples, position % samples // 8) for position in (part[0], part[-1])}
        assert len(places) == 1, "never across the end of a lease"


@pytest.mark.parametrize("sizes", [(None,), (1,), (3, 7, 2), (8, 4)])
def test_the_same_work_takes_the_same_time_however_it_is_cut(sizes: tuple[int | None, ...]) -> None:
    """A device that is slow for a while is so for the same samples."""

    def computing(*sizes: int | None) -> float:
        cluster = Cluster.from_speeds([1.0], jitter=SlowDowns(factor=10.0, probability=0.2), seed=4)
        return simulate(Cutter(sizes=sizes), cluster, micro_batch=8, data=Data(80, 3)).workers[0].computing

    assert computing(*sizes) == pytest.approx(computing(None), rel=1e-9)
    assert computing(None) != pytest.approx(30 * 0.02, rel=0.05), "chance has a part in it"


def test_a_time_limit_holds_within_a_lease_too() -> None:
    cutter = Cutter(sizes=(2,))
    run = simulate(cutter, Cluster.from_speeds([1.0], micro_batch_seconds=0.8), micro_batch=8, seconds=0.5)
    assert run.samples_computed == 6, "three of 0.2 s are begun before 0.5 s are over; a whole lease would be four"


def normalised(rank: int) -> ReplicaLearner:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    data = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))

    def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
        model(data[torch.from_numpy(indices)]).square().mean().backward()

    return ReplicaLearner(Replica(model, torch.optim.SGD(model.parameters(), lr=0.1)), backward, samples=50, rank=rank)


def test_a_model_with_batch_norm_keeps_whole_micro_batches() -> None:
    cutter = Cutter(sizes=(1, 3, None))
    ranks = [normalised(rank) for rank in range(2)]
    simulate(cutter, Cluster.from_speeds([1.0, 0.5]), micro_batch=8, data=Data(50, 2), learners=ranks)
    assert sorted(batch.count for _, batch in cutter.given) == [2, 2] + 12 * [8]


# ---- counting


@dataclass(frozen=True, kw_only=True)
class Counting(Strategy):
    """Each rank counts its one micro-batch, and then waits for the round to be over."""

    name: ClassVar[str] = "counting"
    target: int

    async def worker(self, node: Node) -> None:
        batch = await node.gradient()
        node.count(3, batch.count, self.target)
        while not node.signalled(3):
            await node.gradient()  # no data: lasts until the signal comes


@pytest.mark.parametrize(
    ("target", "ends"),
    [(1, [0.11, 0.2, 0.4]), (32, [0.11, 0.2, 0.4]), (33, [0.21, 0.21, 0.4]), (64, [0.21, 0.21, 0.4]), (96, [0.41] * 3)],
)
def test_a_round_is_signalled_exactly_when_the_counts_reach_the_target(target: int, ends: list[float]) -> None:
    cluster = Cluster.from_speeds([1, 0.5, 0.25], micro_batch_seconds=0.1, network=Network(latency=0.01))
    run = simulate(Counting(target=target), cluster, seconds=0.05)
    assert [worker.ended for worker in run.workers] == pytest.approx(ends)


def test_a_target_that_is_never_reached_stands_still_and_says_so() -> None:
    with pytest.raises(PacelineError, match="stands still"):
        simulate(Counting(target=97), Cluster.from_speeds([1, 0.5, 0.25]), seconds=0.01)


# ---- notes, and rounds that share a step


@dataclass(frozen=True, kw_only=True)
class Twice(Strategy):
    """Two rounds in flight, applied in one step."""

    name: ClassVar[str] = "twice"
    notes: list[tuple[float, ...]] = field(default_factory=list)

    async def worker(self, node: Node) -> None:
        while not node.finished:
            first = node.all_reduce(await node.gradient(), note=0.0)
            second = node.all_reduce(await node.gradient(), note=float(node.rank))
            total = await first
            self.notes.append(total.notes)
            total += await second
            self.notes.append(total.notes)
            node.apply(total)


def test_rounds_that_share_a_step_are_both_in_the_books() -> None:
    recorder, twice = MemoryRecorder(), Twice()
    run = simulate(twice, Cluster.from_speeds([1.0, 0.6, 0.3]), micro_batch=8, data=Data(203, 2), recorder=recorder)
    assert run.samples_applied == run.samples_computed == 406
    books = account(recorder.events)
    assert books.errors == () and books.in_flight == 0 and books.applied == 406
    applied = [(e["rank"], e["round"], e["t"]) for e in recorder.events if e["kind"] == "applied"]
    times = {(rank, number): t for rank, number, t in applied}
    assert len(times) == len(applied) and {number for _, number in times} == set(range(len(applied) // 3))
    assert all(times[rank, number] == times[rank, number ^ 1] for rank, number in times), "pairs in one step"
    assert run.rounds == len({e["round"] for e in recorder.events if e["kind"] == "applied" and e["samples"]})
    assert set(twice.notes) == {(0.0, 0.0, 0.0), (0.0, 1.0, 2.0)}, "no notes are zeros; of a sum, the newest round's"


# ---- what is not used


@dataclass(frozen=True, kw_only=True)
class Wasteful(Strategy):
    """Uses every other micro-batch."""

    name: ClassVar[str] = "wasteful"

    async def worker(self, node: Node) -> None:
        while not node.finished:
            batch = await node.gradient()
            node.discard(await node.gradient(5), "every other one")
            node.apply(await node.all_reduce(batch))


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.6, 0.3)])
def test_what_is_discarded_is_settled_and_in_the_books(speeds: tuple[float, ...]) -> None:
    recorder = MemoryRecorder()
    run = simulate(Wasteful(), Cluster.from_speeds(speeds), micro_batch=8, data=Data(203, 2), recorder=recorder)
    assert run.samples_computed == 406 == run.samples_applied + run.samples_discarded
    assert run.samples_discarded > 0 and run.samples_applied > 0
    books = account(recorder.events)
    assert books.errors == () and books.in_flight == 0
    assert (books.applied, books.discarded) == (run.samples_applied, run.samples_discarded)
    assert {event["reason"] for event in recorder.events if event["kind"] == "discard"} == {"every other one"}
