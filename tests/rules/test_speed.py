"""What a worker's speedometer shows, against devices whose times are known."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.rules.speed import Speedometer, smoothed


@given(st.floats(0.0, 100.0), st.floats(1e-3, 10.0), st.lists(st.integers(1, 512), min_size=2, max_size=20))
def test_two_sizes_tell_the_overhead_from_the_samples(overhead: float, each: float, sizes: list[int]) -> None:
    """A device that needs a + s·n for n samples has an overhead of a/s samples."""
    assume(len(set(sizes)) > 1)
    meter = Speedometer()
    for count in sizes:
        meter.see(count, each * (overhead + count))
    assert meter.overhead_samples == pytest.approx(overhead, rel=1e-6, abs=1e-6 * max(sizes))


@given(st.integers(1, 512), st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=20))
def test_one_size_tells_the_speed_only(count: int, times: list[float]) -> None:
    meter, expected = Speedometer(), 0.0
    assert meter.seconds_per_sample == 0.0
    for seconds in times:
        meter.see(count, seconds)
        expected = smoothed(expected, seconds / count)
    assert meter.seconds_per_sample == expected and meter.overhead_samples == 0.0
    assert min(times) / count <= meter.seconds_per_sample * (1 + 1e-12)
    assert meter.seconds_per_sample <= max(times) / count * (1 + 1e-12)


def test_a_device_on_which_more_samples_cost_nothing_has_no_end_of_overhead() -> None:
    meter = Speedometer()
    meter.see(8, 1.0)
    meter.see(16, 1.0)
    assert meter.overhead_samples == inf
    meter.see(8, 1.1)
    assert meter.overhead_samples == inf


def test_an_overhead_is_never_negative() -> None:
    meter = Speedometer()
    meter.see(8, 1.0)
    meter.see(16, 3.0)  # more than in proportion, by jitter or by a full memory
    assert meter.overhead_samples == 0.0


def metered(*beside: float) -> float:
    """The overhead in samples of a device of one second a sample, after a strategy took so long after micro-batches."""
    meter = Speedometer()
    meter.see(8, 8.0)
    for seconds in beside:
        meter.see_overhead(seconds)
    return meter.overhead_samples


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=200))
def test_what_a_strategy_takes_is_averaged(beside: list[float]) -> None:
    assert min(beside) * (1 - 1e-9) <= metered(*beside) <= max(beside) * (1 + 1e-9)


def test_a_checkpoint_for_once_is_no_habit_but_a_habit_is_learnt() -> None:
    usual = [0.01] * 50
    assert metered(*usual, 60.0) < 0.02, "a minute once does not make every micro-batch a minute dearer"
    assert metered(*usual, *[60.0] * 200) == pytest.approx(60.0, rel=0.01), "again and again it does"
