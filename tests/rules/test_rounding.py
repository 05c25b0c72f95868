"""Rounded gradients: what is sent and what is kept make up what came, to the bit, in both halves of an all-reduce."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.rules.codes import BLOCK, code_bytes, part_size
from paceline.rules.rounding import KINDS, Codes, Rounded, rounded

SIZE = 3 * BLOCK + 17
# The largest relative error of a rounded number beside the largest of its block.
FINENESS = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / (2 * 127)}


def gradients(rounds: int, ranks: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Of very different sizes, from one entry to the next and from one block to the next."""
    dice = torch.Generator().manual_seed(7)
    sizes = torch.exp(4 * torch.randn(SIZE, generator=dice)).to(dtype)
    return [[torch.randn(SIZE, generator=dice).to(dtype) * sizes for _ in range(ranks)] for _ in range(rounds)]


def added_up(compressors: list[Rounded], pushes: list[Codes], counts: bool = True) -> Tensor:
    ranks, sums = len(compressors), []
    for place, compressor in enumerate(compressors):
        compressor.arrange(place, ranks)
        own, kept = compressor.add_up([push.part(place, ranks) for push in pushes])
        sums.append(own)
        if counts:
            compressor.settle(kept)
    total = torch.empty(SIZE, dtype=torch.float64)
    compressors[0].unpack(sums, total)
    return total


def all_reduced(compressors: list[Rounded], each: list[Tensor]) -> Tensor:
    return added_up(compressors, [compressor.push(own) for compressor, own in zip(compressors, each, strict=True)])


def kept_by(compressors: list[Rounded]) -> Tensor:
    """Of what they have pushed, and of the sums that they have made."""
    held = torch.cat([each.kept for each in compressors])[:SIZE]
    return held + sum(each.state()["residual"][:SIZE] for each in compressors)


