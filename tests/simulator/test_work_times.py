"""What micro-batches of any size take: the same work takes the same time, however it is cut."""

from __future__ import annotations

from itertools import accumulate, count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.simulator.cluster import WorkTimes

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=60)
DURATIONS = st.lists(st.floats(1e-3, 1e3), min_size=200, max_size=200)


@given(st.integers(1, 12), DURATIONS, SIZES)
def test_the_time_does_not_depend_on_how_the_work_is_cut(micro_batch: int, durations: list[float], sizes: list[int]):
    """After so many samples a rank has spent the whole pieces of work before, and its part of the one it is in."""
    durations = (durations * 6)[: sum(sizes) // micro_batch + 1]
    times = WorkTimes(iter(durations), micro_batch)
    spent = accumulate(times.seconds(size) for size in sizes)
    for samples, seconds in zip(accumulate(sizes), spent, strict=True):
        pieces, part = divmod(samples, micro_batch)
        expected = sum(durations[:pieces]) + (durations[pieces] * part / micro_batch if part else 0.0)
        assert seconds == pytest.approx(expected, rel=1e-9)


def test_whole_micro_batches_take_the_durations_as_they_are() -> None:
    assert [WorkTimes(iter([0.1, 0.7]), 3).seconds(3)] == [0.1]
    times = WorkTimes(iter([0.1, 0.7, 0.2]), 3)
    assert [times.seconds(3) for _ in range(3)] == [0.1, 0.7, 0.2]


def test_a_piece_is_drawn_only_when_it_is_needed() -> None:
    drawn = count()
    times = WorkTimes((float(number) for number in drawn), 4)
    times.seconds(4)
    times.seconds(2)
    times.seconds(2)
    assert next(drawn) == 2


def test_a_micro_batch_may_be_larger_than_a_piece() -> None:
    assert WorkTimes(iter([1.0, 2.0, 4.0]), 4).seconds(10) == 1.0 + 2.0 + 2.0
