"""Which rounds have been signalled. Kept by the service and by every client, so it must not grow with the run."""

from __future__ import annotations

from typing import Any

REMEMBERED = 1024  # ranks are at most a few rounds apart; nobody asks about what was signalled a thousand rounds ago


class RoundSignals:
    """The rounds that were signalled last. A round is over when somebody says so, or when it has enough samples.

    >>> signals = RoundSignals()
    >>> signals.add(7), signals.add(7), 7 in signals, 8 in signals
    (True, False, True, False)
    >>> signals.add(8, samples=30, target=50), signals.add(8, samples=30, target=50)
    (False, True)
    """

    def __init__(self) -> None:
        self._rounds: dict[int, None] = {}  # in the order of signalling
        self._samples: dict[int, int] = {}

    def add(self, round: int, samples: int = 0, target: int = 0) -> bool:
        """Add samples to the round; whether it is news that this ends it."""
        if round in self._rounds:
            return False
        counted = self._samples.get(round, 0) + samples
        if counted < target:
            self._samples[round] = counted
            return False
        self._samples.pop(round, None)
        self._rounds[round] = None
        if len(self._rounds) > 2 * REMEMBERED:
            self._rounds = dict.fromkeys(list(self._rounds)[-REMEMBERED:])
        while len(self._samples) > REMEMBERED:  # rounds that were never completed
            del self._samples[next(iter(self._samples))]
        return True

    def __contains__(self, round_number: int) -> bool:
        return round_number in self._rounds

    @property
    def rounds(self) -> list[int]:
        """Those that are remembered, in the order of signalling."""
        return list(self._rounds)

    def state(self) -> list[list[Any]]:
        """As JSON can carry it: the rounds, and the samples of those that are being counted."""
        return [self.rounds, [[number, samples] for number, samples in self._samples.items()]]

    def restore(self, state: list[list[Any]]) -> None:
        self._rounds = dict.fromkeys(state[0])
        self._samples = dict(state[1])
