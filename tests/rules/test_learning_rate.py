"""How the step follows the batch: the formulas, and what must hold between them."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rules.learning_rate import AS_SET, RULES, StepScale, step_scale

batches, noises = st.integers(1, 100_000), st.one_of(st.none(), st.floats(0.0, 1e9))
largest = st.floats(1.0, 1e3)
rules = st.sampled_from([rule for rule in RULES if rule != "auto"])


@given(batches, batches, noises, largest)
def test_each_rule_is_its_formula(batch: int, reference: int, noise: float | None, most: float) -> None:
    kappa = min(batch / reference, most)
    assert step_scale("none", batch, reference, noise, most) == AS_SET
    assert step_scale("linear", batch, reference, noise, most) == StepScale(kappa, 1.0)
    assert step_scale("sqrt", batch, reference, noise, most) == StepScale(sqrt(kappa), kappa, kappa)
    adascale = step_scale("adascale", batch, reference, noise, most)
    gain = kappa if noise is None else (noise / reference + 1) / (noise / reference / kappa + 1)
    assert adascale.learning_rate == pytest.approx(gain, rel=1e-12) and adascale.momentum_power == 1.0


@given(rules, batches, noises, largest)
def test_at_the_reference_batch_nothing_changes(rule: str, reference: int, noise: float | None, most: float) -> None:
    scale = step_scale(rule, reference, reference, noise, most)
    assert (scale.learning_rate, scale.momentum_power) == pytest.approx((1.0, 1.0))


@given(rules, batches, noises, largest)
def test_a_round_without_samples_changes_nothing(rule: str, reference: int, noise: float | None, most: float) -> None:
    assert step_scale(rule, 0, reference, noise, most) == AS_SET


@given(rules, batches, batches, noises, largest)
def test_no_rule_goes_beyond_the_cap(rule: str, batch: int, reference: int, noise: float | None, most: float) -> None:
    scale = step_scale(rule, batch, reference, noise, most)
    assert 0 < scale.learning_rate <= most * (1 + 1e-12) and 0 < scale.momentum_power <= most * (1 + 1e-12)
    if batch / reference > most:
        assert scale == step_scale(rule, 10 * batch, reference, noise, most)


@given(rules, batches, batches, batches, noises)
def test_a_larger_batch_never_makes_a_shorter_step(
    rule: str, one: int, other: int, reference: int, noise: float | None
) -> None:
    small, large = (step_scale(rule, batch, reference, noise, 4.0) for batch in sorted((one, other)))
    assert small.learning_rate <= large.learning_rate * (1 + 1e-12)


@given(batches, batches, st.floats(0.0, 1e9))
def test_adascale_lies_between_constant_and_linear(batch: int, reference: int, noise: float) -> None:
    gain = step_scale("adascale", batch, reference, noise, 4.0).learning_rate
    linear = step_scale("linear", batch, reference, noise, 4.0).learning_rate
    assert min(1.0, linear) * (1 - 1e-9) <= gain <= max(1.0, linear) * (1 + 1e-9)


def test_adascale_at_its_ends() -> None:
    assert step_scale("adascale", 64, 16, 0.0, 8.0).learning_rate == 1.0, "without noise a larger batch is no better"
    assert step_scale("adascale", 64, 16, 1e12, 8.0).learning_rate == pytest.approx(4.0), "nothing but noise: linear"
    assert step_scale("adascale", 64, 16, None, 8.0).learning_rate == 4.0, "unknown counts as large"
