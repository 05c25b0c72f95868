"""Answers that cannot be given yet: they wait for news on a topic, or for their deadline.

The service's threads never block in a request, so one rank's wait delays neither that rank's further requests nor
anybody else's. Pure: the service calls it under its lock and sends what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.control.wire import Frame
from paceline.errors import PacelineError

P = TypeVar("P")
Attempt = Callable[[], Frame | str]
"""Gives the answer, or the topic that must have news before there can be one."""


@dataclass(frozen=True)
class Later:
    """An answer that may have to wait."""

    attempt: Attempt
    seconds: float
    too_late: Callable[[], PacelineError]


@dataclass(frozen=True)
class _Waiting(Generic[P]):
    peer: P
    sequence: int
    deadline: float
    later: Later


class WaitingRoom(Generic[P]):
    """Pending answers by the topic that they wait for."""

    def __init__(self) -> None:
        self._topics: dict[str, list[_Waiting[P]]] = {}

    def ask(self, peer: P, sequence: int, later: Later, now: float) -> list[tuple[P, int, Frame]]:
        """Try at once, and keep it if it cannot be answered. Returns the answers to send."""
        return self._try(_Waiting(peer, sequence, now + later.seconds, later))

    def news(self, topic: str) -> list[tuple[P, int, Frame]]:
        """Something changed: the answers that can be given now."""
        return [answer for waiting in self._topics.pop(topic, []) for answer in self._try(waiting)]

    def overdue(self, now: float) -> list[tuple[P, int, PacelineError]]:
        """Those who have waited too long, with what to tell them."""
        late = self._remove(lambda waiting: waiting.deadline <= now)
        return [(waiting.peer, waiting.sequence, waiting.later.too_late()) for waiting in late]

    def give_up(self, about: Callable[[str], bool]) -> list[tuple[P, int]]:
        """Those who waited for such topics; they wait no more."""
        topics = [topic for topic in self._topics if about(topic)]
        return [(waiting.peer, waiting.sequence) for topic in topics for waiting in self._topics.pop(topic)]

    def forget(self, peer: P) -> None:
        """Nobody is there any more to be answered."""
        self._remove(lambda waiting: waiting.peer is peer)

    def _try(self, waiting: _Waiting[P]) -> list[tuple[P, int, Frame]]:
        outcome = waiting.later.attempt()
        if isinstance(outcome, Frame):
            return [(waiting.peer, waiting.sequence, outcome)]
        self._topics.setdefault(outcome, []).append(waiting)
        return []

    def _remove(self, unwanted: Callable[[_Waiting[P]], bool]) -> list[_Waiting[P]]:
        removed = [waiting for each in self._topics.values() for waiting in each if unwanted(waiting)]
        kept = {topic: [w for w in each if not unwanted(w)] for topic, each in self._topics.items()}
        self._topics = {topic: each for topic, each in kept.items() if each}
        return removed
