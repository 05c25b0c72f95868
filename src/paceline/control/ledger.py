"""The exactly-once ledger: which samples are free, whose, and settled. Pure: no clock, no socket, no thread.

A run reads its data in one global order of positions; position `p` belongs to epoch `p // samples`. Every position is
in exactly one state, and only these moves exist:

    free ──lease──> held by a rank ──settle──> settled (used, or discarded)
      ^                   │
      └─give_back/release─┘

A rank works on its leases in the order in which it got them. So one number a rank says which of them have gone
through an applied round: its *progress*, the samples brought to an end so far. All ranks learn all of it from the
rounds' own collectives; any of them can tell the ledger, and nobody has to tell it in every round. What a dead rank had
put into a round is used if its peers have applied that round, and their progress says so; `release` comes after it.

Micro-batches lie on a fixed grid in each epoch, so that work given back goes out again in the same portions however
it came back, and "what is free" is one set of merged ranges: memory depends on how scattered the work is, never on
the length of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.control.ranges import RangeSet
from paceline.errors import PacelineError

ENDLESS = 2**62
"""Stands for "no end": at a million samples a second it lasts 146,000 years."""


class _Holding:
    """What one rank has, in the order in which it got it, and how far it has come."""

    def __init__(self) -> None:
        self.parts: deque[range] = deque()
        self.progress = 0

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def pop_until(self, progress: int) -> list[range]:
        """The parts that this progress is beyond. A part may be cut."""
        passed = []
        while self.progress < progress and self.parts:
            part = self.parts.popleft()
            cut = min(len(part), progress - self.progress)
            if cut < len(part):
                self.parts.appendleft(part[cut:])
            passed.append(part[:cut])
            self.progress += cut
        return passed

    def take_out(self, unwanted: RangeSet) -> list[range]:
        """Remove these positions wherever they stand; returns them."""
        kept: deque[range] = deque()
        taken: list[range] = []
        for part in self.parts:
            left = RangeSet([part])
            for other in unwanted:
                left.remove(other)
            gone = RangeSet([part])
            for other in left:
                gone.remove(other)
            kept.extend(left)
            taken.extend(gone)
        self.parts = kept
        return taken


class Ledger:
    """Hands out the samples of a run, each exactly once.

    Args:
        samples: length of the data set.
        epochs: how often it is read; None for a run limited by time.
        micro_batch: the most positions in one range that is handed out.
        workers: ranks that share the work; near the end nobody gets more than half of an even share.
        used: what a checkpoint had settled already.

    >>> ledger = Ledger(samples=10, epochs=1, micro_batch=4, workers=1)
    >>> ledger.lease(rank=0, micro_batches=8)
    [range(0, 4), range(4, 8)]
    >>> ledger.settle([4])
    >>> ledger.release(rank=0)
    >>> ledger.used, ledger.leased, ledger.remaining
    (4, 0, 6)
    """

    def __init__(
        self, samples: int, epochs: int | None, micro_batch: int, workers: int, used: Iterable[range] = ()
    ) -> None:
        if samples < 1 or micro_batch < 1 or workers < 1 or (epochs is not None and epochs < 0):
            raise PacelineError(
                f"A ledger of {samples} samples, {epochs} epochs, micro-batches of {micro_batch} and {workers} workers "
                "makes no sense.",
                remedy="Give a data set with at least one sample, a micro-batch and a worker.",
            )
        self.samples, self.epochs, self.micro_batch, self.workers = samples, epochs, micro_batch, workers
        self.positions = ENDLESS if epochs is None else samples * epochs
        self._free = RangeSet([range(self.positions)])
        self._settled = RangeSet(used)
        for part in self._settled:
            if part.stop > self.positions or part.start < 0:
                raise PacelineError(
                    f"The checkpoint has used the positions {part.start} to {part.stop}, but the run has only "
                    f"{self.positions}.",
                    cause="The data set or the number of epochs is smaller than when the checkpoint was written.",
                    remedy="Resume with the same data and at least as many epochs.",
                )
            self._free.remove(part)
        self.used = len(self._settled)
        self.discarded = 0
        self._dropped = RangeSet()
        self._holdings: dict[int, _Holding] = {}

    # ---- handing out

    def lease(self, rank: int, micro_batches: int) -> list[range]:
        """Up to so many micro-batches, the lowest free positions first; [] when nothing is free now."""
        holding = self._holding(rank)
        leases = []
        for _ in range(min(micro_batches, self._largest_lease())):
            part = self._next_micro_batch()
            if part is None:
                break
            self._free.remove(part)
            holding.parts.append(part)
            leases.append(part)
        return leases

    def _largest_lease(self) -> int:
        """Guided self-scheduling: leases shrink towards the end, so that no slow rank holds the tail."""
        if self.epochs is None:
            return ENDLESS
        return max(1, -(-len(self._free) // (2 * self.workers * self.micro_batch)))

    def _next_micro_batch(self) -> range | None:
        free = self._free.first()
        if free is None:
            return None
        epoch, offset = divmod(free.start, self.samples)
        cell_end = min(self.samples, (offset // self.micro_batch + 1) * self.micro_batch)
        return range(free.start, min(free.stop, epoch * self.samples + cell_end))

    # ---- what becomes of it

    def settle(self, progress: Sequence[int]) -> None:
        """Rounds were applied: rank i has brought `progress[i]` samples to an end, over all rounds. Telling it twice,
        or telling older news, changes nothing."""
        for rank, reached in enumerate(progress):
            holding = self._holdings.get(rank)
            known = 0 if holding is None else holding.progress
            if reached <= known:
                continue
            if holding is None or reached - known > len(holding):
                raise PacelineError(
                    f"Rank {rank} has brought in {reached} samples, more than it was given.",
                    where="the ledger of samples",
                    cause="It was taken for dead and its samples went to others: they would be used twice.",
                )
            for part in holding.pop_until(reached):
                before = len(self._dropped)
                self._dropped.remove(part)
                dropped = before - len(self._dropped)
                self.discarded += dropped
                self.used += len(part) - dropped
                self._settled.add(part)

    def discard(self, rank: int, ranges: Iterable[range], reason: str) -> None:
        """Computed, but dropped (not a number, too late). They count in the rank's progress like all others; when
        that passes them, they are settled as discarded and not handed out again. This news may be overtaken by a
        peer's news of that progress: then only the numbers change."""
        parts = list(ranges)
        late = [part for part in parts if self._settled.covers(part)]
        for part in self._held_by(rank, [part for part in parts if part not in late], f"discard ({reason})"):
            self._dropped.add(part)
        self.used -= sum(map(len, late))
        self.discarded += sum(map(len, late))

    def give_back(self, rank: int, ranges: Iterable[range]) -> None:
        """Not computed after all: others get it."""
        self._free_again(self._holding(rank).take_out(self._held_by(rank, ranges, "give back")))

    def release(self, rank: int) -> None:
        """The rank is gone: all that it holds goes out again. First `settle` what its peers have applied."""
        holding = self._holding(rank)
        self._free_again(holding.parts)
        holding.parts.clear()  # its progress stays known: others still report it

    def _free_again(self, parts: Iterable[range]) -> None:
        for part in parts:
            self._dropped.remove(part)
            self._free.add(part)

    # ---- for a journal

    def state(self) -> dict[str, Any]:
        """All that `Ledger` cannot know from its arguments, as JSON can carry it."""
        holdings = {
            str(rank): [holding.progress, [[part.start, part.stop] for part in holding.parts]]
            for rank, holding in self._holdings.items()
        }
        sets = {"settled": self._settled, "dropped": self._dropped}
        spans = {name: [[part.start, part.stop] for part in parts] for name, parts in sets.items()}
        return {**spans, "used": self.used, "discarded": self.discarded, "holdings": holdings}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`, for a ledger made with the same arguments."""
        self._settled = RangeSet(range(*span) for span in state["settled"])
        self._dropped = RangeSet(range(*span) for span in state["dropped"])
        self.used, self.discarded = state["used"], state["discarded"]
        self._free = RangeSet([range(self.positions)])
        for part in self._settled:
            self._free.remove(part)
        for rank, (progress, spans) in state["holdings"].items():
            holding = self._holding(int(rank))
            holding.progress, holding.parts = progress, deque(range(*span) for span in spans)
            for part in holding.parts:
                self._free.remove(part)

    # ---- asking

    @property
    def settled(self) -> list[range]:
        """What is used or discarded, as merged ranges: what a checkpoint holds."""
        return list(self._settled)

    @property
    def leased(self) -> int:
        """Positions that somebody holds."""
        return sum(map(len, self._holdings.values()))

    @property
    def held(self) -> dict[str, int]:
        """Positions that each rank holds."""
        return {str(rank): len(holding) for rank, holding in self._holdings.items()}

    @property
    def progress(self) -> dict[str, int]:
        """Positions that each rank has brought to an end, as far as is known."""
        return {str(rank): holding.progress for rank, holding in self._holdings.items()}

    @property
    def remaining(self) -> int | None:
        """Positions that are not settled; None in an endless run."""
        return None if self.epochs is None else self.positions - len(self._settled)

    @property
    def complete(self) -> bool:
        """Whether every position is settled."""
        return len(self._settled) == self.positions

    @property
    def counters(self) -> dict[str, int | bool | None]:
        """The state in numbers of positions, for reports."""
        return {
            "leased": self.leased,
            "used": self.used,
            "discarded": self.discarded,
            "remaining": self.remaining,
            "complete": self.complete,
        }

    @property
    def pieces(self) -> int:
        """How many separate ranges the ledger keeps: its memory."""
        merged = self._free.pieces + self._settled.pieces + self._dropped.pieces
        return merged + sum(len(holding.parts) for holding in self._holdings.values())

    # ---- helpers

    def _holding(self, rank: int) -> _Holding:
        return self._holdings.setdefault(rank, _Holding())

    def _held_by(self, rank: int, ranges: Iterable[range], deed: str) -> RangeSet:
        """The ranges, after making sure that the rank holds each of them, and none twice."""
        parts = list(ranges)
        wanted, held = RangeSet(parts), RangeSet(self._holding(rank).parts)
        strange = next((part for part in parts if not held.covers(part)), None)
        if strange is None and len(wanted) == sum(map(len, parts)):
            return wanted
        what = "the same positions twice" if strange is None else f"positions {strange.start} to {strange.stop}"
        raise PacelineError(
            f"Rank {rank} wants to {deed} {what}, which it does not hold: samples would be used twice.",
            where="the ledger of samples",
            cause="They were settled or given back already, or the rank was taken for dead and they went to others.",
        )
