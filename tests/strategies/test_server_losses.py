"""Workers and group servers crash, in virtual time, and workers join: the run goes on, and no sample is used twice or
lost unsaid."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from paceline.backends.simulated import simulate
from paceline.backends.sources import Data
from paceline.errors import PacelineError
from paceline.record import Event, MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Crash, Join, Leave
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.summary import account
from paceline.testing import MICRO_BATCH, SAMPLES, Trial
from paceline.testing_losses import gone_again, starts

EPOCHS = 2
SECONDS = 3.0  # about as long as a run lasts
TEXTS = (
    "bsp",
    "ssp",
    "ssp:staleness=1:overlap=always",
    "dssp",
    "asp",
    "gssp",
    "gssp:exchange=gradient",
    "gssp:exchange=global",
    "gssp:parts=2",
    "gssp:compress=top-k:ratio=0.5",
)
ONE_SEED = os.environ.get("PACELINE_SWARM_SEED")


class Course:
    """A training in which ranks crash and join, and what came of it."""

    def __init__(
        self,
        text: str,
        speeds: list[float],
        servers: int,
        crashes: Sequence[Crash | Leave | Join],
        seed: int = 0,
        epochs: int = EPOCHS,
    ) -> None:
        self.epochs = epochs
        strategy = create(text)
        network = Network(latency=random.Random(seed).choice([0.0, 0.002, 0.02]), bandwidth=1e9)
        alone = Cluster.from_speeds(speeds, jitter=LogNormal(sigma=0.2), network=network, seed=seed)
        cluster = replace(alone, servers=servers, faults=tuple(crashes))
        self.servers = range(cluster.begins_with - servers, cluster.begins_with)
        self.trial = Trial(strategy, speeds=tuple(speeds), seed=seed)
        learners = [self.trial.learner(rank) for rank in range(cluster.ranks)]
        recorder = MemoryRecorder()
        simulate(
            strategy,
            cluster,
            micro_batch=MICRO_BATCH,
            data=Data(SAMPLES, epochs),
            learners=learners,
            recorder=recorder,
        )
        self.events = recorder.events
        self.parameters = [learner.parameters for learner in learners]

    @property
    def alive(self) -> list[int]:
        ranks = range(len(self.parameters))
        return [rank for rank in ranks if starts(self.events, rank) and not gone_again(self.events, rank)]

    @property
    def a_server_died(self) -> bool:
        return not set(self.servers).issubset(self.alive)

    @property
    def came(self) -> list[int]:
        """Ranks that have joined, and have computed."""
        came = {rank for rank in range(len(self.parameters)) if starts(self.events, rank) > (rank < self.servers.stop)}
        return sorted(rank for rank in came if of_rank([e for e in self.events if e["kind"] == "compute"], rank))

    def said(self, kind: str) -> list[str]:
        return [event["text"] for event in self.events if event["kind"] == kind]

    def check(self) -> None:
        books = account(self.events)
        assert books.errors == ()
        for rank in self.alive:
            assert torch.equal(self.parameters[rank], self.parameters[self.alive[0]]), "the living end alike"
        assert all(self.trial.used[index] >= self.epochs for index in range(SAMPLES)), "every sample was computed"
        if self.a_server_died:
            assert books.applied <= self.epochs * SAMPLES
        else:
            assert books.applied == self.epochs * SAMPLES, "a worker's death loses and doubles nothing"


def crash_of(draw: random.Random, ranks: int) -> list[Crash]:
    return [Crash(at=draw.uniform(0, SECONDS), rank=rank) for rank in draw.sample(range(ranks), draw.randint(1, 2))]


@pytest.mark.parametrize("first", [int(ONE_SEED)] if ONE_SEED else range(0, 160, 20))
def test_a_swarm_of_crashes(first: int) -> None:
    for seed in [first] if ONE_SEED else range(first, first + 20):
        draw = random.Random(seed)
        text, workers = draw.choice(TEXTS), draw.randint(2, 5)
        servers = create(text).servers_for(workers)
        speeds = [draw.choice([1.0, 0.7, 0.5, 0.25]) for _ in range(workers)]
        crashes = crash_of(draw, workers + servers)
        try:
            Course(text, speeds, servers, crashes, seed).check()
        except PacelineError as error:
            assert "The run cannot go on without rank" in str(error), f"PACELINE_SWARM_SEED={seed}: {error}"
        except AssertionError as error:
            raise AssertionError(f"PACELINE_SWARM_SEED={seed}: {text}, {crashes}: {error}") from error


@pytest.mark.parametrize("text", ["bsp", "ssp", "dssp", "asp"])
def test_nobody_waits_for_a_lost_worker(text: str) -> None:
    course = Course(text, [1.0, 1.0, 0.1], servers=1, crashes=[Crash(at=0.5, rank=2)], epochs=6)
    course.check()
    computed = [event for event in course.events if event["kind"] == "compute" and event["t"] > 0.6]
    assert {event["rank"] for event in computed} == {0, 1}
    gaps = [b["t"] - a["end"] for a, b in zip(of_rank(computed, 0), of_rank(computed, 0)[1:], strict=False)]
    assert max(gaps) < 0.1, "with the slow one gone, they keep each other's pace"


def of_rank(events: list[Event], rank: int) -> list[Event]:
    return [event for event in events if event["rank"] == rank]


def test_a_lost_servers_workers_join_the_group_that_is_nearest_in_speed() -> None:
    """Groups of speeds 1, 0.5 and 0.1; the server of the middle one is lost: 0.5 is nearer to 1 than to 0.1."""
    speeds = [1.0, 1.0, 0.5, 0.5, 0.1, 0.1]
    crash = Crash(at=0.8, rank=7)
    course = Course("gssp:warm_up=2:overlap=never:regroup=false", speeds, servers=3, crashes=[crash], epochs=8)
    course.check()
    late = [event for event in course.events if event["kind"] == "step" and event["t"] > 1.0 and event["samples"]]
    assert {event["rank"] for event in late if event["of"] in (2, 3)} == {6}
    assert {event["rank"] for event in late if event["of"] in (4, 5)} == {8}


def test_what_is_lost_with_a_server_is_told_in_samples() -> None:
    crash = Crash(at=0.7, rank=4)
    course = Course("gssp:grouping=0-1/2-3:overlap=never", [1.0] * 4, servers=2, crashes=[crash], epochs=10)
    course.check()
    told = [text for text in course.said("warning") if "samples are lost" in text]
    assert len(told) == 1 and "With server 4" in told[0]
    samples = int(told[0].split("the steps with ")[1].split()[0])
    window = 2 * MICRO_BATCH  # pushes of one window, and one push of each worker on its way
    assert 0 <= samples <= 2 * window


def test_without_its_only_server_a_run_ends_by_name() -> None:
    with pytest.raises(PacelineError, match="needs a group of servers that is whole"):
        Course("ssp", [1.0, 1.0], servers=1, crashes=[Crash(at=0.2, rank=2)])
    with pytest.raises(PacelineError, match="needs a worker"):
        Course("ssp", [1.0], servers=1, crashes=[Crash(at=0.2, rank=0)])
    with pytest.raises(PacelineError, match="needs a group of servers that is whole"):
        Course("gssp:exchange=global", [1.0, 1.0], servers=3, crashes=[Crash(at=0.2, rank=4)])
    with pytest.raises(PacelineError, match="needs a group of servers that is whole"):
        Course("gssp:exchange=global", [1.0, 1.0], servers=2, crashes=[Crash(at=0.2, rank=2)])


@pytest.mark.parametrize("text", TEXTS)
def test_a_worker_may_leave_at_any_time(text: str) -> None:
    """What it has pushed is used, what a compressor has kept back is pushed, and the others wait for it no more."""
    for seed in range(6):
        draw = random.Random(f"leave {text} {seed}")
        workers = draw.randint(2, 4)
        speeds = [draw.choice([1.0, 0.5, 0.25]) for _ in range(workers)]
        leaves = [
            Leave(at=draw.uniform(0, SECONDS / 2), rank=rank) for rank in draw.sample(range(workers), workers - 1)
        ]
        course = Course(text, speeds, create(text).servers_for(workers), leaves, seed)
        course.check()
        assert account(course.events).applied == EPOCHS * SAMPLES
        assert not [event for event in course.events if event["kind"] == "discard"]


def test_a_server_cannot_leave() -> None:
    with pytest.raises(PacelineError, match="Rank 2 cannot leave: the strategy bsp needs it"):
        Course("bsp", [1.0, 1.0], 1, [Leave(at=0.1, rank=2)])


# ---- newcomers


def joins_of(draw: random.Random, workers: int, servers: int, further: int) -> list[Crash | Join]:
    """Successors of crashed workers and further ranks; some of them crash in turn, and so may a server."""
    found: list[Crash | Join] = []
    for rank in draw.sample(range(workers), draw.randint(0, workers - 1)):
        at = draw.uniform(0, SECONDS)
        again = at + draw.uniform(0, 0.5)
        found += [Crash(at=at, rank=rank), Join(at=again, rank=rank)]
        if draw.random() < 0.4:
            found += [Crash(at=again + draw.uniform(0, 0.5), rank=rank), Join(at=again + 0.6, rank=rank)]
    for rank in range(workers + servers, workers + servers + further):
        at = draw.uniform(0, SECONDS)
        found.append(Join(at=at, rank=rank))
        if draw.random() < 0.4:
            found.append(Crash(at=at + draw.uniform(0.001, 1), rank=rank))
    if servers > 1 and draw.random() < 0.4:
        found.append(Crash(at=draw.uniform(0, SECONDS), rank=draw.randrange(workers, workers + servers)))
    return found


@pytest.mark.parametrize("first", [int(ONE_SEED)] if ONE_SEED else range(0, 100, 20))
def test_a_swarm_of_newcomers(first: int) -> None:
    came = 0
    for seed in [first] if ONE_SEED else range(first, first + 20):
        draw = random.Random(f"join {seed}")
        text, workers, further = draw.choice(TEXTS), draw.randint(1, 5), draw.randint(0, 2)
        servers = create(text).servers_for(workers)
        speeds = [draw.choice([1.0, 0.7, 0.5, 0.25]) for _ in range(workers + further)]
        faults = joins_of(draw, workers, servers, further)
        try:
            course = Course(text, speeds, servers, faults, seed)
            course.check()
            came += len(course.came)
        except PacelineError as error:
            assert "The run cannot go on without rank" in str(error), f"PACELINE_SWARM_SEED={seed}: {error}"
        except AssertionError as error:
            raise AssertionError(f"PACELINE_SWARM_SEED={seed}: {text}, {faults}: {error}") from error
    assert came or ONE_SEED


@pytest.mark.parametrize("text", ["bsp", "ssp:staleness=2", "dssp:low=1:high=3"])
def test_a_newcomer_begins_at_the_least_clock(text: str) -> None:
    """After each meeting nobody has finished more than the bound and one more iterations than one who goes on."""
    faults = [Crash(at=0.4, rank=1), Join(at=0.6, rank=1), Join(at=1.2, rank=4)]
    course = Course(text, [1.0, 1.0, 0.5, 1.0], servers=1, crashes=faults, epochs=12)
    course.check()
    assert course.came == [1, 4]
    periods: list[list[int]] = [[]]
    for event in of_rank(course.events, 3):
        if event["kind"] == "applied":
            periods.append([])
        elif event["kind"] == "step":
            periods[-1].append(event["of"])
    assert set(periods[0]) == {0, 1, 2} and set(periods[1]) == {0, 1, 2} and set(periods[2]) == {0, 1, 2, 4}
    bound = create(text).bound.high  # type: ignore[attr-defined]  # all here have one
    for period in periods[1:]:
        totals, done = Counter(period), Counter[int]()
        for worker in period:
            done[worker] += 1
            going_on = [done[other] for other in totals if done[other] < totals[other]]
            assert not going_on or done[worker] - min(going_on) <= bound + 1


def test_a_newcomer_is_placed_in_the_slowest_group_until_its_speed_is_known() -> None:
    """Groups of speeds 1 and 0.25, servers 4 and 5. A further worker of speed 1 belongs to the first in the end."""
    faults = [Join(at=1.5, rank=6)]
    course = Course("gssp:warm_up=3:overlap=never", [1.0, 1.0, 0.25, 0.25, 1.0], servers=2, crashes=faults, epochs=12)
    course.check()
    steps = [event for event in course.events if event["kind"] == "step" and event["samples"] and event["t"] > 1.5]
    groups = {worker: [event["rank"] for event in steps if event["of"] == worker] for worker in (0, 2, 6)}
    assert set(groups[0]) == {4} and set(groups[2]) == {5}
    assert groups[6] == sorted(groups[6], reverse=True) and groups[6].count(5) >= 3 and groups[6].count(4) > 3
    assert any(text.startswith("Worker 6 has joined") and text.endswith("group 0.") for text in course.said("note"))


def test_a_successor_belongs_where_the_one_before_it_did() -> None:
    faults = [Crash(at=1.5, rank=3), Join(at=1.8, rank=3)]
    course = Course("gssp:grouping=0+3/1-2:overlap=never", [1.0, 0.5, 0.5, 0.5], servers=2, crashes=faults, epochs=8)
    course.check()
    late = [event for event in course.events if event["kind"] == "step" and event["samples"] and event["t"] > 1.8]
    assert {event["rank"] for event in late if event["of"] == 3} == {4}, "as given, whatever its speed"


def test_a_newcomer_finds_a_group_when_the_one_it_asks_is_lost() -> None:
    """Server 2 serves the first group, at which further workers ask."""
    faults = [Crash(at=0.5, rank=2), Join(at=0.9, rank=4)]
    course = Course("gssp:grouping=0/1", [1.0, 1.0, 1.0], servers=2, crashes=faults, epochs=8)
    course.check()
    assert course.came == [4]


def test_a_lost_server_cannot_be_replaced() -> None:
    with pytest.raises(PacelineError, match="Rank 3 is a server, and a server that was lost cannot be replaced"):
        Course("gssp:grouping=0/1", [1.0, 1.0], 2, [Crash(at=0.2, rank=3), Join(at=0.4, rank=3)])
