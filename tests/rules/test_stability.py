"""The limits of stability against what is known of them, and the curvature against quadratics."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.rules.stability import PAIRS, CurvatureProbe, largest_stable

momenta = st.floats(0.0, 0.99)


@settings(deadline=None)
@given(momenta)
def test_synchronous_training_is_stable_up_to_twice_one_plus_momentum(momentum: float) -> None:
    assert largest_stable(momentum, "synchronous") == pytest.approx(2 * (1 + momentum), abs=1e-3)


@settings(deadline=None)
@given(momenta)
def test_one_round_late_it_is_stable_up_to_one_minus_momentum(momentum: float) -> None:
    assert largest_stable(momentum, "none") == pytest.approx(1 - momentum, abs=1e-3)


@pytest.mark.parametrize(("cure", "limit"), [("synchronous", 3.8), ("none", 0.10), ("extrapolate", 0.27)])
def test_the_figures_of_momentum_nine_tenths(cure: str, limit: float) -> None:
    assert largest_stable(0.9, cure) == pytest.approx(limit, abs=0.005)


def test_without_momentum_extrapolation_does_nothing() -> None:
    assert largest_stable(0.0, "extrapolate") == largest_stable(0.0, "none")


@settings(deadline=None)
@given(st.floats(0.5, 0.99))
def test_with_much_momentum_extrapolation_allows_more(momentum: float) -> None:
    none, cured, synchronous = (largest_stable(momentum, cure) for cure in ("none", "extrapolate", "synchronous"))
    assert none <= cured + 1e-6 < synchronous


@settings(deadline=None)
@given(momenta, st.sampled_from(["none", "synchronous"]), st.floats(0.05, 0.97), st.floats(1.03, 1.5))
def test_iterating_the_map_agrees(momentum: float, cure: str, below: float, above: float) -> None:
    limit = largest_stable(momentum, cure)

    def size_after(step: float, rounds: int) -> float:
        """Of the state: what is left of w and u may vanish only together."""
        w = before = 1.0
        u = 0.0
        for _ in range(rounds):
            u = momentum * u + step * (w if cure == "synchronous" else before)
            w, before = w - u, w
            if abs(w) > 1e6:
                break
        return max(abs(w), abs(before), abs(u))

    assert size_after(below * limit, 20_000) < 1.0
    assert size_after(above * limit, 20_000) > 1.0


@settings(deadline=None)
@given(
    st.floats(0.1, 50.0),
    st.lists(st.floats(0.1, 3.0).flatmap(lambda size: st.sampled_from([size, -size])), min_size=PAIRS + 2, max_size=20),
)
def test_the_probe_finds_the_curvature_of_a_quadratic(curvature: float, steps: list[float]) -> None:
    """Each gradient was taken at the point of the call before."""
    probe = CurvatureProbe()
    before = 0.0
    for point in itertools.accumulate(steps):
        probe.see(torch.tensor([point]), torch.tensor([curvature * before]))
        before = point
    assert probe.curvature == pytest.approx(curvature, rel=1e-3)


def test_in_two_directions_it_is_that_of_the_path() -> None:
    probe, curvatures = CurvatureProbe(), torch.tensor([1.0, 10.0])
    before = torch.zeros(2)
    for place in range(PAIRS + 2):  # along the second axis only
        point = torch.tensor([5.0, (-1.0) ** place])
        probe.see(point, curvatures * before)
        before = point
    assert probe.curvature == pytest.approx(10.0, rel=1e-6)


def test_the_probe_copies_what_it_sees_and_forgets_when_told() -> None:
    probe, point, gradient = CurvatureProbe(), torch.zeros(1), torch.zeros(1)
    assert probe.curvature == 0.0
    for value in range(1, PAIRS + 3):
        gradient.copy_(3.0 * point)
        point.fill_(value)
        probe.see(point, gradient)
    assert probe.curvature == pytest.approx(3.0)
    probe.forget()
    probe.see(torch.tensor([100.0]), torch.tensor([-1e6]))
    probe.see(torch.tensor([-100.0]), torch.tensor([300.0]))
    assert probe.curvature == pytest.approx(3.0), "no pair is made of points that do not follow each other"
