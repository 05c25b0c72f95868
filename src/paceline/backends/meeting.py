"""A round of all ranks that are left: begun anew when somebody is lost in the middle of it.

After a death inside a collective some ranks may hold its result and some not. So everybody says in the control plane
whether it has one, and the round counts when everybody of it has said yes:

    who has the result says yes, who failed says no;   a rank that is lost has said yes before, or counts as a no
    all yes: the round counts on all that are left     else: none takes it, they form a new group, and repeat it

All see the same. A vote travels on the voter's own connection to the control plane, which hears it before it sees that
connection end; so whoever learns of the loss learns what the lost rank had said.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.backends.collectives import Collectives, CollectiveWork
from paceline.backends.driver import NAMING_SECONDS, WaitableWork
from paceline.control.client import ControlClient
from paceline.errors import PacelineError
from paceline.node import Gradient

POLL_SECONDS = 0.002
YES, NO = b"yes", b"no"


class Meeting(WaitableWork[Gradient]):
    """One round of those who are left.

    Args:
        launch: starts the collective in the present group.
        collectives: the group.
        control: who is lost, and who has said what.
        check_peers: tells the strategy of losses; raises if the run cannot go on.
        number: of the round.
    """

    def __init__(
        self,
        launch: Callable[[], CollectiveWork[Gradient]],
        collectives: Collectives,
        control: ControlClient,
        check_peers: Callable[[float], None],
        number: int,
    ) -> None:
        self._launch, self._collectives, self._control = launch, collectives, control
        self._check_peers, self.round_number = check_peers, number
        self._work: CollectiveWork[Gradient] | None = None
        self._counts = False

    @property
    def done(self) -> bool:
        return self._counts

    def wait(self, seconds: float | None = None) -> bool:
        deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
        while not self._counts and time.monotonic() < deadline:
            self._check_peers(0.0)
            self._attempt(min(NAMING_SECONDS, max(0.0, deadline - time.monotonic())))
        return self._counts

    def result(self) -> Gradient:
        assert self._work is not None and self._counts
        return self._work.result()

    def _attempt(self, seconds: float) -> None:
        try:
            if self._work is None:
                self._form()
                self._work = self._launch()
            has_it = self._work.wait(seconds)
        except (PacelineError, RuntimeError):
            self._check_peers(NAMING_SECONDS)
            if not self._lost:
                raise
            has_it = False
        if has_it or self._lost:
            self._vote(has_it)
            # Who has it knows that all others have begun it too, so that each of them votes or is lost.
            self._counts = has_it and self._all_say_yes()
            if not self._counts:
                self._work = None

    @property
    def _lost(self) -> list[int]:
        """Ranks of the present group that are lost."""
        return [rank for rank in self._collectives.ranks if rank in self._control.lost]

    def _form(self) -> None:
        """The group of those who are left, if it is not that already."""
        if self._lost:
            here = [rank for rank in self._collectives.ranks if rank not in self._control.lost]
            self._collectives.renew(here, self._control.generation)

    def _key(self, rank: int) -> str:
        return f"round {self.round_number} of generation {self._collectives.generation}: rank {rank}"

    def _vote(self, has_it: bool) -> None:
        self._control.store_set(self._key(self._collectives.rank), YES if has_it else NO)

    def _all_say_yes(self) -> bool:
        """Wait until everybody of the group has spoken or is lost."""
        for rank in self._collectives.ranks:
            while not self._control.store_check([self._key(rank)]):
                self._check_peers(0.0)
                if rank in self._control.lost and not self._control.store_check([self._key(rank)]):
                    return False
                time.sleep(POLL_SECONDS)
            if self._control.store_get(self._key(rank)) != YES:
                return False
        return True
