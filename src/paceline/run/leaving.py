"""How a rank stops to compute before the data is used up: because its loop was left, or because it was told to leave.

In both cases it gives back what it has not used and takes part in the rounds of the others without data. Who has left
its loop does so to the end. Who was told to leave goes as soon as nothing of it is missing: its work is in rounds that
all ranks have, and its leases are given back (see `parting`). Then it says so, and the others form groups without it.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from paceline.backends.driver import Driver
from paceline.backends.parting import ROUNDS_TO_LOOK
from paceline.errors import PacelineError
from paceline.launch.surroundings import Surroundings
from paceline.run.loader import Loader
from paceline.run.rank import Rank
from paceline.run.saving import Saver
from paceline.strategies.strategy import Strategy

IDLE_SLICE = 0.05  # how long a rank without data sleeps before it asks again whether leases came back


class PartedError(Exception):
    """Ends whatever a rank waits for that has left."""


class Notice:
    """That this rank is to leave: by SIGTERM, or by `run.leave()`."""

    def __init__(self) -> None:
        self.given = False
        self._before: Any = None

    def give(self, strategy: Strategy, place: Surroundings) -> None:
        """Now. Raises if the run could not go on without this rank."""
        refusal = _refusal(strategy, place)
        if refusal is not None:
            raise refusal
        self.given = True

    def listen(self, strategy: Strategy, place: Surroundings) -> None:
        """From now on SIGTERM is notice, if the run can go on without this rank. A handler that the script has set
        before is called as well; if SIGTERM is ignored, it stays so. Only main threads hear signals."""
        before = signal.getsignal(signal.SIGTERM)
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and before not in (signal.SIG_IGN, None) and _refusal(strategy, place) is None:
            self._before = before
            signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.given = True
        if callable(self._before):
            self._before(number, frame)

    def stop_listening(self) -> None:
        """What handled SIGTERM before does so again, unless the script has set another handler since."""
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, self._before)
        self._before = None


def _refusal(strategy: Strategy, place: Surroundings) -> PacelineError | None:
    """Why the run could not go on without this rank; None if it can, or if there is nobody else."""
    others = [rank for rank in range(place.world_size) if rank != place.rank]
    lacks = strategy.lacks(others, place.workers, place.servers) if others else ""
    if not place.serves and not lacks:
        return None
    return PacelineError(
        f"Rank {place.rank} cannot leave the run.",
        cause=f"The strategy {strategy.name} would need {lacks or 'its server'}.",
        remedy="End the whole run: with run.resume() it goes on from the last checkpoint.",
    )


class Part:
    """What is left of a rank's part in the run when it computes no more.

    Args:
        driver: of its coroutine.
        rank: all its connections.
        loader: of its data.
        saver: of checkpoints.
    """

    def __init__(self, driver: Driver, rank: Rank, loader: Loader, saver: Saver) -> None:
        self._driver, self._rank, self._loader, self._saver = driver, rank, loader, saver

    def end(self, notice: bool) -> bool:
        """The loop is over; the run may not be. Whether this rank has left it before."""
        left = notice and not self._driver.finished and self.leave()
        if not left:
            self.play_to_the_end()
            self._saver.finish()
        return left

    def rest(self) -> None:
        """Training is over; whatever the script does now keeps nobody waiting."""
        self._saver.prepare()
        self._rank.rest()

    def play_to_the_end(self) -> None:
        """Take part without data until all are done."""
        node = self._rank.node
        if self._driver.finished:
            return
        self._rank.stop_leasing(self._loader.take_pending() + self._loader.left_over())
        others_have_looked = node.rounds + ROUNDS_TO_LOOK
        while not self._driver.finished:
            node.out_of_data = node.rounds >= others_have_looked
            self._driver.give_nothing(IDLE_SLICE)

    def leave(self) -> bool:
        """Take part without data until nothing of this rank is missing, and go; False if the run was over before. The
        last one to go leaves a checkpoint behind."""
        node = self._rank.node
        first = node.rounds_started

        def go() -> None:
            if self._rank.may_go(first):
                raise PartedError

        node.on_looking_around = go
        try:
            self.play_to_the_end()
            return False
        except PartedError:
            self._driver.stop()
            if self._rank.part():
                self._saver.write_alone()
            return True
        finally:
            node.on_looking_around = lambda: None
