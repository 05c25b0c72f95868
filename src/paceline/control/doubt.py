"""Whose samples are in doubt: a lost rank may have put some into a round that its peers have applied. Pure.

Freed too early, such a sample would be used twice. So the samples of a lost rank go out again when every peer that was
there has said, after it knew of the loss, how far the run has come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Doubts:
    """Lost ranks, and the witnesses who have not spoken yet.

    >>> doubts = Doubts()
    >>> doubts.lost(2, generation=5, witnesses=[0, 1])
    []
    >>> doubts.heard(0, generation=4), doubts.heard(0, generation=5), doubts.heard(1, generation=6)
    ([], [], [2])
    """

    def __init__(self) -> None:
        self._silent: dict[int, set[int]] = {}
        self._since: dict[int, int] = {}

    def lost(self, rank: int, generation: int, witnesses: Iterable[int]) -> list[int]:
        """The rank is lost, and cannot speak for others; the lost ranks that are free of doubt by now."""
        for silent in self._silent.values():
            silent.discard(rank)
        self._silent[rank] = set(witnesses)
        self._since[rank] = generation
        return self._resolved()

    def heard(self, witness: int, generation: int) -> list[int]:
        """The witness has spoken, knowing of that generation; the lost ranks that are free of doubt by now."""
        for rank, silent in self._silent.items():
            if generation >= self._since[rank]:
                silent.discard(witness)
        return self._resolved()

    def gone(self, witness: int) -> list[int]:
        """The witness has left after telling all that it knew."""
        for silent in self._silent.values():
            silent.discard(witness)
        return self._resolved()

    def _resolved(self) -> list[int]:
        resolved = [rank for rank, silent in self._silent.items() if not silent]
        for rank in resolved:
            del self._silent[rank], self._since[rank]
        return resolved

    def state(self) -> list[list[Any]]:
        """As JSON can carry it."""
        return [[rank, self._since[rank], sorted(silent)] for rank, silent in self._silent.items()]

    def restore(self, state: list[list[Any]]) -> None:
        self._silent = {rank: set(silent) for rank, _, silent in state}
        self._since = {rank: since for rank, since, _ in state}
