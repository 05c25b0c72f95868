"""The exactly-once ledger: which samples are free, whose, and settled. Pure: no clock, no socket, no thread.

A run reads its data in one global order of positions; position `p` belongs to epoch `p // samples`. Every position is
in exactly one state, and only these moves exist:

    free ──lease──> held by a rank ──contribute──> in a round ──commit──> settled (used)
      ^               │  │                            │
      └───give_back───┘  └──────────discard───────────┴─────────────────> settled (discarded)

A rank that dies leaves two kinds of positions. What it had leased goes out again at once. What it had put into a round
is in doubt: the survivors may have applied the round, or may repeat it without the dead rank. The first commit
of that round decides: its `members` say whose contributions the applied sum had in it. Freed before that verdict, a
sample could be used twice; taken as used, it could be lost.

Micro-batches lie on a fixed grid in each epoch, so that work given back goes out again in the same portions however
it came back, and "what is free" is one set of merged ranges: memory depends on how scattered the work is, never on
the length of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.ranges import RangeSet
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENDLESS = 2**62
"""Stands for "no end": at a million samples a second it lasts 146,000 years."""


def order(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """The order of the samples in one epoch, the same on every rank."""
    return np.random.default_rng((seed, epoch)).permutation(samples)


class _Holding:
    """What one rank has: every unsettled position, and which of them stand in which round."""

    def __init__(self) -> None:
        self.held = RangeSet()
        self.rounds: dict[int, RangeSet] = {}
        self.last_round = -1

    def take_out(self, part: range) -> None:
        self.held.remove(part)
        self.take_from_rounds(part)

    def take_from_rounds(self, part: range) -> None:
        for ranges in self.rounds.values():
            ranges.remove(part)

    def pop_rounds(self, until: int) -> list[range]:
        """Everything in rounds up to and with `until`; it is no longer held."""
        parts = [part for number in [n for n in self.rounds if n <= until] for part in self.rounds.pop(number)]
        for part in parts:
            self.held.remove(part)
        return parts


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
    >>> ledger.contribute(0, 0, [range(0, 4)])
    >>> ledger.commit(0)
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
        self._holdings: dict[int, _Holding] = {}
        self._in_doubt: dict[int, _Holding] = {}
        self._committed = -1

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
            holding.held.add(part)
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

    def contribute(self, rank: int, round_number: int, ranges: Iterable[range]) -> None:
        """The ranges go into the collective of that round. What stood in an earlier round that was not applied may
        be contributed again, to a later one: it moves."""
        parts = self._held_by(rank, ranges, "contribute")
        holding = self._holding(rank)
        holding.last_round = max(holding.last_round, round_number)
        for part in parts:
            holding.take_from_rounds(part)
            holding.rounds.setdefault(round_number, RangeSet()).add(part)
        if round_number <= self._committed:  # another rank's news of the applied round was faster than ours
            self._use(holding, self._committed)

    def commit(self, round_number: int, members: Collection[int] | None = None) -> None:
        """The round was applied. Every rank may say so; the first one counts.

        Args:
            round_number: everything contributed to it and the rounds before is used.
            members: the ranks whose contributions the applied sum had in it; None for those that are alive now.
        """
        if round_number <= self._committed:
            return
        self._committed = round_number
        for holding in self._holdings.values():
            self._use(holding, round_number)
        for rank, holding in list(self._in_doubt.items()):
            if members is not None and rank in members:
                self._use(holding, round_number)
            for part in holding.pop_rounds(round_number):
                self._free.add(part)
            if not holding.held:
                del self._in_doubt[rank]

    def discard(self, rank: int, ranges: Iterable[range], reason: str) -> None:
        """Computed, but dropped (not a number, too late): settled, and not handed out again."""
        for part in self._held_by(rank, ranges, f"discard ({reason})"):
            self._holding(rank).take_out(part)
            self._settled.add(part)
            self.discarded += len(part)

    def give_back(self, rank: int, ranges: Iterable[range]) -> None:
        """Not computed after all: others get it."""
        for part in self._held_by(rank, ranges, "give back"):
            self._holding(rank).take_out(part)
            self._free.add(part)

    def release(self, rank: int) -> None:
        """The rank is gone. Its leases go out at once; what it put into a round waits for the round's commit."""
        holding = self._holdings.pop(rank, None)
        if holding is None:
            return
        doubtful = RangeSet(part for ranges in holding.rounds.values() for part in ranges)
        for part in doubtful:
            holding.held.remove(part)
        for part in holding.held:
            self._free.add(part)
        holding.held = doubtful
        if doubtful:
            self._merge_doubt(rank, holding)

    def _merge_doubt(self, rank: int, holding: _Holding) -> None:
        """A rank may come back and die again before the verdict on its first life."""
        earlier = self._in_doubt.setdefault(rank, holding)
        if earlier is holding:
            return
        for number, ranges in holding.rounds.items():
            for part in ranges:
                earlier.held.add(part)
                earlier.rounds.setdefault(number, RangeSet()).add(part)

    # ---- asking

    def snapshot(self, round_number: int) -> list[range]:
        """What a checkpoint taken after that round has settled. Ask after the round's commit, when `reported`."""
        settled = RangeSet(self._settled)
        for holding in self._holdings.values():
            for number, ranges in holding.rounds.items():
                for part in ranges if number <= round_number else ():
                    settled.add(part)
        return list(settled)

    def reported(self, round_number: int, ranks: Iterable[int]) -> bool:
        """Whether all these ranks have said what they contributed to that round."""
        return all(rank in self._holdings and self._holdings[rank].last_round >= round_number for rank in ranks)

    @property
    def leased(self) -> int:
        """Positions that somebody holds, or that are in doubt."""
        everyone = [*self._holdings.values(), *self._in_doubt.values()]
        return sum(len(holding.held) for holding in everyone)

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
        everyone = [*self._holdings.values(), *self._in_doubt.values()]
        theirs = [ranges for holding in everyone for ranges in (holding.held, *holding.rounds.values())]
        return sum(ranges.pieces for ranges in [self._free, self._settled, *theirs])

    # ---- helpers

    def _holding(self, rank: int) -> _Holding:
        return self._holdings.setdefault(rank, _Holding())

    def _use(self, holding: _Holding, round_number: int) -> None:
        for part in holding.pop_rounds(round_number):
            self._settled.add(part)
            self.used += len(part)

    def _held_by(self, rank: int, ranges: Iterable[range], deed: str) -> list[range]:
        """The ranges, after making sure that the rank holds each of them, and none twice."""
        held = self._holding(rank).held
        parts = list(ranges)
        seen = RangeSet(parts)
        strange = next((part for part in parts if not held.covers(part)), None)
        if strange is None and len(seen) == sum(map(len, parts)):
            return parts
        what = "the same positions twice" if strange is None else f"positions {strange.start} to {strange.stop}"
        raise PacelineError(
            f"Rank {rank} wants to {deed} {what}, which it does not hold: samples would be used twice.",
            where="the ledger of samples",
            cause="They were settled or given back already, or the rank was taken for dead and they went to others.",
        )
