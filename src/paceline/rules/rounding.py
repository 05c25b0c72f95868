"""Rounded gradients: every number is sent in fewer bits, and what rounding takes away is added to what comes.

    v ← v + g,   send q = round(v),   v ← v − q                                               error feedback

The difference of a number and what it is rounded to is a number of the same precision, so that nothing is lost:
q + v after = v before + g, to the bit. Each block of 256 numbers has a scale of its own:

    fp16      q = s · half(v / s),     s a power of two, such that the largest of the block is far from overflow
    bf16      q = bfloat16(v)          the range of float32: the scale is 1
    int8      q = s · round(v / s),    s = max |v| / 127

An all-reduce of rounded numbers has two halves, as every ring has, and each is rounded once. Rank j adds up part j of
what all have sent, keeps what rounding takes from the sum, and gives the rounded sum to all:

    t_j = r_j + Σ_i q_ij,   Q_j = round(t_j),   r_j ← t_j − Q_j                by rank j, in the order of the ranks

All ranks unpack the same bytes, so all hold the same bits. Over any number of rounds Σ Q = Σ g − Σ_i v_i − r: what has
not arrived yet is what is kept.

When a rank is lost, an all-reduce that nobody holds is repeated with the same q, in other parts: r is kept only when
the sum counts, and when the parts change it goes into v, so that only what the lost rank kept is lost with it.

Error feedback: Seide, Fu, Droppo, Li and Yu (2014), "1-bit stochastic gradient descent"; Karimireddy, Rebjock, Stich
and Jaggi (2019), arXiv 1901.09847. In both halves: Tang, Lian, Yu, Zhang and Liu (2019), arXiv 1905.05957.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import PacelineError, no_such
from paceline.rules.codes import BLOCK, CODES, SCALE_BYTES, code_bytes, part_size
from paceline.rules.compression import Compressor, check_gradient

if TYPE_CHECKING:
    from torch import Tensor

KINDS = {"fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
LARGEST_INT8 = 127
HEADROOM = 14  # of fp16: the largest of a block is brought below 2^14, and 2^-24 below that is still told from zero
TINY = 1e-30  # a block below this is kept, not sent: its scale would be no ordinary number


@dataclass(frozen=True, eq=False)
class Codes:
    """Rounded numbers in blocks.

    Args:
        numbers: [blocks, BLOCK], as they travel.
        scales: [blocks], float32.
        code: one of `KINDS`.
    """

    numbers: Tensor
    scales: Tensor
    code: str

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The numbers that they stand for, flat."""
        return (self.numbers.to(dtype) * self.scales.to(dtype).unsqueeze(1)).flatten()

    def filled(self, parts: int) -> Codes:
        """As many blocks as so many equal parts have; those at the end are zero."""
        missing = part_size(self.numbers.numel(), parts) * parts // BLOCK - len(self.scales)
        if not missing:
            return self
        numbers, scales = self.numbers.new_zeros(missing, BLOCK), self.scales.new_ones(missing)
        return Codes(torch.cat([self.numbers, numbers]), torch.cat([self.scales, scales]), self.code)

    def part(self, place: int, parts: int) -> Codes:
        """One of so many equal parts."""
        filled = self.filled(parts)
        each = len(filled.scales) // parts
        cut = slice(place * each, (place + 1) * each)
        return Codes(filled.numbers[cut], filled.scales[cut], self.code)

    def to_bytes(self, parts: int) -> Tensor:
        """One row of bytes for each of so many equal parts: the numbers, then the scales."""
        filled = self.filled(parts)
        rows = [each.contiguous().view(torch.uint8).reshape(parts, -1) for each in (filled.numbers, filled.scales)]
        return torch.cat(rows, dim=1)

    @classmethod
    def from_bytes(cls, row: Tensor, code: str) -> Codes:
        """The other way round, of one row."""
        blocks = len(row) // (BLOCK * CODES[code] + SCALE_BYTES)
        numbers, scales = row[: -SCALE_BYTES * blocks].clone(), row[-SCALE_BYTES * blocks :].clone()
        return cls(numbers.view(KINDS[code]).view(blocks, BLOCK), scales.view(torch.float32), code)


