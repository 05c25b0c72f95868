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

Error feedback: Seide, Fu, Droppo, Li and Yu (2014), "1-bit stochastic gradient descent"; Karimireddy, Rebjock, Stich
and Jaggi (2019), arXiv 1901.09847. In both halves: Tang, Lian, Yu, Zhang and Liu (2019), arXiv 1905.05957.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import no_such
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

    def part(self, place: int, parts: int) -> Codes:
        """One of so many equal parts."""
        each = len(self.scales) // parts
        cut = slice(place * each, (place + 1) * each)
        return Codes(self.numbers[cut], self.scales[cut], self.code)

    def to_bytes(self, parts: int) -> Tensor:
        """One row of bytes for each of so many equal parts: the numbers, then the scales."""
        rows = [each.contiguous().view(torch.uint8).reshape(parts, -1) for each in (self.numbers, self.scales)]
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
    """Sends every number, rounded, and keeps what that takes away.

    Args:
        like: a flat tensor of the size, type and device of every gradient.
        code: one of `KINDS`.
        ranks: that add their gradients up.

    >>> compressor = Rounded(torch.empty(2), "int8")
    >>> compressor.push(torch.tensor([127.0, 0.25])).decoded(torch.float32)[:2], compressor.flush()[:2]
    (tensor([127.,   0.]), tensor([0.0000, 0.2500]))
    """

    def __init__(self, like: Tensor, code: str, ranks: int = 1) -> None:
        super().__init__(like)
        if code not in KINDS:
            raise no_such("way to round gradients", code, KINDS)
        self.code, self._ranks, self._size = code, ranks, len(like)
        part = part_size(self._size, ranks)
        self._residual = torch.zeros(ranks * part, dtype=like.dtype, device=like.device)
        self._kept = torch.zeros(part, dtype=like.dtype, device=like.device)

    @property
    def nbytes(self) -> int:
        """Of one push, on its way."""
        return code_bytes(self.code, self._size)

    def push(self, gradient: Tensor) -> Codes:  # type: ignore[override]  # rounded numbers, where others send few
        check_gradient(gradient, self._like)
        self._residual[: self._size].add_(gradient)
        codes = rounded(self._residual, self.code)
        self._residual.sub_(codes.decoded(gradient.dtype))
        return codes

    def add_up(self, parts: Sequence[Codes]) -> Codes:
        """This rank's part of what all ranks have pushed, in their order: the rounded sum, for all of them."""
        total = self._kept.clone()
        for part in parts:
            total.add_(part.decoded(total.dtype))
        codes = rounded(total, self.code)
        torch.sub(total, codes.decoded(total.dtype), out=self._kept)
        return codes

    def unpack(self, sums: Sequence[Codes], into: Tensor) -> None:
        """The sums of all parts, in the order of the ranks, as one flat tensor."""
        whole = torch.cat([each.decoded(into.dtype) for each in sums])
        into.copy_(whole[: self._size])

    def flush(self) -> Tensor | None:
        if not self._residual.any():
            return None
        kept = self._residual[: self._size].clone()
        self._residual.zero_()
        return kept

    def state(self) -> dict[str, Tensor]:
        return {"residual": self._residual, "kept": self._kept}
