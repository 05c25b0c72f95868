"""When the rounds of ABS-SGD close, who brings how much, and how long they last: exactly, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import pytest

from paceline.backends.learners import TimingLearner
from paceline.backends.simulated import Data, Simulation, simulate
from paceline.errors import PacelineError
from paceline.record import Event, MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import AbsSgd, create

MIXED = (1.0, 1.0, 0.5, 0.25)
LATENCY = 0.01


def timed(strategy: AbsSgd, cluster: Cluster, seconds: float = 80.0) -> tuple[Simulation, list[Event]]:
    recorder = MemoryRecorder()
    return simulate(strategy, cluster, seconds=seconds, recorder=recorder), recorder.events


def devices(speeds: Sequence[float], *, jitter: float = 0.0, latency: float = 0.0) -> Cluster:
    network = Network(latency=latency)
    times = LogNormal(jitter) if jitter else None
    return Cluster.from_speeds(speeds, micro_batch_seconds=1.0, jitter=times, network=network, seed=7)


@dataclass
class Part:
    """What one rank did for one round: when its micro-batches ended, how large they were, and when it joined."""

    ends: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    joined: float = inf


def parts_of(events: list[Event], workers: int) -> list[list[Part]]:
    """Of each rank, round by round."""
    parts: list[list[Part]] = [[Part()] for _ in range(workers)]
    for event in events:
        part = parts[event["rank"]][-1]
        if event["kind"] == "compute":
            part.ends.append(event["end"])
            part.counts.append(event["samples"])
        elif event["kind"] == "join":
            part.joined = event["t"]
            parts[event["rank"]].append(Part())
    return parts


def full_rounds(events: list[Event], workers: int) -> list[list[Part]]:
    """The parts of each round, up to the last in which everybody still had data."""
    rounds = list(zip(*(own[:-1] for own in parts_of(events, workers)), strict=True))
    whole = list(itertools.takewhile(lambda parts: all(part.counts for part in parts), rounds))
    assert len(whole) > 8
    return [list(parts) for parts in whole[:-1]]  # in the very last some had run out before it closed


def told(strategy: AbsSgd, parts: list[Part]) -> list[float]:
    """When each rank knows that the round may close, by the definition of the trigger."""
    least = strategy.min_micro_batches
    if strategy.trigger == "vote":
        return [part.ends[least - 1] for part in parts]
    if strategy.trigger == "fastest":
        own = [part.ends[least - 1] if len(part.ends) >= least else inf for part in parts]
        return [min(each, min(own) + LATENCY) for each in own]
    counted, done = 0, sorted(pair for part in parts for pair in zip(part.ends, part.counts, strict=True))
    for end, count in done:
        counted += count
        if counted >= int(strategy.target):
            return [end + LATENCY] * len(parts)
    raise AssertionError("the round was closed before it had its samples")


@pytest.mark.parametrize("sizes", ["fixed", "by-speed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_micro_batches": 3},
        {"trigger": "fastest", "min_micro_batches": 2},
        {"trigger": "fastest", "min_micro_batches": 5},
        {"trigger": "target", "target": 100},
        {"trigger": "target", "target": 400},
    ],
    ids=str,
)
def test_a_rank_joins_when_the_trigger_allows_it_and_the_sync_before_is_done(options: dict, sizes: str) -> None:
    """At the end of the first micro-batch after both, and never later: nobody ever stands still."""
    strategy = AbsSgd(**options, micro_batches=sizes)
    _, events = timed(strategy, devices(MIXED, jitter=0.3, latency=LATENCY), seconds=250.0)
    sync_done = 0.0
    for parts in full_rounds(events, 4):
        for part, may_close in zip(parts, told(strategy, parts), strict=True):
            assert part.joined == next(end for end in part.ends if end >= max(may_close, sync_done) - 1e-9)
        sync_done = max(part.joined for part in parts) + 6 * LATENCY  # a ring of four: 2·3 steps
    waits = [event for event in events if event["kind"] == "wait" and event["end"] < 240.0]
    assert waits == []


@pytest.mark.parametrize("target", [100, 400])
def test_no_round_but_the_last_has_fewer_samples_than_the_target(target: int) -> None:
    run, events = timed(AbsSgd(trigger="target", target=target), devices(MIXED, jitter=0.3, latency=LATENCY), 250.0)
    applied = [event["samples"] for event in events if event["kind"] == "applied" and event["rank"] == 0]
    rounds = [samples for samples in applied if samples]
    assert len(rounds) > 8 and min(rounds[:-2]) >= target
    assert run.samples_computed == run.samples_applied == sum(rounds)


def test_with_vote_everybody_brings_its_least_number_and_with_fastest_a_slow_one_need_not() -> None:
    cluster = devices(MIXED, jitter=0.3, latency=LATENCY)
    for strategy in (AbsSgd(min_micro_batches=3), AbsSgd(trigger="fastest", min_micro_batches=3)):
        _, events = timed(strategy, cluster, 250.0)
        rounds = full_rounds(events, 4)
        fewest = [min(len(part.ends) for part in parts) for parts in rounds]
        assert all(max(len(part.ends) for part in parts) >= 3 for parts in rounds)
        assert min(fewest) >= 3 if strategy.trigger == "vote" else min(fewest) < 3


@pytest.mark.parametrize(
    "text",
    [
        "abs-sgd",
        "abs-sgd --paper",
        "abs-sgd:min_micro_batches=1000",
        "abs-sgd:trigger=fastest:min_micro_batches=1000",
        "abs-sgd:trigger=target:target=100000",
        "abs-sgd:trigger=target:target=auto",
        "abs-sgd:delay_cure=acco",
    ],
)
def test_every_trigger_ends_when_the_data_does(text: str) -> None:
    run = simulate(create(text), devices(MIXED, jitter=0.3, latency=LATENCY), data=Data(1001, 3))
    assert run.samples_computed == run.samples_applied == 3003 and run.samples_discarded == 0


# ---- how long a round is


def lengths(events: list[Event]) -> list[float]:
    """Seconds between the steps of rank 0 that have samples."""
    times = [event["t"] for event in events if event["kind"] == "applied" and event["rank"] == 0 and event["samples"]]
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("latency", [0.0, 0.05])
def test_micro_batches_by_speed_make_rounds_as_long_as_one_of_the_fastest(latency: float) -> None:
    cluster = devices(MIXED, latency=latency)
    _, events = timed(AbsSgd(), cluster)
    settled = lengths(events)[2:-2]  # the first are over before any speed is known
    communication = 6 * latency
    assert len(settled) > 30 and max(settled) <= 1.0 + communication + 1e-9
    for rank, size in enumerate((8, 8, 4, 2)):
        sizes = [event["samples"] for event in events if event["kind"] == "compute" and event["rank"] == rank]
        assert set(sizes[8:]) == {size}, f"rank {rank}"


def test_on_a_slow_network_micro_batches_are_not_cut() -> None:
    """A round lasts six whole ones of the fastest anyway: shorter ones would only cost more, and nobody waits."""
    run, events = timed(AbsSgd(), devices(MIXED, latency=1.0), seconds=400.0)
    for rank, size in enumerate((32, 32, 16, 8)):
        sizes = [event["samples"] for event in events if event["kind"] == "compute" and event["rank"] == rank]
        third = len(sizes) // 3  # the first are cut as if the network were quick, the last ones are what is left
        assert set(sizes[third:-third]) == {size}, f"rank {rank}"
    assert max(lengths(events)[4:-2]) <= 6 * 1.0 + 1.0 + 1e-9
    assert run.share_of_ideal > 0.85, "but for the end, when the last round travels"


def test_fixed_micro_batches_make_rounds_as_long_as_one_of_the_slowest() -> None:
    _, events = timed(AbsSgd(micro_batches="fixed"), devices(MIXED))
    assert lengths(events)[1:-2] == pytest.approx([4.0] * len(lengths(events)[1:-2]))
    assert {event["samples"] for event in events if event["kind"] == "compute"} == {32}


@pytest.mark.parametrize("text", ["abs-sgd", "abs-sgd --paper"])
def test_a_rank_four_times_slower_brings_a_quarter_of_the_samples(text: str) -> None:
    run, _ = timed(create(text), devices((1, 1, 1, 0.25), jitter=0.2, latency=LATENCY), seconds=400.0)
    *fast, slow = (worker.applied for worker in run.workers)
    assert slow == pytest.approx(sum(fast) / 3 / 4, rel=0.03)
    assert run.share_of_ideal > 0.98


def test_a_rank_four_times_slower_makes_rounds_no_longer() -> None:
    alike, with_a_slow_one = (
        lengths(timed(AbsSgd(), devices(speeds))[1])[2:-2] for speeds in ((1,) * 4, (1, 1, 1, 0.25))
    )
    assert max(with_a_slow_one) <= max(alike) + 1e-9
    assert len(with_a_slow_one) > 30


def test_a_target_below_a_micro_batch_is_refused_before_the_first_round() -> None:
    with pytest.raises(PacelineError, match=r"target of 31 samples.*smaller than a micro-batch of 32.*at least 32"):
        timed(AbsSgd(trigger="target", target=31), devices(MIXED))
    timed(AbsSgd(trigger="target", target=32), devices(MIXED), seconds=5.0)


def test_micro_batches_that_cannot_be_cut_are_not_doubled_either() -> None:
    """A model with BatchNorm: a round stays one whole micro-batch of each worker, as in synchronous training."""
    recorder = MemoryRecorder()
    learners = [TimingLearner(divisible=False)] * 2
    cluster = Cluster.from_speeds([1.0, 1.0], micro_batch_seconds=1.0)
    simulate(AbsSgd(), cluster, micro_batch=8, seconds=30.0, learners=learners, recorder=recorder)
    joins = [event["samples"] for event in recorder.events if event["kind"] == "join" and event["samples"]]
    assert len(joins) > 40 and set(joins) == {8}
