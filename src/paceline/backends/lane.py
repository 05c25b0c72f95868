"""Collectives in order on one process group, each kept until nobody can need it again.

gloo adds up in place and keeps nothing: after a failure in the middle the memory holds neither what a rank has brought
nor the result. So a flight knows how to bring the same once more, until it has the result; and it keeps the result,
until all others are known to have it. Both cost no copy where memory can be left alone instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

from paceline.backends.agreement import Standing

SUM: Final = c10d.ReduceOp.SUM
MAX: Final = c10d.ReduceOp.MAX
DRAIN_SECONDS = 0.05  # between two looks around


def nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Care:
    """What becomes of the memory of a collective.

    Args:
        again: what this rank has brought, in memory of its own, to be brought once more; None if the tensor is not
            overwritten before the result is whole.
        is_there: called when the result has come, and need not be brought again.
        let_go: called when nobody can need the result any more.
    """

    again: Callable[[], Tensor] | None = None
    is_there: Callable[[], None] = nothing
    let_go: Callable[[], None] = nothing


def start_adding(tensor: Tensor, group: Any, way: Any = SUM) -> Any:
    adding = c10d.AllreduceOptions()
    adding.reduceOp = c10d.ReduceOp(way)
    return group.allreduce([tensor], adding)


class Alone:
    """A collective of one rank, done when it begins: a run alone does not depend on when a thread of gloo's is through,
    and takes the same course each time."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


ALONE: Final = Alone()


class Trip(Protocol):
    """A collective of several steps."""

    def begin(self, tensor: Tensor, group: Any, ranks: Sequence[int]) -> Any:
        """Start it; what comes back is polled and waited for as a work of torch's. `tensor` gets the result."""


class Flight:
    """One collective, from its start until nobody can need its result any more.

    Args:
        number: its place among those of its lane.
        floor: the first collective of the lane that this rank had not consumed when it started this one. All ranks run
            the same program: who has the result of this one knows that the others have consumed all before the floor.
        tensor: what this rank brings; the result when it is there.
        care: for its memory.
        way: `SUM` or `MAX` over all ranks, the rank whose tensor all get, or a `Trip`.
    """

    round_number: int | None = None  # of the one that decides whether a round counts

    def __init__(self, number: int, floor: int, tensor: Tensor, care: Care, way: Any) -> None:
        self.number, self.floor, self.tensor, self.care, self.way = number, floor, tensor, care, way
        self.held = self.consumed = self.failed = False
        self._work: Any = None

    def launch(self, group: Any, ranks: Sequence[int]) -> None:
        self.failed = False
        try:
            if len(ranks) == 1 and isinstance(self.way, int | c10d.ReduceOp.RedOpType):
                self._work = ALONE
            elif isinstance(self.way, int):
                giving = c10d.BroadcastOptions()
                giving.rootRank = ranks.index(self.way)
                self._work = group.broadcast([self.tensor], giving)
            elif isinstance(self.way, c10d.ReduceOp.RedOpType):
                self._work = start_adding(self.tensor, group, self.way)
            else:
                self._work = self.way.begin(self.tensor, group, ranks)
        except RuntimeError:  # the group is broken already
            self.failed = True

    def repeat(self) -> None:
        """Begin anew, with what this rank had brought. Whatever becomes of the old attempt no longer matters."""
        self._work, self.failed = None, False
        if self.care.again is not None:
            self.tensor = self.care.again()

    def poll(self) -> bool:
        """Whether the result is there."""
        if not self.held and not self.failed and self._work is not None and self._work.is_completed():
            try:
                self._work.wait()  # on NCCL this orders the streams; on gloo it raises what went wrong
                self.hold()
            except RuntimeError:
                self.failed = True
        return self.held

    def hold(self) -> None:
        self.held, self._work = True, None
        self.care.is_there()

    def wait(self, seconds: float) -> None:
        """Until it is done or has failed, at most so long."""
        work = self._work
        if work is not None and not self.held and not self.failed:
            try:
                # torch counts whole milliseconds, and zero of them are for ever
                work.wait(timedelta(milliseconds=max(1, round(1000 * seconds))))
            except RuntimeError:
                return  # not yet, or never: polling tells


class Lane:
    """The collectives of one process group, in order. One thread starts them; another may mend them after a loss.

    Args:
        name: of the lane.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()  # while ranks agree on what counts, nothing may be started or found to be done
        self.group: Any = None
        self.ranks: Sequence[int] = ()
        self.started = 0
        self.closed = False
        """Nobody waits for anything here any more."""
        self._flights: dict[int, Flight] = {}

    def start(self, tensor: Tensor, care: Care, way: Any = SUM, round_number: int | None = None) -> Flight:
        """The next one. While the lane has no group it waits for one."""
        assert tensor.numel(), "gloo ends an empty collective on a rank before the others have started it"
        with self.lock:
            unconsumed = [number for number, flight in self._flights.items() if not flight.consumed]
            flight = Flight(self.started, min([self.started, *unconsumed]), tensor, care, way)
            flight.round_number = round_number
            self._flights[self.started] = flight
            self.started += 1
            if self.group is not None:
                flight.launch(self.group, self.ranks)
            return flight

    def enter(self, started: int, last: Tensor | None) -> None:
        """A newcomer: the others have started so many, and hold them all. `last`: the result of the last of them."""
        self.started = started
        if last is not None:
            flight = Flight(started - 1, started - 1, last, Care(), SUM)
            flight.held = flight.consumed = True
            self._flights[flight.number] = flight

    def drain(self, look_around: Callable[[], None]) -> None:
        """Until all that was started has arrived."""
        while lacking := self._lacking():
            if not self.arrived(self._flights[lacking[0]], DRAIN_SECONDS):
                look_around()

    def arrived(self, flight: Flight, seconds: float = 0.0) -> bool:
        """Whether its result is there, after so long at most. A flight that has failed is not waited for."""
        if seconds and not flight.held:
            flight.wait(seconds)
        with self.lock:
            if not flight.held and flight.poll():
                self._forget(flight.floor)
            return flight.held

    def _forget(self, floor: int) -> None:
        for number in [each for each in self._flights if each < floor]:
            if self._flights[number].held:
                self._flights.pop(number).care.let_go()

    # ---- after a loss

    def standing(self) -> Standing:
        """How far this rank has come. From now on nothing is found to be done, until it is repeated."""
        for flight in list(self._flights.values()):
            self.arrived(flight)
        return Standing(self.started, tuple(self._lacking()))

    def flight(self, number: int) -> Flight | None:
        return self._flights.get(number)

    def _lacking(self) -> list[int]:
        return [number for number, flight in self._flights.items() if not flight.held]

    @property
    def held_rounds(self) -> list[int]:
        """Rounds whose results are held here."""
        held = [flight.round_number for flight in list(self._flights.values()) if flight.held]
        return [number for number in held if number is not None]

    def repeat(self, group: Any, ranks: Sequence[int]) -> None:
        """Go on in another group, with all that is not there yet."""
        self.group, self.ranks = group, ranks
        for number in self._lacking():
            self._flights[number].repeat()
            self._flights[number].launch(group, ranks)

    @property
    def roots(self) -> dict[int, int]:
        """Ranks whose tensors are awaited, by the numbers of the collectives that bring them."""
        ways = {number: self._flights[number].way for number in self._lacking()}
        return {number: way for number, way in ways.items() if isinstance(way, int)}

    @property
    def troubled(self) -> bool:
        """Whether a collective has failed."""
        return any(flight.failed for flight in list(self._flights.values()))
