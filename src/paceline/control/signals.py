"""Which rounds have been signalled. Kept by the service and by every client, so it must not grow with the run."""

from __future__ import annotations

REMEMBERED_ROUNDS = 1024  # ranks are at most a few rounds apart; nobody asks about a round a thousand back


class RoundSignals:
    """A set of recent round numbers.

    >>> signals = RoundSignals()
    >>> signals.add(7), signals.add(7), 7 in signals, 8 in signals
    (True, False, True, False)
    """

    def __init__(self) -> None:
        self._rounds: set[int] = set()

    def add(self, round_number: int) -> bool:
        """Remember the round; whether that is news."""
        if round_number in self._rounds:
            return False
        self._rounds.add(round_number)
        if len(self._rounds) > 2 * REMEMBERED_ROUNDS:
            oldest = max(self._rounds) - REMEMBERED_ROUNDS
            self._rounds = {number for number in self._rounds if number > oldest}
        return True

    def __contains__(self, round_number: int) -> bool:
        return round_number in self._rounds
