"""Processes that were stopped, by SIGSTOP say: the kernel tells at once what silence tells only after a time-out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

STOPPED = "T"  # as `proc(5)` has it; one that a debugger holds is in another state, "t"


def state_of_process(pid: int) -> str:
    """One letter; none for a process that is not there, or on a system that does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Stops:
    """Counts in how many looks in a row each process was stopped. Looks and not seconds: when a whole job is suspended
    and resumed, the launcher may be first to go on.

    Args:
        looks: after so many a process counts as stopped.
        state_of: a process by its id; its state.
    """

    def __init__(self, looks: int, state_of: Callable[[int], str] = state_of_process) -> None:
        self._looks, self._state_of = looks, state_of
        self._seen: Counter[int] = Counter()

    def look(self, pids: Mapping[int, int]) -> list[int]:
        """Ranks whose processes are stopped for long by now; each is named once. If all are stopped somebody wanted
        that, and nobody is named.

        >>> stops = Stops(looks=2, state_of={71: "S", 72: "T"}.__getitem__)
        >>> [stops.look({0: 71, 1: 72}) for _ in range(3)]
        [[], [1], []]
        """
        stopped = {rank: pid for rank, pid in pids.items() if self._state_of(pid) == STOPPED}
        if len(stopped) == len(pids):
            stopped = {}
        self._seen = Counter({pid: self._seen[pid] + 1 for pid in stopped.values()})
        return [rank for rank, pid in stopped.items() if self._seen[pid] == self._looks]
