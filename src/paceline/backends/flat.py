"""Sums of gradients in flat memory, and the gradients that a backward pass has left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.backends.replica import Replica
    from paceline.rules.rounding import Codes, Rounded

TRAILER = 5  # count of samples, number of ranks with data left, squared norm of the sum, squared count, weight
WEIGHT = TRAILER - 1


def layout(parameter: Tensor) -> tuple[int, ...]:
    """The strides that a tensor of the parameter's own keeps: `channels_last` stays, a view into another does not."""
    return torch.empty_like(parameter, device="meta").stride()


def in_shape(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views into flat values, each in the shape and memory format of its parameter.

    Without the format a model in `channels_last` would lose what its user chose it for, half of its speed.

    >>> weights = torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last)
    >>> in_shape(torch.arange(8), [weights])[0].is_contiguous(memory_format=torch.channels_last)
    True
    """
    parts = flat.split([p.numel() for p in parameters])
    return [part.as_strided(p.shape, layout(p)) for part, p in zip(parts, parameters, strict=True)]


def add_rows(view: Tensor, part: Tensor, count: int) -> None:
    """view ← view + count · part, touching only the rows that a sparse gradient has; one may come several times.

    torch's own dense.add_(sparse) adds nothing at all where the values are an expanded number (seen in 2.13: the
    gradient of `embedding(row).sum()` for a table of width 1).

    >>> sums, table = torch.zeros(3, 1), torch.nn.Embedding(3, 1, sparse=True)
    >>> table(torch.tensor([2])).sum().backward()
    >>> add_rows(sums, table.weight.grad, count=4)
    >>> sums.flatten().tolist()
    [0.0, 0.0, 4.0]
    """
    if part.sparse_dim() == 1:
        view.index_add_(0, part._indices()[0], part._values().to(view.dtype), alpha=count)
    else:  # of no layer of torch's
        view.add_(part.to_dense(), alpha=count)


class FlatSum:
    """A sum of gradients in one buffer, with room for the trailer behind it."""

    __slots__ = ("codes", "known_norm", "rounding", "sums", "trailer", "views", "weight", "whole")

    def __init__(self, whole: Tensor, parameters: Sequence[Tensor]) -> None:
        self.whole = whole
        self.known_norm: float | None = None
        self.weight: float | None = None  # of a model; None for as much as it has samples
        self.codes: Codes | None = None  # as what the sums travel, if not as they are; the trailer always does
        self.rounding: Rounded | None = None  # who has made them
        size = sum(p.numel() for p in parameters)
        self.sums, self.trailer = whole[:size], whole[size:]
        self.views = in_shape(self.sums, parameters)

    @property
    def norm(self) -> float:
        """Worked out once: looking ahead and joining a round both ask whether the sum is finite."""
        if self.known_norm is None:
            self.known_norm = float(torch.linalg.vector_norm(self.sums))
        return self.known_norm

    def plus(self, other: FlatSum | FreshGradient) -> FlatSum:
        self.known_norm = None
        if isinstance(other, FlatSum):
            self.whole.add_(other.whole)  # of two totals also the trailers
        else:
            for view, part in zip(self.views, other.parts, strict=True):
                if part is not None and part.is_sparse:
                    add_rows(view, part, other.count)
                elif part is not None:
                    view.add_(part, alpha=other.count)
        return self

    def leave_out(self) -> None:
        """There is nothing, or nothing finite, to bring."""
        self.whole.zero_()
        self.weight = 0.0

    @property
    def nbytes(self) -> int:
        """What it weighs on its way."""
        return self.whole.nbytes if self.rounding is None else self.rounding.nbytes + self.trailer.nbytes

    def tensor(self) -> Tensor:
        return self.sums


class FreshGradient:
    """The mean gradients that a backward pass has just left, taken out of `.grad` and not copied yet."""

    __slots__ = ("_replica", "count", "parts")

    def __init__(self, replica: Replica, parts: list[Tensor | None], count: int) -> None:
        self._replica, self.parts, self.count = replica, parts, count

    def flat(self) -> FlatSum:
        """The sum over the samples, in a buffer of its own."""
        flat = self._replica.buffer()
        flat.trailer.zero_()
        for view, part in zip(flat.views, self.parts, strict=True):
            if part is None:  # not reached by this backward pass
                view.zero_()
            elif part.is_sparse:  # few rows of a large table: never as a dense gradient beside the sum
                add_rows(view.zero_(), part, self.count)
                self._replica.tell_sparse(view)
            elif part.dtype == view.dtype:
                torch.mul(part, self.count, out=view)
            else:  # half precision: widen first, multiply then
                view.copy_(part).mul_(self.count)
        return flat

    def means(self, sparse: bool) -> list[Tensor | None] | None:
        """The gradients as they are, of a sparse one every row once. None if there are sparse ones, but none may be."""
        if not sparse and any(part is not None and part.is_sparse for part in self.parts):
            return None
        return [part.coalesce() if part is not None and part.is_sparse else part for part in self.parts]

    def plus(self, other: FlatSum | FreshGradient) -> FlatSum:
        return self.flat().plus(other)

    def tensor(self) -> Tensor:
        return self.flat().sums
