"""An all-reduce of rounded gradients in flight on real processes; the arithmetic is in `rules/rounding.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

from paceline.backends.flat import FlatSum
from paceline.backends.thread_work import ThreadWork
from paceline.rules.rounding import Codes, Rounded

T = TypeVar("T")


class RoundedWork(ThreadWork[T]):
    """One all-reduce: each rank gets its part of what all send, adds it up, and gives the sum to all. The trailer, with
    the counts, goes beside it as it is.

    Args:
        contribution: this rank's, with its codes; it holds the sums of all when the work is done.
        ranks: how many take part.
        others: see `ThreadWork`.
    """

    def __init__(
        self,
        group: Callable[[], Any],
        contribution: FlatSum,
        ranks: int,
        then: Callable[[], T],
        name: str,
        check_peers: Callable[[float], None],
        before: ThreadWork[Any] | None,
    ) -> None:
        self._contribution, self._ranks = contribution, ranks
        super().__init__(group, then, name, check_peers, before)

    def _travel(self, group: Any) -> None:
        contribution, ranks = self._contribution, self._ranks
        assert contribution.codes is not None and contribution.rounding is not None
        trailer = self._start(group, contribution.trailer, c10d.ReduceOp.SUM)
        rows = contribution.codes.to_bytes(ranks)
        parts = torch.empty_like(rows)
        group.alltoall_base(parts, rows, [], [], c10d.AllToAllOptions()).wait()
        rounding: Rounded = contribution.rounding
        own = rounding.add_up([Codes.from_bytes(row, rounding.code) for row in parts])
        sums = [torch.empty_like(rows[0]) for _ in range(ranks)]
        group.allgather([sums], [own.to_bytes(1)[0]], c10d.AllgatherOptions()).wait()
        rounding.unpack([Codes.from_bytes(row, rounding.code) for row in sums], contribution.sums)
        trailer.wait()
