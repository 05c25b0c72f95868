"""Weights of a merge, its momentum, and what draws replicas to a centre."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.rules.merging import draw_, may_perturb, merge_weights, perturbed, push_on_

workers = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 50), min_size=n, max_size=n), st.lists(st.floats(1.0, 4096.0), min_size=n, max_size=n)
    )
)
numbers = st.floats(-100, 100)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_weights_of_the_paper() -> None:
    weights = merge_weights((29, 26, 24, 21), (1024.0,) * 4)
    assert weights == pytest.approx([0.29, 0.26, 0.24, 0.21], abs=1e-15)
    assert perturbed(weights, (29, 26, 24, 21), 0.1) == pytest.approx([0.319, 0.26, 0.24, 0.189], abs=1e-15)


@given(workers)
def test_they_add_up_to_one_and_follow_the_updates(case: tuple[list[int], list[float]]) -> None:
    updates, batches = case
    weights = merge_weights(updates, batches)
    assert sum(weights) == pytest.approx(1.0)
    equal = len(set(updates)) == 1
    parts: list[Any] = batches if equal else updates
    assert [weight * sum(parts) for weight in weights] == pytest.approx(parts)
    assert perturbed(weights, updates, 0.0) == weights
    if equal:
        assert perturbed(weights, updates, 0.1) == weights


@given(workers, st.floats(0.0, 1.0))
def test_two_weights_are_perturbed(case: tuple[list[int], list[float]], by: float) -> None:
    updates, batches = case
    weights = merge_weights(updates, batches)
    changes = [after - before for before, after in zip(weights, perturbed(weights, updates, by), strict=True)]
    if len(set(updates)) > 1:
        most, fewest = updates.index(max(updates)), updates.index(min(updates))
        assert changes[most] == pytest.approx(by * weights[most])
        assert changes[fewest] == pytest.approx(-by * weights[fewest])
        assert sum(changes) == pytest.approx(changes[most] + changes[fewest])


def test_the_gate_looks_at_the_largest_model_for_its_size() -> None:
    assert may_perturb((1.0, 9.99), 100, 0.1) and not may_perturb((1.0, 10.0), 100, 0.1)
    assert not may_perturb((0.0,), 100, 0.0), "a gate of zero is closed"


@given(numbers, numbers, numbers, st.floats(0.0, 1.0))
def test_momentum_goes_on_in_the_direction_of_the_last_merge(
    mean: float, last: float, before: float, gamma: float
) -> None:
    model, w, w_before = double(mean), double(last), double(before)
    push_on_(model, w, w_before, gamma)
    assert model.item() == pytest.approx(mean + gamma * (last - before), abs=1e-9)
    assert torch.equal(w, model) and w_before.item() == last


def test_at_the_first_merge_there_is_no_direction_yet() -> None:
    model, w, w_before = double(3.0), double(1.0), double(1.0)
    push_on_(model, w, w_before, 0.9)
    assert model.item() == 3.0


@given(numbers, numbers, st.floats(0.0, 1.0))
def test_a_replica_is_drawn_by_a_part_of_what_lies_between(own: float, centre: float, by: float) -> None:
    model = double(own)
    draw_(model, double(centre), by)
    assert model.item() == pytest.approx(own - by * (own - centre), abs=1e-9)
