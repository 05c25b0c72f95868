"""A merge of large models in flight on real processes, on a thread and a process group of its own.

While one chunk travels, the next is packed and the one before is put in its place; and meanwhile the rank computes. The
group is another one than that of the rounds, because two threads cannot keep the order of collectives on one.

Each chunk is a collective of its own, which counts on all ranks or is repeated without a lost one. Whether the round
counts is decided by the first, which carries the weights and the samples.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from paceline.backends.driver import LOOK_AROUND_SECONDS, WaitableWork
from paceline.backends.lane import MAX, SUM, Care, Flight, Lane
from paceline.backends.movement import Movement
from paceline.errors import PacelineError

T = TypeVar("T")
IN_FLIGHT = 2  # chunks: one travels while another is packed or placed
SLICE = 0.05  # seconds


class MergeWork(WaitableWork[T]):
    """One merge.

    Args:
        lane: of the merges.
        form: makes the lane's process group, if there is none; called on the thread.
        movement: this rank's part; its common model is merged when the work is done.
        then: makes the result.
        name: of the work, for errors.
        before: the merge before, which goes first.
    """

    round_number: int | None = None
    look_around: Callable[[], None] = staticmethod(lambda: None)
    """Mends the lane if somebody is lost; the thread waits for that."""

    def __init__(
        self,
        lane: Lane,
        form: Callable[[Lane], None],
        movement: Movement,
        then: Callable[[], T],
        name: str,
        before: MergeWork[Any] | None,
    ) -> None:
        self.name = name
        self.nbytes = 0
        """That have travelled, when it is done."""
        self._lane, self._form, self._movement, self._then = lane, form, movement, then
        self._arrived = threading.Event()
        self._error: BaseException | None = None
        self._result: T | None = None
        self._before = before

    def begin(self) -> None:
        threading.Thread(target=self._run, daemon=True, name=self.name).start()

    @property
    def done(self) -> bool:
        return self._arrived.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
        while not self._arrived.wait(max(0.0, min(SLICE, deadline - time.monotonic()))):
            self.look_around()
            if time.monotonic() >= deadline:
                return self.done
        return True

    def result(self) -> T:
        if self._error is not None:
            why = str(self._error) or type(self._error).__name__
            raise PacelineError(f"{self.name} failed.", cause=why.splitlines()[0]) from self._error
        if self._result is None:
            self._result = self._then()
        return self._result

    # ---- on the thread

    def _run(self) -> None:
        try:
            if self._before is not None:
                self._before._arrived.wait()
                self._before = None
            self._travel()
        except BaseException as error:  # whoever asks for the result gets it
            self._error = error
        self._arrived.set()

    def _travel(self) -> None:
        movement = self._movement
        head = self._lane.start(movement.head(), Care(movement.head_again), SUM, self.round_number)
        self._form(self._lane)
        together = movement.moved  # of a small model: none
        if together.numel():
            together = self._landed(self._start(together.clone, MAX))
        self.nbytes = movement.nbytes_of(together)
        travelling = deque[tuple[Callable[[Tensor], None], Flight]]([(movement.place_head, head)])
        for blocks in movement.chunks(together):
            packed = self._start(partial(movement.pack, blocks), SUM)
            travelling.append((partial(movement.place, blocks), packed))
            if len(travelling) == IN_FLIGHT:
                self._place(*travelling.popleft())
        while travelling:
            self._place(*travelling.popleft())

    def _place(self, where: Callable[[Tensor], None], flight: Flight) -> None:
        where(self._landed(flight))

    def _start(self, bring: Callable[[], Tensor], way: Any) -> Flight:
        flight = self._lane.start(bring(), Care(bring), way)
        self._form(self._lane)
        return flight

    def _landed(self, flight: Flight) -> Tensor:
        """Its result. If it has failed, the rank's main thread mends it: see `Collectives.look_around`."""
        while not self._lane.arrived(flight, LOOK_AROUND_SECONDS):
            if self._lane.closed:
                raise PacelineError("The run has ended.")
            if flight.failed:
                time.sleep(SLICE / 10)
        flight.consumed = True
        return flight.tensor
