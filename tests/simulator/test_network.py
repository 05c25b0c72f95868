"""What communication costs, by the formulas; links keep order; a shared link is a queue."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as some

from paceline.errors import PacelineError
from paceline.simulator.network import Network, Traffic


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 1000])
def test_all_reduce_costs(workers: int) -> None:
    latency, bandwidth, size = 0.001, 1e6, 500_000
    ring = Network(latency, bandwidth)
    tree = Network(latency, bandwidth, all_reduce="tree")
    shared = Network(latency, bandwidth, shared=True)
    expected = 2 * (workers - 1) * (latency + size / (workers * bandwidth))
    assert ring.all_reduce_seconds(workers, size) == pytest.approx(expected)
    steps = 2 * ceil(log2(workers))
    assert tree.all_reduce_seconds(workers, size) == pytest.approx(steps * (latency + size / bandwidth))
    whole = 2 * (workers - 1) * (latency + size / bandwidth)
    assert shared.all_reduce_seconds(workers, size) == pytest.approx(whole), "all traffic passes one link"
    assert ring.all_gather_seconds(workers, 8) == pytest.approx((workers - 1) * (latency + 8 / bandwidth))


def test_alone_and_free_cost_nothing() -> None:
    assert Network(1.0, 1.0).all_reduce_seconds(1, 100) == 0
    assert Network(1.0, 1.0).all_gather_seconds(1, 100) == 0
    assert Network().all_reduce_seconds(1000, 10**9) == 0


def test_messages_on_one_link_follow_each_other_and_other_links_do_not_care() -> None:
    traffic = Traffic(Network(latency=0.5, bandwidth=100.0), 3)
    assert traffic.arrival(0, 1, 100, now=0.0) == 1.5
    assert traffic.arrival(0, 1, 100, now=0.0) == 2.5, "the second waits until the first has left"
    assert traffic.arrival(1, 0, 100, now=0.0) == 1.5
    assert traffic.arrival(0, 2, 100, now=0.0) == 1.5


def test_a_shared_link_is_one_queue_for_all() -> None:
    traffic = Traffic(Network(latency=0.5, bandwidth=100.0, shared=True), 3)
    assert traffic.arrival(0, 1, 100, now=0.0) == 1.5
    assert traffic.arrival(2, 0, 100, now=0.0) == 2.5
    assert traffic.collective_end("all-reduce", 50, now=0.0) == 2.0 + 4 * 0.5 + 4 * 0.5
    assert traffic.arrival(0, 2, 100, now=0.0) == 6.0 + 1.5


def test_collectives_run_one_after_the_other() -> None:
    traffic = Traffic(Network(latency=0.5), 2)
    assert traffic.collective_end("all-reduce", 0, now=1.0) == 2.0
    assert traffic.collective_end("all-gather", 0, now=1.0) == 2.5
    assert traffic.collective_end("all-reduce", 0, now=9.0) == 10.0


@given(
    some.lists(some.tuples(some.integers(0, 2), some.integers(0, 2), some.integers(0, 1000), some.floats(0, 2))),
    some.booleans(),
)
def test_links_keep_order(sent: list[tuple[int, int, int, float]], shared: bool) -> None:
    traffic = Traffic(Network(latency=0.1, bandwidth=300.0, shared=shared), 3)
    now, last = 0.0, dict[tuple[int, int], float]()
    for sender, receiver, size, pause in sent:
        now += pause
        arrival = traffic.arrival(sender, receiver, size, now)
        assert arrival >= max(last.get((sender, receiver), 0.0), now + 0.1)
        last[sender, receiver] = arrival


@pytest.mark.parametrize(
    "wrong", [{"latency": -1.0}, {"bandwidth": 0}, {"all_reduce": "star"}, {"shared": 1}, {"latency": True}]
)
def test_impossible_networks_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PacelineError, match=next(iter(wrong))):
        Network(**wrong)
