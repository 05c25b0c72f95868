"""Batches follow the updates: in the right direction, within bounds, and never so fast that they swing."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rules.batch_scaling import LARGEST_GAIN, RULES, at_full_size, scaled_batches

BOUNDS = (64.0, 1024.0)
cases = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(*BOUNDS), min_size=n, max_size=n), st.lists(st.integers(0, 60), min_size=n, max_size=n)
    )
)
rules = st.sampled_from(RULES)


def test_the_rule_of_the_paper() -> None:
    assert scaled_batches("paper", (900, 900, 900, 900), (29, 26, 24, 21), 4.0, BOUNDS) == [916, 904, 896, 884]


def test_the_rule_of_the_release() -> None:
    assert scaled_batches("release", (900, 900, 900, 900), (29, 26, 25, 20), 4.0, BOUNDS) == [932, 918, 900, 868]


@given(rules, cases, st.floats(0.1, 1000.0))
def test_more_updates_larger_batches_within_bounds(rule: str, case: tuple[list[float], list[int]], beta: float) -> None:
    batches, updates = case
    mean = sum(updates) / len(updates)
    for before, after, own in zip(batches, scaled_batches(rule, batches, updates, beta, BOUNDS), updates, strict=True):
        assert BOUNDS[0] <= after <= BOUNDS[1]
        assert (after - before) * (own - mean) >= 0
        assert abs(after - before) <= LARGEST_GAIN * before * abs(own - mean) / mean + 1e-9 if mean else after == before


@given(rules, st.lists(st.floats(*BOUNDS), min_size=1, max_size=8), st.integers(0, 60))
def test_equal_updates_change_nothing(rule: str, batches: list[float], updates: int) -> None:
    assert scaled_batches(rule, batches, [updates] * len(batches), 16.0, BOUNDS) == batches


@pytest.mark.parametrize("speeds", [(1.0, 0.92, 0.85, 0.75), (1.0, 1.0, 0.5, 0.25)])
def test_whatever_beta_the_distances_shrink_at_every_merge(speeds: tuple[float, ...]) -> None:
    """With exact, not whole, numbers of updates; without the guard β = 1000 swings from one bound to the other."""
    for beta in (4.0, 16.0, 1000.0):
        batches, spreads = [1024.0] * 4, []
        for _ in range(150):
            seconds = 100 * 1024 / sum(speeds)
            updates = [speed * seconds / batch for speed, batch in zip(speeds, batches, strict=True)]
            spreads.append(max(updates) / min(updates) - 1)
            batches = scaled_batches("paper", batches, updates, beta, BOUNDS)
        assert all(after <= before for before, after in pairwise(spreads)) and spreads[-1] < 0.05


@given(st.lists(st.floats(*BOUNDS), min_size=1, max_size=8))
def test_at_full_size_proportions_stay_and_the_largest_is_the_bound(batches: list[float]) -> None:
    raised = at_full_size(batches, BOUNDS[1])
    assert max(raised) == pytest.approx(BOUNDS[1])
    assert all(after >= before * (1 - 1e-12) for before, after in zip(batches, raised, strict=True))
    assert [each * max(batches) for each in raised] == pytest.approx([each * max(raised) for each in batches])
