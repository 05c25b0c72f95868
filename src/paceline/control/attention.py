"""Who is stuck in its own code while others wait for it: a rank whose process lives, and gives signs of life, but whose
kernel, data loader or endless loop never comes back.

Whoever waits for others looks around all the time; whoever computes does so after each micro-batch. So a rank tells
with its heartbeat for how long it has not looked around, and for how long it has been waiting. Nobody can know of a
rank whether it is stuck or slow. So it is given up only when it has taken several times as long as any rank ever took,
and somebody has been waiting as long: one that evaluates while nobody waits for it may take all the time it likes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

Report = Mapping[str, float]
SEVERAL = 3.0  # times the longest that a rank was busy so far: the first micro-batch often takes longest anyway


class Attention:
    """Of one rank. Its training writes it, the thread of its heartbeat reads it."""

    def __init__(self) -> None:
        self._looked: float | None = None
        self._waits_since: float | None = None
        self._longest = 0.0
        self._rests = False

    def look(self) -> None:
        """The rank looks around: it is not stuck."""
        now = time.monotonic()
        if self._looked is not None:
            self._longest = max(self._longest, now - self._looked)
        self._looked = None if self._rests else now

    def wait(self, waits: bool) -> None:
        """Whether there is something that the others keep this rank waiting for."""
        if not waits:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()

    def rest(self) -> None:
        """Training is over: nobody waits for whatever the rank does now."""
        self._rests, self._looked, self._waits_since = True, None, None

    def report(self) -> dict[str, float]:
        """Seconds, for the heartbeat."""
        now, looked, since = time.monotonic(), self._looked, self._waits_since
        busy, waits = (0.0 if start is None else max(0.0, now - start) for start in (looked, since))
        return {"busy": busy, "waits": waits, "longest": self._longest}


def stuck(reports: Mapping[int, Report], at_least: float) -> dict[int, float]:
    """Ranks to be given up, and for how many seconds each has been busy; nobody if `at_least` is 0.

    >>> slow, waiting = {"busy": 70.0, "waits": 0.0, "longest": 5.0}, {"busy": 0.0, "waits": 65.0, "longest": 10.0}
    >>> stuck({0: waiting, 1: slow, 2: waiting}, at_least=60.0)
    {1: 70.0}
    >>> stuck({0: {**waiting, "longest": 25.0}, 1: slow}, at_least=60.0)  # that has happened before
    {}
    >>> stuck({0: {**waiting, "waits": 0.0}, 1: slow}, at_least=60.0)  # nobody minds
    {}
    """
    limit = max([at_least, *(SEVERAL * report["longest"] for report in reports.values())])
    if not at_least or not any(report["waits"] >= limit for report in reports.values()):
        return {}
    return {rank: report["busy"] for rank, report in reports.items() if report["busy"] >= limit}
