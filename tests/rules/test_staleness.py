"""Who may start: nobody gets further ahead than the bound says, whatever the order, and nobody waits for ever."""

from __future__ import annotations

import heapq
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.rules.grouping import equal
from paceline.rules.staleness import (
    Bound,
    Clocks,
    Dynamic,
    Fixed,
    Unbounded,
    delayed_learning_rate,
    further_iterations,
)

bounds = st.one_of(
    st.integers(0, 4).map(Fixed),
    st.just(Unbounded()),
    st.tuples(st.integers(0, 3), st.integers(0, 5)).map(lambda pair: Dynamic(pair[0], sum(pair))),
)
# What happens, to which of those it can happen to, and how long after the last event.
KINDS = ("join", "leave", "ask", "finish")
PAUSES = (0.0, 0.25, 1.0, 3.0)


def many_events(seed: int, lazy: int) -> list[tuple[str, int, float]]:
    """More than hypothesis makes, and leads that build up: those before number `lazy` seldom get to do something."""
    chance = Random(seed)
    whats = chance.choices(KINDS, weights=(1, 1, 30, 30), k=400)
    return [(what, chance.choice((0, lazy, lazy, lazy + 1)), chance.choice(PAUSES)) for what in whats]


events = st.one_of(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.sampled_from(PAUSES)), max_size=60),
    st.builds(many_events, st.integers(0, 10_000), st.integers(0, 3)),
)


class Group:
    """A group in which events of any order happen, as far as workers keep to what they are told."""

    def __init__(self, bound: Bound) -> None:
        self.clocks = Clocks(bound)
        self.running: set[int] = set()
        self.asked: list[int] = []
        self.now, self.next = 0.0, 0
        self.told: list[object] = []

    def happens(self, what: str, which: int, after: float) -> None:
        self.now += after
        workers = self.clocks.workers
        able = {
            "ask": [worker for worker in workers if worker not in self.running],
            "finish": sorted(self.running),
            "leave": workers,
        }
        if what == "join":
            least = self.clocks.slowest
            self.clocks.join(self.next)
            assert self.clocks.clock(self.next) == least == self.clocks.slowest
            self.next += 1
        elif able[what]:
            self._does(what, able[what][which % len(able[what])])

    def _does(self, what: str, worker: int) -> None:
        if what == "ask":
            may = self.clocks.may_start(worker)
            assert self.clocks.ask(worker) == may
            if may:
                self.running.add(worker)
            elif worker not in self.asked:
                self.asked.append(worker)
        elif what == "finish":
            self.running.remove(worker)
            self.clocks.finished(worker, self.now)
        else:
            self.clocks.leave(worker)
            self.running.discard(worker)
            self.asked = [each for each in self.asked if each != worker]
        released = self.clocks.released()
        assert released == [each for each in self.asked if each in released], "not in the order of asking"
        self.asked = [each for each in self.asked if each not in released]
        self.running |= set(released)
        self.told.append((what, worker, released))

    def is_sound(self) -> None:
        clocks = self.clocks
        for worker in clocks.workers:
            assert clocks.clock(worker) - clocks.slowest <= clocks.bound.high + 1
            if clocks.clock(worker) == clocks.slowest:
                assert clocks.may_start(worker), "the slowest never waits"
        for worker in self.asked:
            assert not clocks.may_start(worker), "a worker that may start was not woken"


@given(bounds, events)
def test_nobody_is_ever_further_ahead_and_whoever_may_start_is_woken(
    bound: Bound, happened: list[tuple[str, int, float]]
) -> None:
    group = Group(bound)
    for event in [("join", 0, 0.0)] * 3 + happened:
        group.happens(*event)
        group.is_sound()
    assert not group.clocks.released(), "each is told once"


@given(st.integers(0, 4), events)
def test_a_range_of_one_bound_is_that_bound(bound: int, happened: list[tuple[str, int, float]]) -> None:
    fixed, dynamic = Group(Fixed(bound)), Group(Dynamic(bound, bound))
    for event in [("join", 0, 0.0)] * 3 + happened:
        fixed.happens(*event)
        dynamic.happens(*event)
    assert fixed.told == dynamic.told and fixed.asked == dynamic.asked


@given(bounds, events)
def test_a_group_goes_on_from_its_checkpoint_as_it_would_have(
    bound: Bound, happened: list[tuple[str, int, float]]
) -> None:
    group = Group(bound)
    for event in [("join", 0, 0.0)] * 3 + happened:
        group.happens(*event)
    resumed = Clocks(bound)
    resumed.join(99)
    resumed.load_state_dict(json.loads(json.dumps(group.clocks.state_dict())))
    assert resumed.workers == group.clocks.workers and resumed.slowest == group.clocks.slowest
    for worker in resumed.workers:
        assert resumed.clock(worker) == group.clocks.clock(worker)
        assert resumed.ask(worker) == group.clocks.may_start(worker)
    assert resumed.state_dict() == group.clocks.state_dict() and not resumed.released()


