"""Compressors: nothing is lost, the largest go first, and the ratios are those of the papers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import PacelineError
from paceline.rules.compression import (
    COMPRESSORS,
    Compressor,
    Dgc,
    GDTopK,
    Sparse,
    TopK,
    dgc_ratio,
    entries,
    gdtopk_ratio,
    group_base,
    index_type,
    smoothed,
)

SIZE = 23
MAKE: dict[str, Callable[[Tensor], Compressor]] = {
    "none": Compressor,
    "top-k": lambda like: TopK(like, ratio=0.1),
    "gdtopk": GDTopK,
    "gdtopk with momentum": lambda like: GDTopK(like, direction="speed", momentum=0.5),
    "dgc": Dgc,
}
KEEPING = sorted(set(MAKE) - {"none"})

whole = st.lists(st.integers(-1000, 1000), min_size=SIZE, max_size=SIZE)
fine = st.lists(st.floats(-1e6, 1e6, width=32), min_size=SIZE, max_size=SIZE)
ratios = st.floats(0.001, 1.0)


def dense(push: Sparse | Tensor) -> Tensor:
    return push.add_to(torch.zeros(push.size)) if isinstance(push, Sparse) else push


def copies(compressor: Compressor) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in compressor.state().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def some_gradients(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator) for _ in range(count)]


@settings(deadline=None)
@given(st.lists(whole, min_size=1, max_size=12), ratios, st.lists(st.booleans(), min_size=12, max_size=12))
def test_sent_and_residual_are_the_sum_of_all_gradients(
    rows: list[list[int]], ratio: float, flushes: list[bool]
) -> None:
    # Whole numbers, of which sums are exact in any order: not one unit may be missing.
    compressor, sent = TopK(torch.empty(SIZE), ratio), torch.zeros(SIZE)
    for number, row in enumerate(rows):
        sent += dense(compressor.push(torch.tensor(row, dtype=torch.float32)))
        assert torch.equal(sent + compressor.state()["residual"], torch.tensor(rows[: number + 1]).sum(0).float())
        flushed = compressor.flush() if flushes[number] else None
        sent += 0 if flushed is None else flushed
    assert torch.equal(sent + compressor.state()["residual"], torch.tensor(rows).sum(0).float())


@settings(deadline=None)
@given(st.lists(fine, min_size=1, max_size=8), ratios)
def test_entries_are_moved_and_not_computed(rows: list[list[float]], ratio: float) -> None:
    compressor = TopK(torch.empty(SIZE), ratio)
    residual = compressor.state()["residual"]
    for row in rows:
        gradient = torch.tensor(row)
        total = residual + gradient
        push = compressor.push(gradient)
        chosen = push.indices.long()
        assert torch.equal(push.values, total[chosen]), "bitwise"
        assert not residual[chosen].any()
        assert torch.equal(dense(push) + residual, total), "one of the two is zero, so this is bitwise too"
        assert push.values.abs().min() >= residual.abs().max(), "the largest have gone"
        assert len(push.values) == entries(ratio, SIZE)
        push.check()


@settings(deadline=None)
@given(st.lists(whole, min_size=1, max_size=8), st.sampled_from([0.0, 0.5]), ratios)
def test_momentum_by_the_formulas(rows: list[list[int]], momentum: float, ratio: float) -> None:
    compressor = TopK(torch.empty(SIZE, dtype=torch.float64), ratio, momentum)
    velocity, residual = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    for row in rows:
        push = compressor.push(torch.tensor(row, dtype=torch.float64))
        velocity = momentum * velocity + torch.tensor(row)
        residual = residual + velocity
        mask = torch.zeros(SIZE, dtype=torch.bool)
        mask[push.indices.long()] = True
        assert torch.equal(push.values, residual[mask])
        residual, velocity = residual * ~mask, velocity * ~mask
        assert torch.equal(compressor.state()["residual"], residual)
        assert not momentum or torch.equal(compressor.state()["velocity"], velocity)


def test_a_last_flush_sends_what_plain_momentum_would_have_sent() -> None:
    # A push of the largest only: an entry that is never sent gathers all of its momentum, as in the optimizer.
    compressor, plain, total = Dgc(torch.empty(2), ratio=0.5, momentum=0.5), 0.0, 0.0
    for _ in range(4):
        assert compressor.push(torch.tensor([100.0, 1.0])).indices.tolist() == [0]
        plain = 0.5 * plain + 1.0
        total += plain
    flushed = compressor.flush()
    assert flushed is not None and flushed.tolist() == [0.0, total]
    assert not any(tensor.any() for tensor in compressor.state().values())
    assert compressor.flush() is None


@pytest.mark.parametrize("name", MAKE)
def test_a_checkpoint_goes_on_bitwise(name: str) -> None:
    gradients = some_gradients(8)
    first, second = MAKE[name](gradients[0]), MAKE[name](gradients[0])
    for gradient in gradients[:4]:
        first.push(gradient)
    second.load(deepcopy(first.state()))
    for gradient in gradients[4:]:
        assert torch.equal(dense(first.push(gradient)), dense(second.push(gradient)))
    assert same(first.state(), second.state())


@pytest.mark.parametrize("name", MAKE)
def test_the_state_is_the_same_tensors_for_good(name: str) -> None:
    compressor = MAKE[name](torch.empty(SIZE))
    state = compressor.state()
    for gradient in some_gradients(3):
        compressor.push(gradient)
        compressor.flush()
        compressor.begin(0)
    compressor.push(gradient)
    assert all(state[each] is tensor for each, tensor in compressor.state().items())
    assert name == "none" or state["residual"].any()


@pytest.mark.parametrize("name", MAKE)
def test_gradients_stay_as_they_are(name: str) -> None:
    compressor = MAKE[name](torch.empty(SIZE))
    for gradient in some_gradients(3):
        before = gradient.clone()
        compressor.push(gradient)
        compressor.flush()
        assert torch.equal(gradient, before)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (torch.ones(SIZE + 1), r"shape \(24,\).*instead of \(23,\)"),
        (torch.ones(1, SIZE), r"shape \(1, 23\)"),
        (torch.ones(SIZE, dtype=torch.float64), "torch.float64 was pushed instead of .*torch.float32"),
        (
            torch.ones(SIZE).index_fill(0, torch.tensor([4, 9]), torch.nan),
            "NaN or infinite at 2 of its 23 entries.*first at 4",
        ),
        (torch.ones(SIZE).index_fill(0, torch.tensor([22]), -torch.inf), "at 1 of its 23 entries.*first at 22"),
    ],
)
def test_wrong_gradients_are_refused_and_change_nothing(name: str, wrong: Tensor, said: str) -> None:
    compressor = MAKE[name](torch.empty(SIZE))
    compressor.push(some_gradients(1)[0])
    before = copies(compressor)
    with pytest.raises(PacelineError, match=said):
        compressor.push(wrong)
    assert same(compressor.state(), before)


def test_none_sends_everything_and_keeps_nothing() -> None:
    compressor, gradient = Compressor(torch.empty(SIZE)), torch.randn(SIZE)
    compressor.begin(3, [1.0, 2.0], 1)
    assert compressor.push(gradient) is gradient
    assert compressor.flush() is None and compressor.state() == {}


@pytest.mark.parametrize("name", KEEPING)
def test_nothing_is_flushed_before_the_first_push_and_after_a_flush(name: str) -> None:
    compressor = MAKE[name](torch.empty(SIZE))
    assert compressor.flush() is None
    compressor.push(torch.arange(1.0, SIZE + 1))
    flushed = compressor.flush()
    assert flushed is not None and flushed.any() and compressor.flush() is None
    compressor.push(torch.ones(SIZE))
    assert flushed.max() > 1, "what was flushed is the caller's own"


def test_smoothing_keeps_three_tenths() -> None:
    assert smoothed(None, 8.0) == 8.0
    assert smoothed(8.0, 18.0) == pytest.approx(0.3 * 8 + 0.7 * 18)


TIMES = [9.0, 4.0, 6.0, 5.0, 7.0]


@pytest.mark.parametrize(
    ("groups", "code"),
    [
        (1, [0.30]),
        (2, [0.35, 0.25]),
        (3, [0.35, 0.25, 0.30]),
        (4, [0.35, 0.25, 0.30, 0.30]),
        (5, [0.35, 0.25, 0.30, 0.275, 0.325]),
    ],
)
def test_the_base_of_a_group(groups: int, code: list[float]) -> None:
    found = [group_base(TIMES[:groups], group, "code") for group in range(groups)]
    assert found == pytest.approx(code)
    turned = [group_base(TIMES[:groups], group, "speed") for group in range(groups)]
    assert turned == pytest.approx([0.60 - base for base in code])


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=20))
def test_a_slower_group_never_sends_less_by_the_code_and_never_more_by_speed(times: list[float]) -> None:
    order = sorted(range(len(times)), key=times.__getitem__)
    by_code = [group_base(times, group, "code") for group in order]
    assert by_code == sorted(by_code) and by_code[0] == 0.25 and by_code[-1] == pytest.approx(0.35)
    by_speed = [group_base(times, group, "speed") for group in order]
    assert by_speed == by_code[::-1]


def test_equal_groups_are_told_apart_by_their_number() -> None:
    assert [group_base([1.0] * 4, group, "code") for group in range(4)] == pytest.approx([0.25, 0.30, 0.30, 0.35])


def test_the_ratios_of_gdtopk() -> None:
    for base, final in ((0.25, 0.0039), (0.30, 0.0081), (0.35, 0.0150)):
        found = [gdtopk_ratio(epoch, base) for epoch in range(8)]
        assert found[:6] == pytest.approx([0.35, 0.35, base, base**2, base**3, base**4])
        assert found[5:] == [found[5]] * 3 and round(found[5], 4) == final


@pytest.mark.parametrize(("direction", "counts"), [("code", [150, 39, 81, 81]), ("speed", [39, 150, 81, 81])])
def test_gdtopk_sends_by_epoch_and_group(direction: str, counts: list[int]) -> None:
    gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    for group, count in enumerate(counts):
        compressor = GDTopK(gradient, direction)
        assert compressor.ratio == 0.35
        for epoch in (0, 1):
            compressor.begin(epoch)
            assert len(compressor.push(gradient).values) == 3500
        compressor.begin(7, TIMES[:4], group)
        assert len(compressor.push(gradient).values) == count


def test_the_warm_up_of_dgc() -> None:
    # Lin et al.: a sparsity of 75 %, 93.75 %, 98.4375 %, 99.6 %, 99.9 %.
    found = [dgc_ratio(epoch, 0.001, 4) for epoch in range(6)]
    assert found == pytest.approx([0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001], rel=0.02)
    assert [dgc_ratio(epoch, 0.4, 4) for epoch in range(6)] == [0.4] * 6
    assert dgc_ratio(0, 0.01, 0) == 0.01
    compressor = Dgc(torch.empty(SIZE), ratio=0.01)
    assert compressor.ratio == 0.25
    compressor.begin(4)
    assert compressor.ratio == 0.01


@given(st.floats(1e-5, 1.0), st.integers(0, 10))
def test_the_warm_up_falls_by_the_same_factor(final: float, warm_up: int) -> None:
    found = [dgc_ratio(epoch, final, warm_up) for epoch in range(warm_up + 3)]
    assert found[warm_up:] == [final] * 3 and found == sorted(found, reverse=True)
    if final < 0.25:
        factor = (final / 0.25) ** (1 / max(1, warm_up))
        assert [b / a for a, b in pairwise(found)] == pytest.approx([factor] * warm_up + [1.0] * 2)


@given(ratios, st.integers(1, 10**9))
def test_at_least_one_entry_and_at_most_all(ratio: float, size: int) -> None:
    assert 1 <= entries(ratio, size) <= size
    assert entries(ratio, size) == 1 or abs(entries(ratio, size) - ratio * size) <= 0.5


def test_the_bytes_of_a_push() -> None:
    push = TopK(torch.empty(1000), ratio=0.01).push(torch.randn(1000))
    assert push.indices.dtype == torch.int32 and push.nbytes == 10 * (4 + 4)
    assert (index_type(2**31 - 1), index_type(2**31)) == (torch.int32, torch.int64)


def test_pushes_add_up() -> None:
    into = torch.ones(4)
    for indices, values in (([0, 3], [1.0, 2.0]), ([0, 1], [10.0, 20.0]), ([], [])):
        push = Sparse(torch.tensor(indices, dtype=torch.int32), torch.tensor(values), 4)
        push.check()
        assert push.add_to(into) is into
    assert into.tolist() == [12.0, 21.0, 1.0, 3.0]
    with pytest.raises(PacelineError, match=r"push of 4 entries .* shape \(5,\)"):
        push.add_to(torch.zeros(5))


@pytest.mark.parametrize(
    ("indices", "values", "said"),
    [
        ([0, 4], [1.0, 1.0], "do not ascend from 0 to at most 3"),
        ([-1, 2], [1.0, 1.0], "do not ascend"),
        ([2, 2], [1.0, 1.0], "do not ascend"),
        ([3, 1], [1.0, 1.0], "do not ascend"),
        ([1], [1.0, 1.0], r"indices of shape \(1,\) .* values of shape \(2,\)"),
        ([1, 2], [1.0, torch.nan], "at 1 of its 2 entries"),
    ],
)
def test_a_push_that_no_compressor_made_is_refused(indices: list[int], values: list[float], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        Sparse(torch.tensor(indices, dtype=torch.int32), torch.tensor(values), 4).check()
    with pytest.raises(PacelineError, match=r"as torch\.int32"):
        Sparse(torch.tensor(indices), torch.tensor(values), 4).check()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TopK(torch.empty(4), 0.0), "share 0"),
        (lambda: TopK(torch.empty(4), 1.5), r"share 1\.5"),
        (lambda: TopK(torch.empty(4), 0.1, momentum=1.0), "Momentum cannot be 1"),
        (lambda: TopK(torch.empty(2, 2), 0.1), r"shape \(2, 2\).*one flat tensor"),
        (lambda: Compressor(torch.empty(0)), r"shape \(0,\)"),
        (lambda: GDTopK(torch.empty(4), "sped"), "Did you mean 'speed'"),
        (lambda: GDTopK(torch.empty(4)).begin(2), r"Group 0 has no place among the epoch times \[\]"),
        (lambda: group_base([1.0, 2.0], 2, "code"), r"Group 2 has no place among .*\[1\.0, 2\.0\]"),
        (lambda: group_base([1.0, torch.nan], 0, "code"), "nan"),
        (lambda: TopK(torch.empty(4), 0.1).load({}), r"state \{\}, and \{'residual': \(4,\)\} is needed"),
        (lambda: Compressor(torch.empty(4)).load({"residual": torch.empty(4)}), "another compressor"),
        (lambda: TopK(torch.empty(4), 0.1).load({"residual": torch.empty(5)}), "another model"),
    ],
)
def test_wrong_settings_are_told_why(make: Callable[[], object], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        make()


def test_every_compressor_has_a_name() -> None:
    assert list(COMPRESSORS) == ["none", "top-k", "gdtopk", "dgc"]
