"""Virtual time is totally ordered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from paceline.simulator.clock import Clock


@given(some.lists(some.floats(0, 10), max_size=50))
def test_events_happen_in_order_of_time_then_of_planning(times: list[float]) -> None:
    clock, seen = Clock(), list[int]()
    for number, time in enumerate(times):
        clock.at(time, seen.append, number)
    clock.run()
    assert seen == sorted(range(len(times)), key=lambda number: times[number])
    assert clock.events == len(times)


def test_what_an_event_plans_for_now_happens_after_what_was_planned_before() -> None:
    clock, seen = Clock(), list[str]()

    def first(_: object) -> None:
        seen.append("first")
        clock.at(clock.now, seen.append, "planned by first")

    clock.at(1.0, first, None)
    clock.at(1.0, seen.append, "second")
    clock.run()
    assert seen == ["first", "second", "planned by first"]
