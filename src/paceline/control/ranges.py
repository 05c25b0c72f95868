"""A set of integers kept as sorted disjoint ranges, so that a long run's ledger stays a handful of numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class RangeSet:
    """Integers, held as merged ranges. Every operation is a binary search and a small move.

    >>> numbers = RangeSet([range(0, 10)])
    >>> numbers.remove(range(3, 5))
    >>> list(numbers), len(numbers)
    ([range(0, 3), range(5, 10)], 8)
    """

    __slots__ = ("_size", "_starts", "_stops")

    def __init__(self, ranges: Iterable[range] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._size = 0
        for each in ranges:
            self.add(each)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[range]:
        return map(range, self._starts, self._stops)

    @property
    def pieces(self) -> int:
        """How many separate ranges it takes: its memory."""
        return len(self._starts)

    def covers(self, part: range) -> bool:
        at = bisect_right(self._starts, part.start) - 1
        return at >= 0 and part.stop <= self._stops[at]

    def add(self, part: range) -> None:
        """Add the numbers; those already there stay."""
        if not part:
            return
        low = bisect_left(self._stops, part.start)
        high = bisect_right(self._starts, part.stop)
        start, stop = part.start, part.stop
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._replace(low, high, [start], [stop])

    def remove(self, part: range) -> None:
        """Take the numbers out; those not there are no matter."""
        low = bisect_right(self._stops, part.start)
        high = bisect_left(self._starts, part.stop)
        if not part or low >= high:
            return
        starts, stops = [], []
        if self._starts[low] < part.start:
            starts.append(self._starts[low])
            stops.append(part.start)
        if part.stop < self._stops[high - 1]:
            starts.append(part.stop)
            stops.append(self._stops[high - 1])
        self._replace(low, high, starts, stops)

    def first(self) -> range | None:
        """The lowest range."""
        return range(self._starts[0], self._stops[0]) if self._starts else None

    def _replace(self, low: int, high: int, starts: list[int], stops: list[int]) -> None:
        self._size += sum(stops) - sum(starts) - sum(self._stops[low:high]) + sum(self._starts[low:high])
        self._starts[low:high] = starts
        self._stops[low:high] = stops
