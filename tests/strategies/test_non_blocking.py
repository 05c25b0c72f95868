"""Non-blocking SGD: who ends a round, what counts, and what it gains (ALGORITHMS, section 3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.simulated import Simulation, simulate
from paceline.backends.sources import Data
from paceline.record import Event, MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import LateJoin
from paceline.simulator.jitter import Exponential, Jitter, SlowRounds
from paceline.strategies import AllReduce, NonBlocking
from paceline.summary import account

MICRO_BATCH = 4


def throughput(strategy: AllReduce | NonBlocking, cluster: Cluster, seconds: float) -> float:
    run = simulate(strategy, cluster, micro_batch=MICRO_BATCH, seconds=seconds)
    return run.samples_applied / run.seconds


@pytest.mark.parametrize(
    ("speeds", "jitter", "abort", "finish"),
    [
        ((0.5, *[1.0] * 7), None, 1.88, None),
        ((0.25, *[1.0] * 7), None, 3.62, None),
        ((*[0.5] * 4, *[1.0] * 4), None, 1.50, None),
        ((1.0,) * 8, SlowRounds(factor=6.0, probability=1 / 8), 3.85, 2.97),
        ((1.0,) * 8, Exponential(), 1.55, 1.18),
    ],
    ids=["one 2x", "one 4x", "half 2x", "random 6x", "exponential"],
)
def test_the_gain_over_blocking(
    speeds: tuple[float, ...], jitter: Jitter | None, abort: float, finish: float | None
) -> None:
    cluster = Cluster.from_speeds(speeds, micro_batch_seconds=1.0, jitter=jitter, seed=3)
    long = 16_000.0 if jitter else 800.0
    blocking = throughput(AllReduce(micro_batches=8), cluster, 4 * long)  # its rounds are longer: about as many of them
    assert throughput(NonBlocking(), cluster, long) / blocking == pytest.approx(abort, rel=0.03)
    if finish is not None:
        gain = throughput(NonBlocking(unfinished="finish"), cluster, long) / blocking
        assert gain == pytest.approx(finish, rel=0.03)


def recorded(strategy: NonBlocking, speeds: tuple[float, ...], data: Data) -> tuple[Simulation, list[Event]]:
    recorder = MemoryRecorder()
    cluster = Cluster.from_speeds(speeds, micro_batch_seconds=1.0)
    return simulate(strategy, cluster, micro_batch=MICRO_BATCH, data=data, recorder=recorder), recorder.events


def test_the_first_to_finish_its_batch_ends_the_round_and_what_is_finished_counts() -> None:
    _, events = recorded(NonBlocking(mini_batches=3), (1.0, 0.4), Data(4 * 3 * 40, 1))
    first = [event for event in events if event["kind"] == "join" and event["round"] == 0]
    assert [(event["rank"], event["t"], event["samples"]) for event in first] == [(0, 3.0, 12), (1, 3.0, 4)]
    given_up = [event for event in events if event["kind"] == "discard"]
    assert given_up[0]["rank"] == 1 and given_up[0]["t"] == 3.0
    assert given_up[0]["samples"] == 0, "half a second of two and a half: less than a sample of four"
    computed = [event for event in events if event["kind"] == "compute" and event["rank"] == 1]
    assert [(event["t"], event["end"]) for event in computed[:3]] == [(0.0, 2.5), (2.5, 3.0), (3.0, 5.5)]


def test_who_finishes_what_is_under_way_holds_the_others_up() -> None:
    _, events = recorded(NonBlocking(mini_batches=3, unfinished="finish"), (1.0, 0.4), Data(4 * 3 * 40, 1))
    first = [event for event in events if event["kind"] == "join" and event["round"] == 0]
    assert [(event["rank"], event["t"], event["samples"]) for event in first] == [(0, 3.0, 12), (1, 5.0, 8)]
    assert not [event for event in events if event["kind"] == "discard"]


def test_who_keeps_its_place_ends_a_round_too() -> None:
    """Of the slow one's batch of three one mini-batch is done in a round; so it ends every third round."""
    for carry, short_rounds in ((False, 0), (True, 3)):
        _, events = recorded(NonBlocking(mini_batches=3, carry=carry), (1.0, 0.5), Data(4 * 3 * 40, 1))
        joins = [event for event in events if event["kind"] == "join" and event["rank"] == 0 and event["samples"]]
        assert sum(event["samples"] < 12 for event in joins[:-1]) >= short_rounds


@pytest.mark.parametrize("topology", ["ring-all-reduce", "d-psgd"])
def test_a_round_may_be_over_before_a_rank_has_begun(topology: str) -> None:
    late = LateJoin(rank=1, at=100.0)
    cluster = Cluster.from_speeds([1.0] * 3, micro_batch_seconds=1.0, faults=[late])
    run = simulate(NonBlocking(topology=topology), cluster, micro_batch=MICRO_BATCH, data=Data(400, 1))
    assert run.samples_applied == 400


@settings(max_examples=30, deadline=None)
@given(
    speeds=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=5),
    mini_batches=st.integers(1, 5),
    finish=st.booleans(),
    carry=st.booleans(),
    samples=st.integers(1, 150),
)
def test_every_sample_is_used_exactly_once_though_some_are_computed_twice(
    speeds: list[float], mini_batches: int, finish: bool, carry: bool, samples: int
) -> None:
    strategy = NonBlocking(mini_batches=mini_batches, unfinished="finish" if finish else "abort", carry=carry)
    run, events = recorded(strategy, tuple(speeds), Data(samples, 2))
    assert run.samples_applied == 2 * samples
    books = account(events)
    assert books.errors == () and books.in_flight == 0 and books.applied == 2 * samples
    assert not finish or books.discarded == 0
