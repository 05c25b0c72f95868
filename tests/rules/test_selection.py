"""The k largest by magnitude: what sorting everything gives, whatever the sample shows."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import PacelineError
from paceline.rules import selection
from paceline.rules.selection import SAMPLE, SAMPLED, largest

LARGE = SAMPLED + 12_345

numbers = st.lists(st.floats(width=32, allow_nan=False), max_size=300)
repeated = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, float("inf")]), max_size=300)


@pytest.fixture
def sampling_at_once() -> Iterator[None]:
    """Tensors of a few entries go the way of those of millions."""
    with patch.multiple(selection, SAMPLED=1, MOST=1.0, SAMPLE=24, PIECE=16):
        yield


def sorted_out(values: Tensor, k: int) -> list[int]:
    """What is meant: by magnitude, NaN first, and of equal ones the first."""
    magnitudes = values.double().abs().nan_to_num(nan=torch.inf, posinf=1e300).tolist()
    return sorted(sorted(range(len(values)), key=lambda place: -magnitudes[place])[:k])


@given(numbers | repeated, st.floats(0, 1))
def test_it_is_what_sorting_gives(listed: list[float], share: float) -> None:
    values = torch.tensor(listed)
    k = round(share * len(listed))
    assert largest(values, k).tolist() == sorted_out(values, k)


@settings(deadline=None)
@given(listed=numbers | repeated, share=st.floats(0, 1))
@pytest.mark.usefixtures("sampling_at_once")
def test_it_is_what_sorting_gives_with_a_sample_too(listed: list[float], share: float) -> None:
    values = torch.tensor(listed)
    k = round(share * len(listed))
    assert largest(values, k).tolist() == sorted_out(values, k)


@pytest.mark.parametrize("ratio", [1e-6, 0.001, 0.01, 0.1, 0.25, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("heavy", [False, True])
def test_large_tensors_lose_none_of_the_largest(ratio: float, heavy: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(LARGE, generator=generator)
    if heavy:
        values = values / torch.rand(LARGE, generator=generator)
    k = max(1, round(ratio * LARGE))
    chosen = largest(values, k)
    assert chosen.dtype == torch.int64 and len(chosen) == k
    assert k == 1 or bool((chosen.diff() > 0).all()), "ascending, so each is there once"
    assert torch.equal(values[chosen].abs().sort(descending=True).values, values.abs().topk(k).values)


def sampled_places(size: int) -> Tensor:
    with patch.object(selection, "_magnitudes", lambda bits: bits):
        return torch.from_numpy(selection._sample(np.arange(size)))


@pytest.mark.parametrize("ratio", [0.0001, 0.01])
@pytest.mark.parametrize("shown", ["only large ones", "only small ones"])
def test_a_sample_that_misleads_costs_only_time(shown: str, ratio: float) -> None:
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(2))
    values[sampled_places(LARGE)] *= 1000.0 if shown == "only large ones" else 0.001
    k = round(ratio * LARGE)
    assert torch.equal(values[largest(values, k)].abs().sort().values, values.abs().topk(k).values.flip(0))


def test_the_sample_comes_from_everywhere() -> None:
    places = sampled_places(LARGE)
    assert len(places) == SAMPLE and places[0] >= 0 and places[-1] < LARGE
    run = LARGE / SAMPLE
    assert places.diff().min() > 0 and places.diff().max() <= 2 * run
    for width in (2, 3, 64, 512, 1000):
        count = torch.bincount(places % width, minlength=width)
        assert count.min() > 0.4 * SAMPLE / width, "no column of a matrix so wide is left out"


@pytest.mark.parametrize("size", [1, 2, 1000, LARGE])
def test_of_equal_entries_the_first(size: int) -> None:
    for value in (0.0, -3.5, torch.inf):
        for k in {0, 1, size // 100, size // 2, size}:
            assert torch.equal(largest(torch.full((size,), value), k), torch.arange(k))


def test_zeros_fill_up_what_is_missing() -> None:
    values = torch.zeros(LARGE)
    values[[7, 70_000, LARGE - 1]] = torch.tensor([1.0, -2.0, 3.0])
    assert largest(values, 2).tolist() == [70_000, LARGE - 1]
    assert largest(values, 6).tolist() == [0, 1, 2, 7, 70_000, LARGE - 1]
    assert largest(values, 20_000).tolist() == [*range(19_998), 70_000, LARGE - 1]


@pytest.mark.parametrize("size", [100, LARGE])
def test_nan_is_larger_than_infinity_and_that_than_all_else(size: int) -> None:
    values = torch.linspace(-1, 1, size)
    values[50], values[60], values[70] = torch.inf, -torch.nan, -torch.inf
    assert largest(values, 1).tolist() == [60]
    assert largest(values, 2).tolist() == [50, 60]
    assert largest(values, 3).tolist() == [50, 60, 70]
    assert largest(values, 4).tolist() == [0, 50, 60, 70]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_floats_will_do(dtype: torch.dtype) -> None:
    small = torch.tensor([1.0, -3.0, 0.0, 2.0, -2.0], dtype=dtype)
    assert [largest(small, k).tolist() for k in range(4)] == [[], [1], [1, 3], [1, 3, 4]]
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(3)).to(dtype)
    k = LARGE // 100
    assert torch.equal(values[largest(values, k)].abs().sort().values, values.abs().sort().values[-k:])


def test_it_reads_parts_of_tensors_and_leaves_them_as_they_are() -> None:
    values = torch.randn(2 * LARGE, generator=torch.Generator().manual_seed(4), requires_grad=True)
    before = values.detach().clone()
    every_other = values[::2]
    assert torch.equal(largest(every_other, 1000), largest(before[::2].contiguous(), 1000))
    assert torch.equal(values, before)


def test_nobody_else_draws_differently_afterwards() -> None:
    values = torch.randn(LARGE, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    np.random.seed(0)
    first = largest(values, 5000)
    drawn = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    assert drawn == (torch.rand(1).item(), np.random.rand())
    assert torch.equal(largest(values, 5000), first)


def test_other_devices_choose_for_themselves() -> None:
    chosen = largest(torch.empty(LARGE, device="meta"), 1000)
    assert chosen.device.type == "meta" and chosen.shape == (1000,) and chosen.dtype == torch.int64


@pytest.mark.parametrize(
    ("values", "k", "said"),
    [
        (torch.zeros(3), 4, "4 of 3 entries"),
        (torch.zeros(3), -1, "-1 of 3 entries"),
        (torch.zeros(2, 2), 1, r"shape \(2, 2\).*one flat tensor"),
        (torch.zeros(3, dtype=torch.int32), 1, "torch.int32.*of floats"),
    ],
)
def test_what_cannot_be_chosen_is_told_why(values: Tensor, k: int, said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        largest(values, k)
