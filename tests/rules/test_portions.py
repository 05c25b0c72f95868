"""Portions of equal cost: never empty, never too many, nearest to the budget, and no small rests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.rules.portions import portion

COSTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=50)


@given(costs=COSTS, budget=st.floats(0.1, 500.0), most=st.integers(1, 60), more=st.booleans())
def test_a_portion_is_never_empty_nor_too_large(costs: list[float], budget: float, most: int, more: bool) -> None:
    assert 1 <= portion(costs, budget, most, more=more) <= min(most, len(costs))


@given(costs=COSTS, budget=st.floats(0.1, 500.0))
def test_no_other_number_of_samples_is_nearer_to_the_budget(costs: list[float], budget: float) -> None:
    off = np.abs(np.cumsum(costs) - budget)
    assert off[portion(costs, budget, len(costs), more=True) - 1] <= off.min() + 1e-9


@given(costs=COSTS, budget=st.floats(0.1, 500.0))
def test_the_last_samples_are_shared_out_evenly(costs: list[float], budget: float) -> None:
    """Each portion is off its even share by no more than half of the dearest sample, and they are as many as fit."""
    number = max(1, round(sum(costs) / budget))
    left, portions = list(costs), []
    while left:
        share = sum(left) / max(1, round(sum(left) / budget))
        cut = portion(left, budget, len(left), more=False)
        portions.append(sum(left[:cut]))
        assert abs(portions[-1] - share) <= max(costs) / 2 + 1e-9 or cut == 1
        left = left[cut:]
    assert len(portions) <= number + 1


def test_equal_costs_give_equal_portions() -> None:
    assert portion([2.0] * 50, budget=12.0, most=8, more=True) == 6
    assert portion([2.0] * 13, budget=12.0, most=8, more=False) in (6, 7)