def play(times: dict[int, list[float]], bound: Bound, until: float) -> tuple[dict[int, int], dict[int, float]]:
    """Workers that take the given seconds for their iterations, over and over: how many each finishes, and how long it
    waits."""
    group = Clocks(bound)
    for worker in times:
        group.join(worker)
    heap = [(seconds[0], worker) for worker, seconds in times.items()]
    heapq.heapify(heap)
    stopped: dict[int, float] = {}
    waited = dict.fromkeys(times, 0.0)
    while heap and heap[0][0] <= until:
        now, worker = heapq.heappop(heap)
        group.finished(worker, now)
        ready = [worker] if group.ask(worker) else []
        if not ready:
            stopped[worker] = now
        for each in ready + group.released():
            waited[each] += now - stopped.pop(each, now)
            seconds = times[each]
            heapq.heappush(heap, (now + seconds[group.clock(each) % len(seconds)], each))
    for worker, since in stopped.items():
        waited[worker] += until - since
    return {worker: group.clock(worker) for worker in times}, waited


def test_lock_step_is_as_fast_as_the_slowest_and_no_bound_as_all_together() -> None:
    times = {0: [1.0], 1: [1.0], 2: [2.0], 3: [4.0]}
    assert play(times, Fixed(0), 40.0)[0] == {0: 10, 1: 10, 2: 10, 3: 10}
    assert play(times, Fixed(3), 43.0)[0] == {0: 14, 1: 14, 2: 14, 3: 10}, "s + 1 ahead, and no more"
    assert play(times, Unbounded(), 40.0) == ({0: 40, 1: 40, 2: 20, 3: 10}, dict.fromkeys(times, 0.0))


