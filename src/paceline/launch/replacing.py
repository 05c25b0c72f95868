"""Which ranks that died are started again, to join the run anew, and when.

A rank may also be lost with its process still there: it was stopped, or its network is gone. Whatever it would do when
it goes on is refused; so it is ended, and another process takes its place before it could come back.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from paceline.control.membership import ON_NOTICE

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # before the second time of a rank; each is twice as long as the one before


class Replacing:
    """Of one run.

    Args:
        most: how often, over all ranks of this host.
    """

    def __init__(self, most: int) -> None:
        self._most, self._done = most, 0
        self._times: Counter[int] = Counter()
        self._due: dict[int, float] = {}
        self._took_part: set[int] = set()
        self.coming: set[int] = set()
        """Ranks whose successors are due, or on their way into the run: to the others those are still lost."""

    @property
    def never(self) -> bool:
        return self._most == 0

    @property
    def waiting(self) -> bool:
        """Whether somebody will be started again."""
        return bool(self._due)

    def plan(self, rank: int, how: str, state: dict[str, Any], now: float) -> bool:
        """A rank's process has ended with an error; whether another will take its place."""
        self.coming.discard(rank)
        others = {*state["present"]} - {*state["joining"], rank}
        if self._done >= self._most or not state["admits"] or not others:
            return False
        if rank in state["servers"]:
            remedy = "start the run again to have it back: with run.resume() it goes on from the last checkpoint"
            print(f"Rank {rank} was lost ({how}). A server is not replaced; {remedy}.", file=sys.stderr, flush=True)
            return False
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._times[rank] - 1)) if self._times[rank] else 0.0
        self._due[rank] = now + pause
        self._times[rank] += 1
        self._done += 1
        self._took_part.discard(rank)
        self.coming.add(rank)
        when = f" in {pause:g} s" if pause else ""
        again = f"it is started again{when}, to join the run ({self._done} of {self._most})"
        print(f"Rank {rank} was lost ({how}); {again}.", file=sys.stderr, flush=True)
        return True

    def due(self, now: float) -> list[int]:
        """Ranks to be started now."""
        ready = [rank for rank, at in self._due.items() if at <= now]
        for rank in ready:
            del self._due[rank]
        return ready

    def stranded(self, state: dict[str, Any]) -> list[int]:
        """Ranks that took part and were lost: their processes, if they still run, are of no use to anybody."""
        gone = {int(rank): why for rank, why in state["lost"].items()}
        stranded = [rank for rank in self._took_part if gone.get(rank, ON_NOTICE) != ON_NOTICE]
        here = {*state["present"]} - gone.keys()
        self._took_part |= here
        self.coming -= here
        return stranded