def rounded(values: Tensor, code: str) -> Codes:
    """The nearest numbers that the code has.

    Args:
        values: flat, in whole blocks.
        code: one of `KINDS`.

    >>> values = torch.zeros(BLOCK)
    >>> values[:3] = torch.tensor([127.0, 1.4, -100.6])
    >>> rounded(values, "int8").decoded(torch.float32)[:3]
    tensor([ 127.,    1., -101.])
    """
    blocks = values.view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1).to(torch.float32)
    if code == "bf16":
        scales = torch.ones_like(largest)
    elif code == "fp16":
        scales = torch.exp2(torch.frexp(largest).exponent.to(torch.float32) - HEADROOM)
    else:
        scales = largest / LARGEST_INT8
    sent = largest > TINY
    scales = torch.where(sent, scales, 1.0)
    numbers = torch.where(sent.unsqueeze(1), blocks / scales.to(values.dtype).unsqueeze(1), 0.0)
    if code == "int8":
        numbers = numbers.round().clamp(-LARGEST_INT8, LARGEST_INT8)
    return Codes(numbers.to(KINDS[code]), scales, code)


class Rounded(Compressor):
    """Sends every number, rounded, and keeps what that takes away. One round at a time: what it pushes next takes what
    was kept of the sum before.

    Args:
        like: a flat tensor of the size, type and device of every gradient.
        code: one of `KINDS`.

    >>> compressor = Rounded(torch.empty(2), "int8")
    >>> compressor.push(torch.tensor([127.0, 0.25])).decoded(torch.float32)[:2], compressor.flush()[:2]
    (tensor([127.,   0.]), tensor([0.0000, 0.2500]))
    """

    def __init__(self, like: Tensor, code: str) -> None:
        super().__init__(like)
        if code not in KINDS:
            raise no_such("way to round gradients", code, KINDS)
        self.code, self.size, self._device = code, len(like), like.device
        self._residual = self._zeros(part_size(self.size, 1))
        self._place, self._parts, self._under_way = 0, 1, False
        self.kept = torch.zeros_like(self._residual)
        """Of the sums of this rank's part."""

    def _zeros(self, numbers: int) -> Tensor:
        return torch.zeros(numbers, dtype=self._like.dtype, device=self._device)

    @property
    def nbytes(self) -> int:
        """Of one push, on its way."""
        return code_bytes(self.code, self.size)

    def push(self, gradient: Tensor) -> Codes:  # type: ignore[override]  # rounded numbers, where others send few
        check_gradient(gradient, self._like)
        if self._under_way:
            raise PacelineError(
                "A round of rounded gradients was started before the one before it was over.",
                remedy="Await the all-reduce that is in flight first, or train without compress.",
            )
        self._under_way = True
        self._residual[: self.size].add_(gradient)
        codes = rounded(self._residual, self.code)
        self._residual.sub_(codes.decoded(gradient.dtype))
        return codes

    def arrange(self, place: int, parts: int) -> None:
        """From now on this rank adds up the part at this place, of so many. What it has kept of another is its own
        to send."""
        if (place, parts) != (self._place, self._parts):
            first = self._place * len(self.kept)
            own = self._residual[first : first + len(self.kept)]
            own.add_(self.kept[: len(own)])  # beyond the end there are zeros
            self._place, self._parts = place, parts
            self.kept = self._zeros(part_size(self.size, parts))

    def add_up(self, parts: Sequence[Codes]) -> tuple[Codes, Tensor]:
        """This rank's part of what all ranks have pushed, in their order: the rounded sum, for all of them, and what is
        to be kept if it counts."""
        total = self.kept.clone()
        for part in parts:
            total.add_(part.decoded(total.dtype))
        codes = rounded(total, self.code)
        return codes, total.sub_(codes.decoded(total.dtype))

    def settle(self, kept: Tensor | None) -> None:
        """The round counts. `kept`: of this rank's part of it; None if it has added up none."""
        self._under_way = False
        if kept is not None:
            self.kept = kept

    def unpack(self, sums: Sequence[Codes], into: Tensor) -> None:
        """The sums of all parts, in the order of the ranks, as one flat tensor."""
        whole = torch.cat([each.decoded(into.dtype) for each in sums])
        into.copy_(whole[: self.size])

    def flush(self) -> Tensor | None:
        if not self._residual.any():
            return None
        kept = self._residual[: self.size].clone()
        self._residual.zero_()
        return kept

    def state(self) -> dict[str, Tensor]:
        return {"residual": self._residual}