@pytest.mark.parametrize("code", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_sent_and_what_is_kept_is_what_came_to_the_bit(code: str, dtype: torch.dtype) -> None:
    compressor = Rounded(torch.empty(SIZE, dtype=dtype), code)
    before = torch.zeros(SIZE, dtype=dtype)
    for (gradient,) in gradients(rounds=5, ranks=1, dtype=dtype):
        given = gradient.clone()
        sent = compressor.push(gradient).decoded(dtype)[:SIZE]
        after = compressor.state()["residual"][:SIZE]
        assert torch.equal(sent + after, before + gradient), "nothing is lost in the rounding"
        assert torch.equal(gradient, given), "the gradient stays as it is"
        before = after.clone()
        compressor.settle(None)


@pytest.mark.parametrize("code", KINDS)
def test_the_sum_of_a_part_and_what_is_kept_of_it_is_what_all_have_sent_to_the_bit(code: str) -> None:
    ranks = 2
    compressors = [Rounded(torch.empty(SIZE), code) for _ in range(ranks)]
    compressors[0].arrange(0, ranks)
    before = torch.zeros(part_size(SIZE, ranks))
    for each in gradients(rounds=4, ranks=ranks):
        parts = [compressor.push(own).part(0, ranks) for compressor, own in zip(compressors, each, strict=True)]
        wanted = before + parts[0].decoded(torch.float32) + parts[1].decoded(torch.float32)
        sent, kept = compressors[0].add_up(parts)
        for compressor in compressors:
            compressor.settle(kept)
        assert torch.equal(sent.decoded(torch.float32) + compressors[0].kept, wanted)
        before = kept


@pytest.mark.parametrize("code", KINDS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_over_many_rounds_only_what_is_kept_is_missing(code: str, ranks: int) -> None:
    """Σ Q = Σ g − Σ v − r, in exact arithmetic; here in float64, where the last bits are all that may differ."""
    like = torch.empty(SIZE, dtype=torch.float64)
    compressors = [Rounded(like, code) for _ in range(ranks)]
    rounds = gradients(rounds=8, ranks=ranks, dtype=torch.float64)
    arrived = sum(all_reduced(compressors, each) for each in rounds)
    given = sum(sum(each) for each in rounds)
    torch.testing.assert_close(arrived + kept_by(compressors), given, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("code", KINDS)
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_with_a_rank_only_what_it_kept_is_lost(code: str, lost: int) -> None:
    """The third round is repeated without it, each with what it had pushed; a round that does not count leaves nothing
    behind. Then the parts are others, and what was kept of the old ones still arrives."""
    like, ranks = torch.empty(SIZE, dtype=torch.float64), 4
    compressors = [Rounded(like, code) for _ in range(ranks)]
    rounds = gradients(rounds=6, ranks=ranks, dtype=torch.float64)
    arrived = sum(all_reduced(compressors, each) for each in rounds[:2])
    pushes = [compressor.push(own) for compressor, own in zip(compressors, rounds[2], strict=True)]
    added_up(compressors, pushes, counts=False)
    first = lost * part_size(SIZE, ranks)
    gone = compressors[lost].state()["residual"][:SIZE] + pushes[lost].decoded(like.dtype)[:SIZE]
    gone[first : first + part_size(SIZE, ranks)] += compressors[lost].kept[: SIZE - first]
    for each in (compressors, pushes, *rounds[3:]):
        del each[lost]
    arrived += added_up(compressors, pushes)
    arrived += sum(all_reduced(compressors, each) for each in rounds[3:])
    given = sum(sum(each) for each in rounds)
    torch.testing.assert_close(arrived + kept_by(compressors) + gone, given, rtol=1e-12, atol=1e-9)


def test_a_second_round_before_the_first_is_over_is_refused() -> None:
    compressor = Rounded(torch.empty(2), "int8")
    compressor.push(torch.ones(2))
    with pytest.raises(PacelineError, match="before the one before it was over"):
        compressor.push(torch.ones(2))


@pytest.mark.parametrize("code", KINDS)
def test_a_number_is_off_by_no_more_than_the_code_promises(code: str) -> None:
    (values,) = gradients(rounds=1, ranks=1)[0]
    blocks = values[: 3 * BLOCK].view(3, BLOCK)
    off = (rounded(blocks.flatten(), code).decoded(torch.float32).view(3, BLOCK) - blocks).abs()
    largest = blocks.abs().amax(dim=1, keepdim=True)
    allowed = FINENESS[code] * (largest if code == "int8" else blocks.abs() + largest * 2**-24)
    assert bool((off <= allowed * 1.001).all())


@pytest.mark.parametrize("code", KINDS)
def test_codes_are_the_same_after_they_have_travelled_as_bytes(code: str) -> None:
    ranks = 4
    compressor = Rounded(torch.empty(SIZE), code)
    codes = compressor.push(gradients(1, 1)[0][0])
    rows = codes.to_bytes(ranks)
    assert rows.dtype == torch.uint8 and rows.nbytes == code_bytes(code, ranks * part_size(SIZE, ranks))
    for rank in range(ranks):
        there, here = Codes.from_bytes(rows[rank], code), codes.part(rank, ranks)
        assert torch.equal(there.numbers, here.numbers) and torch.equal(there.scales, here.scales)
    assert compressor.nbytes == code_bytes(code, SIZE)


@pytest.mark.parametrize("code", KINDS)
def test_extremes_are_neither_overflow_nor_nan(code: str) -> None:
    values = torch.zeros(4 * BLOCK)
    values[0], values[BLOCK], values[2 * BLOCK] = 1e37, -1e-35, 3e-38
    decoded = rounded(values, code).decoded(torch.float32)
    assert bool(decoded.isfinite().all())
    assert decoded[0] == pytest.approx(1e37, rel=2**-8) and not decoded[3 * BLOCK :].any()
    compressor = Rounded(values, code)
    compressor.push(values)
    after = compressor.state()["residual"]
    assert torch.equal(decoded + after, values), "what is too small to be sent is kept"


def test_an_empty_contribution_sends_what_was_kept() -> None:
    compressor = Rounded(torch.empty(2), "int8")
    compressor.push(torch.tensor([127.0, 0.4]))
    compressor.settle(None)
    sent = compressor.push(torch.zeros(2)).decoded(torch.float32)[:2]
    torch.testing.assert_close(sent, torch.tensor([0.0, 0.4]))
    assert compressor.flush() is None


def test_what_is_no_gradient_or_no_code_is_refused() -> None:
    with pytest.raises(PacelineError, match="NaN or infinite"):
        Rounded(torch.empty(2), "int8").push(torch.tensor([1.0, float("nan")]))
    with pytest.raises(PacelineError, match="no way to round gradients 'fp8'"):
        Rounded(torch.empty(2), "fp8")


def test_a_checkpoint_can_hold_what_is_kept() -> None:
    one, other = (Rounded(torch.empty(SIZE), "int8") for _ in range(2))
    first, second = (each[0] for each in gradients(rounds=2, ranks=1))
    one.push(first)
    one.settle(None)
    other.load({name: tensor.clone() for name, tensor in one.state().items()})
    assert torch.equal(one.push(second).numbers, other.push(second).numbers)
