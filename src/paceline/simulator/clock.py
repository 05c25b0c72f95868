"""Virtual time: a heap of (time, sequence, callback, argument).

The sequence number makes the order total: what falls on the same instant happens in the order of planning, so a run
depends on nothing but its seed. One event is one entry taken from the heap: the end of a micro-batch, the end of a
collective, the arrival of a message or signal, the start or fault of a rank. Ranks that a collective wakes are not
counted once more.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Runs what was planned, in order of time.

    >>> clock, seen = Clock(), []
    >>> clock.at(2.0, seen.append, "late")
    >>> clock.at(1.0, seen.append, "early")
    >>> clock.at(1.0, seen.append, "early, planned second")
    >>> clock.run()
    >>> seen, clock.now, clock.events
    (['early', 'early, planned second', 'late'], 2.0, 3)
    """

    __slots__ = ("_heap", "_sequence", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._sequence = 0
        self._heap: list[tuple[float, int, Callable[[Any], object], Any]] = []

    def at(self, time: float, callback: Callable[[Any], object], argument: Any) -> None:
        """Call back at that time, which lies not in the past. One argument and no closure: this is the hot path."""
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, callback, argument))

    def run(self) -> None:
        """Until nothing is planned any more."""
        heap = self._heap
        while heap:
            self.now, _, callback, argument = heappop(heap)
            self.events += 1
            callback(argument)
