"""Micro-batches taken ahead, so that asking for the next one practically never waits for the service."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from paceline.control.client import ANSWER_SECONDS, ControlClient
from paceline.errors import PacelineError

# At 1 ms a micro-batch one round trip (0.2 ms here, 1 ms in a data centre) is hidden many times over. A lease costs the
# control plane half a millisecond of a core that trains, too: with 8 it took 0.3 % of the time at 24 ms a micro-batch.
AHEAD = 16


class LeaseStock:
    """A rank's stock of leased micro-batches.

    The next lease is asked for when half of the last one is used up, and arrives on the client's reading thread while
    the rank computes. Near the end of the data the ledger hands out single micro-batches, and the stock shrinks with
    them: a slow rank then holds the one that it computes and one more.

    Args:
        client: connected, with an open ledger.
        ahead: micro-batches to ask for at a time.
    """

    def __init__(self, client: ControlClient, ahead: int = AHEAD) -> None:
        self._client, self._ahead = client, ahead
        self._lock = threading.Lock()
        self._stock: deque[range] = deque()
        self._low_water = 0
        self._coming: Future[tuple[list[range], bool]] | None = None
        self.waits = 0
        """How often a caller found the stock empty and had to wait for the service."""
        self.complete = False
        """Whether, at the last answer, every sample of the run was settled: nothing will ever be free again."""

    def next_range(self) -> range | None:
        """The next micro-batch; None when nothing is free now. Asking again later may find what others gave back."""
        with self._lock:
            if self._coming is not None and (self._coming.done() or not self._stock):
                self.waits += not self._coming.done()
                self._unpack(self._coming)
            if not self._stock:  # the first time; or what was asked for ahead found nothing, which may be old news
                self.waits += 1
                self._unpack(self._client.lease(self._ahead))
            if not self._stock:
                return None
            part = self._stock.popleft()
            if len(self._stock) <= self._low_water and self._coming is None:
                self._coming = self._client.lease(self._ahead)
            return part

    def close(self) -> list[range]:
        """What was leased and not handed out; the caller gives it back. Nothing more is asked for."""
        with self._lock:
            if self._coming is not None:
                self._unpack(self._coming)
            left_over = list(self._stock)
            self._stock.clear()
            return left_over

    def _unpack(self, coming: Future[tuple[list[range], bool]]) -> None:
        self._coming = None
        try:
            ranges, self.complete = coming.result(ANSWER_SECONDS)
        except FutureTimeoutError:
            waited = f"within {ANSWER_SECONDS:g} s"
            raise PacelineError(f"The control service did not answer rank {self._client.rank} {waited}.") from None
        self._stock.extend(ranges)
        self._low_water = len(ranges) // 2