def test_groups_are_as_fast_as_expected() -> None:
    """Four classes 1 : 1.5 : 2 : 3 of four workers, s = 3: 1.875 times SSP, less what leads of s + 1 add to both."""
    times = {worker: [(1.0, 1.5, 2.0, 3.0)[worker // 4]] for worker in range(16)}
    together = sum(play(times, Fixed(3), 1200.0)[0].values())
    measured = {worker: seconds[0] for worker, seconds in times.items()}
    grouping = equal(measured, 4)
    apart = [play({worker: times[worker] for worker in group}, Fixed(3), 1200.0)[0] for group in grouping.groups]
    assert grouping.throughput_over_ssp(measured) == 1.875
    assert sum(sum(each.values()) for each in apart) / together == pytest.approx(1.875, rel=0.01)


quarters = st.integers(1, 40).map(lambda quarter: quarter / 4)  # exact in floats, so that the oracle is exact as well


@given(quarters, quarters, quarters, quarters, st.integers(0, 12))
def test_the_fastest_stops_where_it_waits_least(
    now: float, interval: float, completion: float, slowest_interval: float, most: int
) -> None:
    def wait(r: int) -> float:
        end = completion
        while end < now + r * interval:
            end += slowest_interval
        while end - slowest_interval >= now + r * interval:
            end -= slowest_interval
        return end - now - r * interval

    r = further_iterations(now, interval, completion, slowest_interval, most)
    assert 0 <= r <= most and wait(r) == min(map(wait, range(most + 1)))
    assert all(wait(r) < wait(less) for less in range(r)), "of equal waits the smallest"


def test_rounding_does_not_make_a_meeting_a_whole_wait() -> None:
    assert further_iterations(0.1, 0.1, 0.3, 0.3, most=2) == 2, "0.1 + 2 · 0.1 is above 0.3"


def test_a_dynamic_bound_by_hand() -> None:
    """Worker 1 ends iterations at 5, 10, 15, …; worker 0 takes 1 s. While nothing is known of worker 1, the bound is 1.
    At 11 worker 0 is at clock 4 and worker 1 at 2; its next completion is in 4 s, so r = 4."""
    group = Clocks(Dynamic(1, 9))
    group.join(0)
    group.join(1)
    for now in (1.0, 2.0):
        group.finished(0, now)
    assert not group.ask(0), "nothing is known of the slowest yet"
    group.finished(1, 5.0)
    assert group.released() == [0]
    group.finished(0, 6.0)
    assert not group.ask(0)
    group.finished(1, 10.0)
    assert group.released() == [0]
    group.finished(0, 11.0)  # it took 1 s, not the 5 s since it had stopped
    for now in (12.0, 13.0, 14.0, 15.0):
        assert group.ask(0)
        group.finished(0, now)
    assert not group.ask(0), "four more: from 11 to the slowest's completion at 15"
    for now in (15.0, 20.0, 25.0, 30.0):
        assert group.released() == []
        group.finished(1, now)
    assert (group.clock(0), group.clock(1)) == (8, 6) and group.released() == []
    group.finished(1, 35.0)
    assert group.released() == [0], "it waits until it is one ahead"


def test_a_dynamic_bound_bridges_pauses_of_the_slowest() -> None:
    """Both do ten iterations in 13 s, but every tenth of worker 1 takes 4 s: with a bound of 1 both lose time by it."""
    times = {0: [1.3], 1: [1.0] * 9 + [4.0]}
    tight, dynamic = (play(times, bound, 1300.0) for bound in (Fixed(1), Dynamic(1, 8)))
    assert dynamic == ({0: 1000, 1: 1000}, {0: 0.0, 1: 0.0})
    assert tight[0] == {0: 992, 1: 991} and min(tight[1].values()) > 9


def test_only_the_fastest_goes_further() -> None:
    """From 8 on everybody's interval is known (1, 1.5 and 4 s). Worker 0 may go on until 12, when worker 2, the last of
    the slowest, ends; worker 1 is behind worker 0 when it ends, and waits."""
    group = Clocks(Dynamic(0, 8))
    for worker in range(3):
        group.join(worker)
    for start in (0.0, 4.0):
        for worker, seconds in enumerate((1.0, 1.5, 4.0)):
            group.finished(worker, start + seconds)
            assert group.ask(worker) == (worker == 2)
        assert group.released() == [0, 1]
    for now in (9.0, 10.0):
        group.finished(0, now)
        assert group.ask(0)
    group.finished(1, 10.5)
    assert not group.ask(1)
    for now in (11.0, 12.0):
        assert group.ask(0)
        group.finished(0, now)
    assert not group.ask(0)


def test_who_leaves_is_waited_for_no_longer() -> None:
    group = Clocks(Fixed(0))
    for worker in (3, 1, 2):
        group.join(worker)
    for worker in (2, 3):
        group.finished(worker, 1.0)
        assert not group.ask(worker)
    group.leave(1)
    assert group.released() == [2, 3]
    group.finished(2, 2.0)
    assert not group.ask(2)
    group.leave(2)
    group.finished(3, 3.0)
    assert group.released() == [], "who waits and leaves is not named"
    group.leave(3)
    group.join(3)
    assert (group.workers, group.clock(3), group.may_start(3)) == ((3,), 0, True)


def test_who_asks_again_is_told_once() -> None:
    group = Clocks(Fixed(0))
    group.join(0)
    group.join(1)
    group.finished(0, 1.0)
    assert not group.ask(0) and not group.ask(0)
    group.finished(1, 2.0)
    assert group.ask(0) and group.released() == []


def test_what_cannot_be_is_told_why() -> None:
    group = Clocks(Fixed(0))
    group.join(0)
    group.join(1)
    with pytest.raises(PacelineError, match=r"Worker 1 is in the group already.*leave first"):
        group.join(1)
    for call in (group.leave, group.ask, group.may_start, group.clock):
        with pytest.raises(PacelineError, match=r"Worker 7 is not in this group; it has 0, 1\."):
            call(7)
    group.finished(0, 1.0)
    with pytest.raises(PacelineError, match=r"not allowed to start.*at clock 1 and the slowest of its group at 0"):
        group.finished(0, 2.0)
    group.ask(0)
    group.finished(1, 2.0)
    with pytest.raises(PacelineError, match="not allowed to start"):
        group.finished(0, 3.0)  # it waits: nobody has told it yet
    with pytest.raises(PacelineError, match="has nobody"):
        Clocks(Fixed(0)).ask(0)


@pytest.mark.parametrize(("low", "high"), [(-1, 3), (4, 3)])
def test_wrong_bounds_are_told_why(low: int, high: int) -> None:
    with pytest.raises(PacelineError, match=f"between {low} and {high}"):
        Dynamic(low, high)
    with pytest.raises(PacelineError, match="-1 is below 0"):
        Fixed(-1)


@given(st.floats(1e-6, 10.0), st.integers(1, 64), st.integers(0, 10_000))
def test_what_is_later_than_a_round_of_all_workers_counts_less(rate: float, workers: int, delay: int) -> None:
    found = delayed_learning_rate(rate, workers, delay)
    if delay <= workers:
        assert found == pytest.approx(rate)
    else:
        assert found * delay == pytest.approx(rate * workers) and found < rate
