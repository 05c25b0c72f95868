"""The noise scale: unbiased for unequal batches, and the weighted mean of what every worker's batch says."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.rules.noise import KEEP, NoiseScale, estimate

BATCHES = np.array([3, 7, 1, 12])
DIMENSIONS = 6

contributions = st.lists(  # (samples, their sum of gradients) of each worker
    st.tuples(st.integers(1, 50), st.lists(st.integers(-40, 40), min_size=3, max_size=3)), min_size=2, max_size=8
)


def sums_of(counts: np.ndarray, sums: np.ndarray) -> tuple[float, float, float, float]:
    """What travels: B, |ΣG_i|², Σ|G_i|², Σb_i²."""
    total = sums.sum(axis=0)
    return counts.sum(), float(total @ total), float((sums * sums).sum()), float((counts * counts).sum())


@settings(deadline=None)
@given(contributions)
def test_the_estimate_is_the_weighted_mean_of_what_each_worker_says(parts: list[tuple[int, list[int]]]) -> None:
    """Algebra in whole numbers, so equality is exact: weights b_i(B − b_i) on
    G_i = (B|g|² − b_i|g_i|²)/(B − b_i) and S_i = b_i·B/(B − b_i)·(|g_i|² − |g|²)."""
    counts = [Fraction(count) for count, _ in parts]
    sums = [[Fraction(value) for value in vector] for _, vector in parts]
    batch = sum(counts)
    square = sum(sum(column) ** 2 for column in zip(*sums, strict=True))
    squares = [sum(value**2 for value in vector) for vector in sums]
    weights = [count * (batch - count) for count in counts]
    mean = square / batch**2
    own = [each / count**2 for each, count in zip(squares, counts, strict=True)]
    norms = [(batch * mean - b * g) / (batch - b) for b, g in zip(counts, own, strict=True)]
    variances = [b * batch / (batch - b) * (g - mean) for b, g in zip(counts, own, strict=True)]

    squared_norm, variance = estimate(batch, square, sum(squares), sum(count**2 for count in counts))  # type: ignore[arg-type]  # whole numbers
    assert squared_norm == sum(w * n for w, n in zip(weights, norms, strict=True)) / sum(weights)
    assert variance == sum(w * v for w, v in zip(weights, variances, strict=True)) / sum(weights)


@given(contributions, st.floats(0.01, 100.0))
def test_a_gradient_in_other_units_changes_the_parts_and_not_the_scale(parts: list, factor: float) -> None:
    counts, sums = np.array([count for count, _ in parts]), np.array([vector for _, vector in parts], dtype=float)
    squared_norm, variance = estimate(*sums_of(counts, sums))
    assume(abs(squared_norm) > 1e-3)
    scaled = estimate(*sums_of(counts, factor * sums))
    assert scaled == pytest.approx((factor**2 * squared_norm, factor**2 * variance), rel=1e-6, abs=1e-6 * factor**2)
    assert scaled[1] / scaled[0] == pytest.approx(variance / squared_norm, rel=1e-6, abs=1e-6)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=8), st.lists(st.integers(-9, 9), min_size=2, max_size=4))
def test_samples_that_are_all_alike_have_no_noise(counts: list[int], gradient: list[int]) -> None:
    sizes = np.array(counts)
    squared_norm, variance = estimate(*sums_of(sizes, sizes[:, None] * np.array(gradient, dtype=float)))
    assert squared_norm == pytest.approx(sum(each**2 for each in gradient), rel=1e-9, abs=1e-9)
    assert variance == pytest.approx(0.0, abs=1e-6)


def rounds_of_gaussian_gradients(rounds: int) -> tuple[np.ndarray, float, float]:
    """Estimates of that many rounds, with the true |g|² and tr Σ."""
    generator = np.random.default_rng(8)
    mean = np.linspace(-0.5, 1.0, DIMENSIONS)
    root = generator.normal(size=(DIMENSIONS, DIMENSIONS))
    found = []
    for _ in range(rounds):
        noise = np.sqrt(BATCHES)[:, None] * generator.normal(size=(len(BATCHES), DIMENSIONS)) @ root.T
        found.append(estimate(*sums_of(BATCHES, BATCHES[:, None] * mean + noise)))
    return np.array(found), float(mean @ mean), float(np.trace(root @ root.T))


def test_both_parts_are_unbiased_for_unequal_batches() -> None:
    """The mean of twenty thousand rounds is within four standard errors of the truth, and those are small."""
    found, squared_norm, variance = rounds_of_gaussian_gradients(20_000)
    errors = found.std(axis=0) / np.sqrt(len(found))
    for measured, error, truth in zip(found.mean(axis=0), errors, (squared_norm, variance), strict=True):
        assert abs(measured - truth) < 4 * error and error < 0.02 * truth


def test_the_ratio_of_the_means_is_the_noise_scale() -> None:
    found, squared_norm, variance = rounds_of_gaussian_gradients(20_000)
    assert found[:, 1].mean() / found[:, 0].mean() == pytest.approx(variance / squared_norm, rel=0.05)


def test_it_is_an_exponential_mean_that_starts_without_a_bias() -> None:
    generator = np.random.default_rng(8)
    scale, sums = NoiseScale(), []
    for _ in range(50):
        part = generator.normal(size=(len(BATCHES), DIMENSIONS)) + BATCHES[:, None]
        sums.append(sums_of(BATCHES, part))
        scale.see(*sums[-1])
        weights = KEEP ** np.arange(len(sums) - 1, -1, -1)
        expected = np.average([estimate(*each) for each in sums], axis=0, weights=weights)
        assert (scale.squared_norm, scale.variance) == pytest.approx(tuple(expected), rel=1e-9)
        assert scale.value == pytest.approx(max(0.0, expected[1] / expected[0]), rel=1e-9)


def test_one_contribution_says_nothing() -> None:
    scale = NoiseScale()
    scale.see(batch=8, square_of_sum=64.0, sum_of_squares=64.0, sum_of_counts=64.0)
    assert scale.value is None
    scale.see(batch=0, square_of_sum=0.0, sum_of_squares=0.0, sum_of_counts=0.0)
    assert scale.value is None


def test_a_gradient_lost_in_the_noise_is_unknown_and_not_negative() -> None:
    scale = NoiseScale()
    scale.see(batch=2, square_of_sum=0.5, sum_of_squares=1.0, sum_of_counts=2.0)
    assert scale.squared_norm < 0 < scale.variance and scale.value is None
    for _ in range(100):
        scale.see(batch=2, square_of_sum=5.0, sum_of_squares=1.0, sum_of_counts=2.0)
    assert scale.variance < 0 < scale.squared_norm and scale.value == 0.0
