"""Rules against what they promise: the best shares by brute force, formulas number by number."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.rules.delay import extrapolate_
from paceline.rules.shares import resized, round_seconds, shares_by_speed
from paceline.rules.speed import smoothed

seconds_of_few = st.lists(st.integers(1, 40).map(lambda n: n / 8), min_size=1, max_size=4)
seconds_of_many = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=20)


def divisions(total, workers):
    """Every way to give each worker at least one of so many micro-batches."""
    for cuts in itertools.combinations(range(1, total), workers - 1):
        yield [after - before for before, after in itertools.pairwise((0, *cuts, total))]


@given(seconds_of_few, st.integers(0, 7))
def test_shares_end_the_round_as_early_as_any_division_can(seconds, more):
    total = len(seconds) + more
    shares = shares_by_speed(seconds, total)
    best = min(round_seconds(counts, seconds) for counts in divisions(total, len(seconds)))
    assert round_seconds(shares, seconds) == best


@given(seconds_of_many, st.integers(0, 60))
def test_shares_add_up_and_nobody_is_left_out(seconds, more):
    shares = shares_by_speed(seconds, len(seconds) + more)
    assert sum(shares) == len(seconds) + more and len(shares) == len(seconds) and min(shares) >= 1


@given(seconds_of_many, st.integers(0, 60))
def test_who_is_faster_never_gets_less(seconds, more):
    shares = shares_by_speed(seconds, len(seconds) + more)
    by_speed = [shares[rank] for rank in sorted(range(len(seconds)), key=lambda rank: (seconds[rank], rank))]
    assert by_speed == sorted(by_speed, reverse=True)


def test_equal_workers_get_equal_shares_and_the_rest_goes_to_the_first():
    assert shares_by_speed([2.0, 2.0, 2.0], 9) == (3, 3, 3)
    assert shares_by_speed([2.0, 2.0, 2.0], 10) == (4, 3, 3)


def test_the_round_lasts_until_the_last_is_done():
    assert round_seconds([1, 2, 3], [5.0, 1.0, 1.5]) == 5.0
    with pytest.raises(ValueError):
        round_seconds([1, 2], [1.0])


def test_shares_stay_within_the_dead_band_and_move_beyond_it():
    # The best shares shorten the round from 4 · 2 s to 6 s: by exactly a quarter.
    assert resized((4, 4), (1.0, 2.0), dead_band=0.25) == (4, 4)
    assert resized((4, 4), (1.0, 2.0), dead_band=0.24) == (6, 2)
    assert resized((4, 4), (1.0, 2.0), dead_band=0.0) == (6, 2)
    assert resized((4, 4), (1.0, 1.0), dead_band=0.0) == (4, 4)


@given(seconds_of_few, st.integers(0, 6), st.floats(0, 1))
def test_resizing_keeps_the_total_and_never_lengthens_the_round(seconds, more, dead_band):
    before = (1 + more, *([1] * (len(seconds) - 1)))
    after = resized(before, tuple(seconds), dead_band)
    assert sum(after) == sum(before) and round_seconds(after, seconds) <= round_seconds(before, seconds)
    assert after == before or round_seconds(after, seconds) < (1 - dead_band) * round_seconds(before, seconds) + 1e-9


@pytest.mark.parametrize("ratio", [1.0, 0.5, 2.0])
def test_extrapolation_is_its_formula_and_stays_in_place(ratio):
    parameters = torch.tensor([7.0, -1.0, 0.5])
    step, last_step = torch.tensor([3.0, 0.25, -1.0]), torch.tensor([2.0, -4.0, 8.0])
    expected = parameters - (step - ratio * last_step)
    memory = parameters.data_ptr()
    extrapolate_(parameters, step, last_step, ratio)
    assert torch.equal(parameters, expected) and parameters.data_ptr() == memory
    assert step.tolist() == [3.0, 0.25, -1.0] and last_step.tolist() == [2.0, -4.0, 8.0]


def test_extrapolation_of_a_constant_step_changes_nothing():
    parameters, step = torch.tensor([7.0, -1.0]), torch.tensor([3.0, 0.25])
    extrapolate_(parameters, step, step)
    assert parameters.tolist() == [7.0, -1.0]


def test_extrapolation_of_a_step_that_shrank_with_the_learning_rate_changes_nothing():
    parameters = torch.tensor([7.0])
    extrapolate_(parameters, step=torch.tensor([1.5]), last_step=torch.tensor([3.0]), learning_rate_ratio=0.5)
    assert parameters.tolist() == [7.0]


def test_three_micro_batches_after_a_change_the_speed_is_within_an_eighth():
    speed = 8.0
    for expected in (4.0, 2.0, 1.0):
        speed = smoothed(speed, 0.0)
        assert speed == expected


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
def test_the_smoothed_speed_lies_between(mean, latest):
    assert min(mean, latest) <= smoothed(mean, latest) <= max(mean, latest)
    assert smoothed(0.0, latest) == latest
