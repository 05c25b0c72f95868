"""Merging large models: only what somebody has moved travels, in chunks, and the merged model is made in place.

    common ← common + Σ α_i (w_i − common) / Σ α_i

All ranks hold `common` alike. Numbers in which w_i equals it add nothing, so they need not travel where no rank has
moved them: rows of a table that no sample of anybody has touched. That is exact whatever the optimizer does, because
the models themselves are compared. The numbers lie in blocks; all ranks first tell each other which blocks they have
moved, one byte for each, and then add up those that somebody has. A small model is not worth asking for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from paceline.backends.flat import WEIGHT, WORKING

BLOCK = 64
"""Numbers in a block: a row of a table is a few of them, and the byte that tells of one is 0.4 % of its weight."""
CHUNK = 2**20
"""Numbers that travel at once, 4 MiB: packed and placed while they are still in a processor's cache."""
SMALL = 2**19
"""Numbers of a model that has no blocks and travels whole, at once: to ask first would take longer than it saves."""


class Movement:
    """How far a rank's model has moved from the common one; one rank's part in a merge.

    Args:
        model: w_i.
        common: what all ranks hold alike; the merged model when the merge is done.
        weight: α_i. With 0 the model brings nothing.
        trailer: numbers that travel along and are added up, in memory of the kind that sums are worked out in.
    """

    def __init__(self, model: Tensor, common: Tensor, weight: float, trailer: Tensor) -> None:
        self.common, self.weight, self.trailer = common, weight, trailer
        self.works: Callable[[], bool] = lambda: bool(self.trailer[WORKING])
        self._model, whole = model, model.numel() // BLOCK * BLOCK if model.numel() > SMALL else 0
        self._models, self._commons = (each[:whole].view(-1, BLOCK) for each in (model, common))
        self._rest = model[whole:], common[whole:]  # in no block: it always travels

    @cached_property
    def _differs(self) -> Tensor:
        """One byte for each block: whether it is another one than the common model's, to the bit. Eight bytes are
        compared at once: it takes a quarter of the time of a look at every number."""
        differs = torch.empty(len(self._models), dtype=torch.bool, device=self.common.device)
        models, commons = (each.view(torch.int64) for each in (self._models, self._commons))
        for first in range(0, len(models), CHUNK // BLOCK):
            part = slice(first, first + CHUNK // BLOCK)
            torch.any((models[part] != commons[part]).view(torch.int64), 1, out=differs[part])
        return differs.view(torch.uint8)

    @cached_property
    def norm(self) -> float:
        """Of the model: not finite if that is not."""
        return float(torch.linalg.vector_norm(self._model, dtype=self.trailer.dtype)) if self.weight else 0.0

    @property
    def moved(self) -> Tensor:
        """One byte for each block: whether this rank brings anything for it."""
        return self._differs if self.weight else self._models.new_zeros(len(self._models), dtype=torch.uint8)

    def leave_out(self) -> None:
        """The model is not finite: it brings nothing."""
        self.weight = 0.0

    def plus(self, other: object) -> NoReturn:
        raise TypeError("Two merges cannot be added up: each moves the common model in place.")

    def tensor(self) -> Tensor:
        """What all ranks hold; when the merge is done, the merged model."""
        return self.common

    @property
    def nbytes(self) -> int:
        """What travels of what this rank has moved itself."""
        return self.nbytes_of(self.moved)

    def nbytes_of(self, moved: Tensor) -> int:
        """What travels when these blocks do."""
        numbers = int(moved.count_nonzero()) * BLOCK + len(self._rest[0]) + len(self.trailer)
        return numbers * self.trailer.element_size() + len(moved)

    def chunks(self, moved: Tensor) -> Iterator[Tensor]:
        """The blocks to travel at once, of those that somebody has moved."""
        blocks = moved.nonzero()[:, 0]
        return iter(blocks.split(CHUNK // BLOCK) if len(blocks) else ())

    def head_again(self) -> Tensor:
        """The same once more, after a loss: the lost rank may have left data behind."""
        self.trailer[WORKING] = float(self.works())
        return self.head()

    def head(self) -> Tensor:
        """What travels first: the trailer, and the rest that is in no block."""
        return torch.cat([self.trailer, self._packed(*self._rest)])

    def pack(self, blocks: Tensor) -> Tensor:
        """This rank's part in the sum of these blocks, and its weight: of each chunk the mean is by the weights of
        those who have brought it, also if one of them is lost between two chunks."""
        where, kind = _where(blocks), self.trailer.dtype
        packed = torch.empty(len(blocks) * BLOCK + 1, dtype=kind, device=self.common.device)
        if not self.weight:
            return packed.zero_()
        sums = packed[:-1].view(-1, BLOCK)
        model, common = (_chosen(each, where) for each in (self._models, self._commons))
        torch.sub(model.to(kind), common, out=sums).mul_(self.weight)
        packed[-1] = self.weight
        return packed

    def _packed(self, model: Tensor, common: Tensor) -> Tensor:
        kind = self.trailer.dtype
        return (model.to(kind) - common).mul_(self.weight) if self.weight else torch.zeros_like(common, dtype=kind)

    def place_head(self, head: Tensor) -> None:
        """Of all ranks: the sums of the trailers, and the rest."""
        self.trailer.copy_(head[: len(self.trailer)])
        self._rest[1].add_(self._mean(head[len(self.trailer) :], float(self.trailer[WEIGHT])))

    def place(self, blocks: Tensor, sums: Tensor) -> None:
        """Of all ranks: these blocks of the common model are merged."""
        where, mean = _where(blocks), self._mean(sums[:-1], float(sums[-1])).view(-1, BLOCK)
        if isinstance(where, slice):
            self._commons[where].add_(mean)
        else:
            self._commons.index_add_(0, where, mean)

    def _mean(self, sums: Tensor, weight: float) -> Tensor:
        """By the weights that have arrived. Without any, nothing moves."""
        return (sums * (1 / weight if weight else 0.0)).to(self.common.dtype)


def _where(blocks: Tensor) -> slice | Tensor:
    """Blocks that follow each other need not be gathered."""
    first, last = int(blocks[0]), int(blocks[-1])
    return slice(first, last + 1) if last - first + 1 == len(blocks) else blocks


def _chosen(blocks: Tensor, where: slice | Tensor) -> Tensor:
    """Twice as fast as an index in brackets."""
    return blocks[where] if isinstance(where, slice) else blocks.index_select(0, where)


class Sums(NamedTuple):
    """What all ranks bring to a merge, added up."""

    head: Tensor
    moved: Tensor
    chunks: list[Tensor]


def moved_by_any(parts: Sequence[Movement]) -> Tensor:
    """One byte for each block: whether some rank brings anything for it."""
    return torch.stack([part.moved for part in parts]).amax(0)


def add_up(parts: Sequence[Movement]) -> Sums:
    """Where all ranks are in one process: in their order."""
    moved = moved_by_any(parts)
    chunks = [total([part.pack(blocks) for part in parts]) for blocks in parts[0].chunks(moved)]
    return Sums(total([part.head() for part in parts]), moved, chunks)


def take(part: Movement, sums: Sums) -> None:
    """The same for one of them: its common model is merged."""
    part.place_head(sums.head)
    for blocks, chunk in zip(part.chunks(sums.moved), sums.chunks, strict=True):
        part.place(blocks, chunk)


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Added in their order."""
    added = tensors[0].clone()
    for each in tensors[1:]:
        added += each
    return added
