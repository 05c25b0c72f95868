"""Sums of gradients in flat memory, and the gradients that a backward pass has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.backends.replica import Replica
    from paceline.rules.rounding import Codes, Rounded

TRAILER = 5  # count of samples, number of ranks with data left, squared norm of the sum, squared count, weight
WORKING, WEIGHT = 1, TRAILER - 1


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

    __slots__ = (
        "_parameters",
        "codes",
        "given_back",
        "held",
        "kept",
        "known_norm",
        "origin",
        "rounding",
        "sums",
        "trailer",
        "views",
        "weight",
        "whole",
    )

    def __init__(self, whole: Tensor, parameters: Sequence[Tensor]) -> None:
        self.whole = whole
        self.known_norm: float | None = None
        self.weight: float | None = None  # of a model; None for as much as it has samples
        self.codes: Codes | None = None  # as what the sums travel, if not as they are; the trailer always does
        self.rounding: Rounded | None = None  # who has made them
        self.kept: Tensor | None = None  # what that one keeps of its part of the sum, if it counts
        self.origin: Callable[[FlatSum], None] | None = None
        """Writes the same sums once more, as long as something else holds them too."""
        self.held = self.given_back = False  # another rank may need it as it is; this one has no more use for it
        self._parameters = parameters
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
        if self.held:
            self.given_back = True
            return FlatSum(self.whole.clone(), self._parameters).plus(other)
        self.known_norm = self.origin = None
        if isinstance(other, FlatSum):
            self.whole.add_(other.whole)  # of two totals also the trailers
        else:
            for view, part in zip(self.views, other.parts, strict=True):
                if part is not None and part.is_sparse:
                    add_rows(view, part, other.count)
                elif part is not None:
                    view.add_(part, alpha=other.count)
        return self

    def copied_to(self, other: FlatSum) -> FlatSum:
        """The same sums in other memory, with another trailer."""
        other.sums.copy_(self.sums)
        other.weight = self.weight
        return other

    def leave_out(self) -> None:
        """There is nothing, or nothing finite, to bring."""
        self.whole.zero_()
        self.weight, self.origin = 0.0, _leave_empty

    def round(self, rounding: Rounded) -> None:
        """Its sums travel as codes. These can be brought again as they are, and the memory is free for the result."""
        self.codes, self.rounding, self.origin = rounding.push(self.sums), rounding, _leave_as_it_is

    @property
    def nbytes(self) -> int:
        """What it weighs on its way."""
        return self.whole.nbytes if self.rounding is None else self.rounding.nbytes + self.trailer.nbytes

    def tensor(self) -> Tensor:
        return self.sums


def _leave_empty(flat: FlatSum) -> None:
    flat.whole.zero_()


def _leave_as_it_is(flat: FlatSum) -> None:
    """Whatever is in it will be overwritten."""


class Brought:
    """What a rank has brought to a round, in whatever memory that is now. After a loss it may have to be brought once
    more, and collectives overwrite it: gradients as the backward pass has left them are kept, a sum of several is
    copied.

    Args:
        flat: that travels.
        replica: whose memory it is.
        keep: whether there are others, of whom one may be lost.
        works: whether there is data left; a lost rank may have left some behind.
    """

    def __init__(self, flat: FlatSum, replica: Replica, keep: bool, works: Callable[[], bool]) -> None:
        self.flat, self._replica, self._works = flat, replica, works
        self._origin, flat.origin = flat.origin, None
        self._trailer, self._copy = flat.trailer.clone(), None
        flat.held = keep
        if keep and self._origin is None:
            self._copy = replica.buffer()
            self._copy.whole.copy_(flat.whole)

    def again(self) -> Tensor:
        """The same once more; nobody knows what is in the old memory, and until when somebody writes there."""
        flat = self._replica.buffer()
        if self._copy is not None:
            flat.whole.copy_(self._copy.whole)
        elif self._origin is not None:
            self._origin(flat)
            flat.trailer.copy_(self._trailer)
        flat.trailer[WORKING] = float(self._works())
        flat.held = True
        self.flat = flat
        return flat.whole

    def is_there(self) -> None:
        """The round is over here."""
        self._origin = None
        if self._copy is not None:
            self._replica.give_back(self._copy)
            self._copy = None

    def let_go(self) -> None:
        """No other rank can need the result any more. Where none could have, this rank has given the memory back
        itself, and it may be in use for something else by now."""
        was_held, self.flat.held = self.flat.held, False
        if was_held and self.flat.given_back:
            self._replica.give_back(self.flat)


class FreshGradient:
    """The mean gradients that a backward pass has just left, taken out of `.grad` and not copied yet."""

    __slots__ = ("_replica", "count", "parts")

    def __init__(self, replica: Replica, parts: list[Tensor | None], count: int) -> None:
        self._replica, self.parts, self.count = replica, parts, count

    def flat(self) -> FlatSum:
        """The sum over the samples, in a buffer of its own."""
        flat = self._replica.buffer()
        self.write(flat)
        flat.origin = self.write
        return flat

    def write(self, flat: FlatSum) -> None:
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

    def means(self, sparse: bool) -> list[Tensor | None] | None:
        """The gradients as they are, of a sparse one every row once. None if there are sparse ones, but none may be."""
        if not sparse and any(part is not None and part.is_sparse for part in self.parts):
            return None
        return [part.coalesce() if part is not None and part.is_sparse else part for part in self.parts]

    def plus(self, other: FlatSum | FreshGradient) -> FlatSum:
        return self.flat().plus(other)

    def tensor(self) -> Tensor:
        return self.flat().sums
