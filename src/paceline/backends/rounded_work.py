"""An all-reduce of rounded gradients in flight on real processes; the arithmetic is in `rules/rounding.py`.

It has two halves, and the second begins when the first is over, also while the rank computes: so an attempt has a
thread of its own, and a process group in which nothing else is started meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

from paceline.backends.flat import FlatSum
from paceline.backends.lane import start_adding
from paceline.rules.rounding import Codes, Rounded

SLICE = timedelta(seconds=0.05)


class RoundedTrip:
    """The way of one contribution: what a rank brings is in its codes, and can be brought again.

    Args:
        contribution: with its codes.
        rank: whose it is.
        closed: whether nobody waits for anything any more.
    """

    def __init__(self, contribution: FlatSum, rank: int, closed: Callable[[], bool]) -> None:
        assert contribution.codes is not None and contribution.rounding is not None
        self.codes: Codes = contribution.codes
        self.rounding: Rounded = contribution.rounding
        contribution.codes = contribution.rounding = None
        self.attempt: Attempt | None = None
        self._rank, self._closed, self._over = rank, closed, False

    def begin(self, tensor: Tensor, group: Any, ranks: Sequence[int]) -> Attempt:
        self.rounding.arrange(ranks.index(self._rank), len(ranks))
        self.attempt = Attempt(self, tensor, group, len(ranks))
        threading.Thread(target=self.attempt.run, daemon=True, name="paceline-rounded").start()
        return self.attempt

    def is_there(self) -> None:
        """The round counts: by the attempt of this rank, or because another holds the result, to which all parts of
        the same attempt have gone."""
        self._over = True
        self.rounding.settle(None if self.attempt is None else self.attempt.kept)

    def wants(self, attempt: Attempt) -> bool:
        return attempt is self.attempt and not self._over and not self._closed()


class Attempt:
    """One try to bring the codes to all: each rank gets its part of what all send, adds it up, and gives the sum to
    all. The trailer, with the counts, goes beside it as it is. Looks like a work of torch's.

    Args:
        trip: whose codes.
        tensor: the contribution's memory, with its trailer; gets the sums of all.
        group: a process group.
        ranks: how many are in it.
    """

    def __init__(self, trip: RoundedTrip, tensor: Tensor, group: Any, ranks: int) -> None:
        self.kept: Tensor | None = None
        """What this rank keeps of its part of the sum, if the round counts."""
        self._trip, self._tensor, self._group, self._ranks = trip, tensor, group, ranks
        self._over = threading.Event()
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Timed out")
        if self._error is not None:
            raise self._error

    # ---- on the thread

    def run(self) -> None:
        try:
            self._travel()
        except BaseException as error:  # whoever polls gets it
            self._error = error
        self._over.set()

    def _travel(self) -> None:
        rounding, size = self._trip.rounding, self._trip.rounding.size
        trailer = start_adding(self._tensor[size:], self._group)
        rows = self._trip.codes.to_bytes(self._ranks)
        parts = torch.empty_like(rows)
        self._finish(self._group.alltoall_base(parts, rows, [], [], c10d.AllToAllOptions()))
        own, self.kept = rounding.add_up([Codes.from_bytes(row, rounding.code) for row in parts])
        sums = torch.empty_like(rows)
        to_all = own.to_bytes(1).repeat(self._ranks, 1)
        self._finish(self._group.alltoall_base(sums, to_all, [], [], c10d.AllToAllOptions()))
        rounding.unpack([Codes.from_bytes(row, rounding.code) for row in sums], self._tensor[:size])
        self._finish(trailer)

    def _finish(self, work: Any) -> None:
        """Wait for it; after a loss nothing wakes it, and then nobody wants it."""
        while not work.is_completed():
            try:
                work.wait(SLICE)
            except RuntimeError:
                if not self._trip.wants(self):
                    raise
        work.wait()
