"""What simulated ranks learn from: the exactly-once ledger of real runs, or an endless source that keeps no books."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from paceline.control.ledger import Ledger


@dataclass(frozen=True)
class Data:
    """How much there is to learn from.

    Args:
        samples: length of the data set.
        epochs: how often each sample is used; `None` for as long as the run lasts.
    """

    samples: int
    epochs: int | None = None


class Source(Protocol):
    """Who gets which samples, and what became of them."""

    def take(self, rank: int, at_most: int) -> list[range]:
        """One micro-batch of at most so many samples; [] when there is none now."""

    def put_back(self, rank: int, samples: list[range]) -> None:
        """The micro-batch taken last was given up: it comes again."""

    def contribute(self, rank: int, round_number: int, count: int) -> None:
        """The rank brings so many samples to the round, those that are dropped as non-finite counted too."""

    def withdraw(self, rank: int, round_number: int) -> None:
        """The rank is lost, and what it has brought to the round with it."""

    def commit(self, round_number: int) -> None:
        """The round was applied."""

    def settle(self, rank: int, count: int) -> None:
        """The rank has used so many samples by itself, dropped ones counted too."""

    def reach(self, rank: int, handed_in: int) -> None:
        """A server has used what the rank has handed in, so many samples since the beginning, dropped ones counted."""

    def discard(self, rank: int, samples: Iterable[range], reason: str) -> None:
        """These, brought to the coming round, were dropped."""

    def release(self, rank: int) -> None:
        """The rank is gone."""

    def give_back(self, rank: int) -> None:
        """The rank computes no more: what it has taken and not computed goes out again."""

    def held(self, rank: int) -> int:
        """Samples that the rank has, and that are not known to be used."""

    def reached(self, rank: int) -> int:
        """Samples of the rank that are used, since the beginning, dropped ones counted."""

    def in_doubt(self, rank: int) -> bool:
        """Whether the rank has brought samples to a round that may yet count."""

    @property
    def has_more(self) -> bool:
        """Whether there are samples that nobody has used."""


class Endless:
    """Always a full micro-batch, of no samples in particular: when nothing is computed it does not matter of which, and
    with thousands of ranks every object that is not made counts."""

    def __init__(self, micro_batch: int) -> None:
        self._micro_batch = range(micro_batch)

    def take(self, rank: int, at_most: int) -> list[range]:
        return [self._micro_batch[:at_most] if at_most < len(self._micro_batch) else self._micro_batch]

    def put_back(self, rank: int, samples: list[range]) -> None:
        pass

    def contribute(self, rank: int, round_number: int, count: int) -> None:
        pass

    def withdraw(self, rank: int, round_number: int) -> None:
        pass

    def commit(self, round_number: int) -> None:
        pass

    def settle(self, rank: int, count: int) -> None:
        pass

    def reach(self, rank: int, handed_in: int) -> None:
        pass

    def discard(self, rank: int, samples: Iterable[range], reason: str) -> None:
        pass

    def release(self, rank: int) -> None:
        pass

    def give_back(self, rank: int) -> None:
        pass

    def held(self, rank: int) -> int:
        return 0

    def reached(self, rank: int) -> int:
        return 0

    def in_doubt(self, rank: int) -> bool:
        return False

    has_more = True


class Leases:
    """The ledger of real runs, asked for one micro-batch at a time: in virtual time an answer takes no time.

    Args:
        ledger: of the run.
        ranks: below which number they are.
    """

    def __init__(self, ledger: Ledger, ranks: int) -> None:
        self._ledger = ledger
        self._progress = [0] * ranks
        self._brought: dict[int, dict[int, int]] = {}
        self._gone: set[int] = set()
        self._rest: dict[int, range] = {}

    def take(self, rank: int, at_most: int) -> list[range]:
        lease = self._rest.pop(rank, None) or next(iter(self._ledger.lease(rank, 1)), None)
        if lease is None:
            return []
        if len(lease) > at_most:
            self._rest[rank] = lease[at_most:]
        return [lease[:at_most]]

    def put_back(self, rank: int, samples: list[range]) -> None:
        (part,) = samples
        rest = self._rest.get(rank, range(part.stop, part.stop))  # of the same lease: it follows
        self._rest[rank] = range(part.start, rest.stop)

    def contribute(self, rank: int, round_number: int, count: int) -> None:
        if count:
            self._brought.setdefault(round_number, {})[rank] = count

    def withdraw(self, rank: int, round_number: int) -> None:
        self._brought.get(round_number, {}).pop(rank, None)

    def commit(self, round_number: int) -> None:
        for rank, count in self._brought.pop(round_number, {}).items():
            self._progress[rank] += count
        self._ledger.settle(self._progress)
        for rank in sorted(self._gone):
            self.release(rank)

    def settle(self, rank: int, count: int) -> None:
        self.reach(rank, self._progress[rank] + count)

    def reach(self, rank: int, handed_in: int) -> None:
        self._progress[rank] = max(self._progress[rank], handed_in)
        self._ledger.settle(self._progress)

    def discard(self, rank: int, samples: Iterable[range], reason: str) -> None:
        self._ledger.discard(rank, samples, reason)

    def give_back(self, rank: int) -> None:
        if (rest := self._rest.pop(rank, None)) is not None:
            self._ledger.give_back(rank, [rest])

    def held(self, rank: int) -> int:
        return self._ledger.held.get(str(rank), 0)

    def reached(self, rank: int) -> int:
        return self._progress[rank]

    def in_doubt(self, rank: int) -> bool:
        return any(rank in brought for brought in self._brought.values())

    @property
    def has_more(self) -> bool:
        return not self._ledger.complete

    def release(self, rank: int) -> None:
        """What it has brought to a round that the others may still apply must not go out again before they have."""
        self._rest.pop(rank, None)
        if self.in_doubt(rank):
            self._gone.add(rank)
        else:
            self._gone.discard(rank)
            self._ledger.release(rank)
