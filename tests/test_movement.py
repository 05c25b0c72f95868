"""Merging by movements: what somebody has moved travels, in chunks, and the common model becomes the mean in place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends import movement as module
from paceline.backends.flat import TRAILER, WEIGHT
from paceline.backends.movement import BLOCK, Movement, add_up, take


def part(model: torch.Tensor, common: torch.Tensor, weight: float) -> Movement:
    trailer = torch.zeros(TRAILER, dtype=torch.promote_types(model.dtype, torch.float32))
    trailer[WEIGHT] = weight
    return Movement(model, common, weight, trailer)


def merged(models: list[torch.Tensor], common: torch.Tensor, weights: list[float]) -> list[torch.Tensor]:
    """Each rank's common model after the merge; each has its own memory, as ranks do."""
    parts = [part(model, common.clone(), weight) for model, weight in zip(models, weights, strict=True)]
    for each in parts:
        if not math.isfinite(each.norm):
            each.leave_out()
            each.trailer[WEIGHT] = 0.0
    sums = add_up(parts)
    for each in parts:
        take(each, sums)
    return [each.common for each in parts]


@settings(deadline=None)
@given(
    size=st.integers(1, 5 * BLOCK + 7),
    weights=st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0]), min_size=1, max_size=4).filter(any),
    seed=st.integers(0, 99),
    chunk=st.integers(1, 4),
)
def test_it_is_the_mean_by_the_weights(size: int, weights: list[float], seed: int, chunk: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=chance, dtype=torch.float64)
    models = [common.clone() for _ in weights]
    for model in models:
        touched = torch.randint(size, (1 + size // 20,), generator=chance)
        model[touched] += torch.randn(len(touched), generator=chance, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk * BLOCK)
        patch.setattr(module, "SMALL", seed % 2 * module.SMALL)
        found = merged(models, common, weights)
    mean = sum(weight * model for weight, model in zip(weights, models, strict=True)) / sum(weights)
    torch.testing.assert_close(found[0], mean, rtol=1e-12, atol=1e-12)
    untouched = torch.stack([model == common for model in models]).all(0)
    assert torch.equal(found[0][untouched], common[untouched]), "not a bit of it has changed"
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_small_model_travels_whole_and_nobody_asks_who_has_moved_what() -> None:
    common = torch.zeros(3 * BLOCK + 3)
    sums = add_up([part(common.clone(), common.clone(), 1.0) for _ in range(2)])
    assert len(sums.moved) == 0 and sums.chunks == [] and len(sums.head) == len(common) + TRAILER
    assert part(common.clone(), common, 1.0).nbytes == 4 * (3 * BLOCK + 3 + TRAILER)


def test_only_blocks_that_somebody_has_moved_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 0)
    common = torch.zeros(100 * BLOCK + 3)
    first, second = common.clone(), common.clone()
    first[5 * BLOCK + 1] = 1.0
    second[[5 * BLOCK, 70 * BLOCK + 63]] = 1.0
    parts = [part(first, common.clone(), 1.0), part(second, common.clone(), 1.0)]
    sums = add_up(parts)
    assert sums.moved.nonzero().flatten().tolist() == [5, 70] and parts[0].moved.nonzero().flatten().tolist() == [5]
    beside = 100 + 4 * (3 + TRAILER)  # a byte for each block, the rest and the trailer
    assert parts[0].nbytes == beside + 4 * BLOCK and parts[0].nbytes_of(sums.moved) == beside + 2 * 4 * BLOCK


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_model_that_is_not_finite_is_left_out(wrong: float) -> None:
    common = torch.ones(3 * BLOCK)
    broken = common.clone()
    broken[7] = wrong
    for model in merged([common + 1, broken], common, [1.0, 5.0]):
        assert torch.equal(model, common + 1)
    for model in merged([broken], common, [1.0]):
        assert torch.equal(model, common), "nobody has brought a model: it stays"


def test_the_smallest_move_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 0)
    common = torch.zeros(4 * BLOCK)
    model = common.clone()
    model[BLOCK] = 1e-40  # its square is zero
    assert part(model, common, 1.0).moved.tolist() == [0, 1, 0, 0]


def test_half_precision_holds_models_whose_norm_it_cannot_hold() -> None:
    model = torch.full((BLOCK,), 6e4, dtype=torch.float16)
    assert math.isfinite(part(model, torch.zeros_like(model), 1.0).norm)


def test_half_precision_is_added_up_in_single() -> None:
    common = torch.full((BLOCK + 1,), 1.0, dtype=torch.bfloat16)
    found = merged([common * 2, common * 3, common], common, [0.25, 0.25, 0.5])
    assert found[0].dtype == torch.bfloat16 and torch.equal(found[0], torch.full_like(common, 1.75))


def test_two_merges_are_not_added_up() -> None:
    both: Any = part(torch.zeros(1), torch.zeros(1), 1.0)
    with pytest.raises(TypeError, match="cannot be added up"):
        both.plus(both)
