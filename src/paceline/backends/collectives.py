"""Collectives on torch.distributed: started at once, polled, never waited for without looking around, and mended when a
rank is lost.

A blocked gloo collective is woken by nothing but its own time-out, so a rank waits in slices and asks in between
whether somebody was lost. Then those who are left agree on what counts (`agreement`), form a new group on the store
prefix of the new generation, give each other what counts, and repeat the rest. Whoever waits for a collective gets its
result as ever, with the lost rank's part in it on all ranks or on none. Another loss meanwhile begins this anew.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

from paceline.backends.agreement import Gift, Standing, gifts
from paceline.backends.driver import NAMING_SECONDS, WaitableWork
from paceline.backends.flat import Brought
from paceline.backends.lane import SUM, Care, Flight, Lane
from paceline.backends.merge_work import MergeWork
from paceline.backends.movement import Movement
from paceline.backends.over_hosts import OverHosts, layout
from paceline.backends.peers import Peers
from paceline.backends.rounded_work import RoundedTrip
from paceline.control.keys import GENERATION
from paceline.errors import PacelineError

T = TypeVar("T")
SLICE = 0.05  # seconds; a rank that is not a neighbour of the lost one learns of it only between two of them
POLL_SECONDS = 0.002
# The heartbeat finds a dead or hanging peer; torch's own time-out is the last resort behind it.
LAST_RESORT = timedelta(minutes=30)


class ChangedError(Exception):
    """The membership has changed while ranks were agreeing."""


class Collectives:
    """A process group over the ranks that are here.

    Args:
        peers: the other ranks.
        rank: this one.
        world_size: all of the run; all are here at the beginning.
        device: `cuda` uses NCCL, everything else gloo.
        host: this machine's address for the other ranks; nothing need listen on others. gloo's own default would be
            the address of the machine's name, and the loopback where that has none.
        joins: whether this rank joins a running training; see `enter`.
    """

    def __init__(
        self, peers: Peers, rank: int, world_size: int, device: torch.device, host: str, joins: bool = False
    ) -> None:
        self.rank, self.device = rank, device
        self._peers, self._host, self._began_with = peers, host, world_size
        self.ranks: Sequence[int] = list(range(world_size))
        self.generation = peers.membership().generation
        self.on_mended: Callable[[int], None] = lambda generation: None
        """Called with the generation when those who are left have agreed."""
        self._rounds, self._merges = Lane("rounds"), Lane("merges")
        if not joins:
            with suppress(ChangedError, PacelineError):  # somebody is lost already: mending forms the others' group
                self._rounds.repeat(self._build("rounds"), self.ranks)
        self._last_merge: MergeWork[Any] | None = None

    # ---- starting

    def add_up(
        self, tensor: Tensor, then: Callable[[], T], name: str, care: Care, round_number: int | None = None
    ) -> CollectiveWork[T]:
        """Start to add the tensor over all ranks, in place; `then` makes the result."""
        flight = self._rounds.start(tensor, care, SUM, round_number)
        return CollectiveWork(self, self._rounds, flight, then, name)

    def add_up_rounded(
        self, brought: Brought, then: Callable[[], T], name: str, round_number: int | None = None
    ) -> CollectiveWork[T]:
        """The same with gradients that travel as codes, in the group of merges: a round has several steps, and no other
        collective may come between them."""
        lane = self._merges
        trip = RoundedTrip(brought.flat, self.rank, lambda: lane.closed)

        def is_there() -> None:
            trip.is_there()
            brought.is_there()

        self._form(lane)
        care = Care(brought.again, is_there, brought.let_go)
        flight = lane.start(brought.flat.whole, care, trip, round_number)
        return CollectiveWork(self, lane, flight, then, name)

    def merge(self, movement: Movement, then: Callable[[], T], name: str, round_number: int | None) -> MergeWork[T]:
        """Start to merge all ranks' models, in place, while this rank goes on."""
        work = MergeWork(self._merges, self._form, movement, then, name, self._last_merge)
        work.round_number, work.look_around = round_number, self.look_around
        work.begin()
        self._last_merge = work
        return work

    def _form(self, lane: Lane) -> None:
        """The first collective of a lane forms its group. If somebody is lost meanwhile, it is formed by mending."""
        with lane.lock, suppress(ChangedError, RuntimeError, PacelineError):
            if lane.group is None:
                lane.repeat(self._build(lane.name), self.ranks)

    def sum_now(self, tensor: Tensor, name: str) -> Tensor:
        """Add it over all ranks and wait for it."""
        kept = tensor.clone()
        work: CollectiveWork[Tensor] = self.add_up(tensor, lambda: work.flight.tensor, name, Care(kept.clone))
        return work.finish()

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Give one rank's tensor to all ranks, in place, now. Nobody overwrites the root's: it can be given again.

        Nobody goes on before all have it: a root that is lost later has left it to somebody, whatever the network did.
        """
        flight = self._rounds.start(tensor, Care(), root)
        CollectiveWork(self, self._rounds, flight, lambda: tensor, "The broadcast of the start").finish()
        self.sum_now(torch.zeros(1, device=self.device), "The meeting after the broadcast of the start")

    def broadcast_bytes(self, content: bytes | None, root: int = 0) -> bytes:
        """Give one rank's bytes to all ranks."""
        length = torch.tensor([len(content or b"")], device=self.device)
        self.broadcast(length, root)
        body = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if content:
            body.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.broadcast(body, root)
        return bytes(body.cpu().numpy())

    @property
    def held_rounds(self) -> list[int]:
        """Rounds whose results are kept here: the last ones."""
        return self._rounds.held_rounds + self._merges.held_rounds

    # ---- looking around

    def look_around(self, failed: bool = False) -> None:
        """Mend the collectives if somebody of the group is lost. `failed`: one of them has, so somebody must be."""
        failed = failed or self._merges.troubled
        self._peers.check(0.0)
        if self._is_broken(failed):
            self._mend()
        elif failed:
            self._find_out()

    def _is_broken(self, failed: bool) -> bool:
        """Who has left is missed only if something failed: the last collective may be over here a little later."""
        generation, lost, left, _ = self._peers.membership()
        missed = lost | left if failed else lost
        return generation != self.generation and not missed.isdisjoint(self.ranks)

    def _find_out(self) -> None:
        """Something has failed, and nobody is known to be lost. A broken socket is seen at once, its reason later."""
        deadline = time.monotonic() + NAMING_SECONDS
        while not self._is_broken(failed=True):
            if time.monotonic() > deadline:
                raise PacelineError(
                    "A collective failed, and no rank is known to be lost.",
                    where=f"rank {self.rank}",
                    cause="Probably the network between two ranks broke.",
                    remedy="Look for the first error among the other ranks' logs.",
                )
            self._peers.check(0.02)
        self._mend()

    # ---- mending

    def _mend(self) -> None:
        lanes = (self._rounds, self._merges)
        with ExitStack() as stack:
            for lane in lanes:
                stack.enter_context(lane.lock)
            while True:
                generation, lost, left, seats = self._peers.membership()
                here = [rank for rank in range(max(self._began_with, seats)) if rank not in lost | left]
                try:
                    self._agree(generation, here, lanes)
                    break
                except ChangedError:
                    continue
                except MissingRootError:
                    raise
                except (RuntimeError, PacelineError) as error:
                    self._await_change(generation, error)
        self.on_mended(generation)

    def _agree(self, generation: int, here: list[int], lanes: Sequence[Lane]) -> None:
        standings = self._exchange(generation, here, [lane.standing() for lane in lanes])
        given = [gifts({rank: each[place] for rank, each in standings.items()}) for place in range(len(lanes))]
        for lane, known in zip(lanes, given, strict=True):
            _check_roots(here, lane, known)
        before, groups = (self.generation, self.ranks), []
        self.generation, self.ranks = generation, here
        try:
            for place, lane in enumerate(lanes):
                needed = any(each[place].started for each in standings.values())
                groups.append(self._build(lane.name) if needed else None)
            for lane, known, group in zip(lanes, given, groups, strict=True):
                for gift in known:
                    self._give(lane, gift, group)
        except BaseException:
            self.generation, self.ranks = before
            for group in groups:
                _give_up(group)
            raise
        for lane, group in zip(lanes, groups, strict=True):
            _give_up(lane.group)
            lane.repeat(group, here)

    def _exchange(self, generation: int, here: list[int], own: list[Standing]) -> dict[int, list[Standing]]:
        """Say how far this rank has come, and hear it of all who are left."""
        keys = [f"{GENERATION}{generation}/standing-{rank}" for rank in here]
        self._peers.say(keys[here.index(self.rank)], json.dumps(own).encode())
        while (heard := self._peers.heard(keys)) is None:
            self._peers.check(0.0)
            self._stop_if_changed(generation)
            time.sleep(POLL_SECONDS)
        return {
            rank: [Standing(started, tuple(lacks)) for started, lacks in json.loads(said)]
            for rank, said in zip(here, heard, strict=True)
        }

    def _give(self, lane: Lane, gift: Gift, group: Any) -> None:
        flight = lane.flight(gift.number)
        if self.rank == gift.giver:
            if flight is None:
                raise PacelineError(f"Collective {gift.number} of the {lane.name} is kept by nobody any more.")
            for rank in gift.lacking:
                self._wait_for(group.send([flight.tensor], self.ranks.index(rank), gift.number))
        elif self.rank in gift.lacking:
            assert flight is not None
            flight.repeat()
            self._wait_for(group.recv([flight.tensor], self.ranks.index(gift.giver), gift.number))
            flight.hold()

    def _wait_for(self, work: Any) -> None:
        """Until it is sent, or received. In one wait: gloo closes the connection when a wait for one of these ends
        without it, and the other side may only be slow."""
        self._on_a_thread(work.wait, self.generation)

    def _stop_if_changed(self, generation: int) -> None:
        if self._peers.membership().generation != generation:
            raise ChangedError

    def _await_change(self, generation: int, error: Exception) -> None:
        """What was being formed has failed: somebody else must be lost."""
        deadline = time.monotonic() + NAMING_SECONDS
        while self._peers.membership().generation == generation:
            if time.monotonic() > deadline:
                raise PacelineError(
                    "The ranks that are left could not form a group.",
                    where=f"rank {self.rank}",
                    cause=str(error).splitlines()[0] if str(error) else type(error).__name__,
                ) from error
            self._peers.check(0.02)

    # ---- newcomers

    def meet_to_admit(self) -> None:
        """All who take part together, between two rounds: from now on all hold whatever was started."""
        for lane in (self._rounds, self._merges):
            lane.drain(self.look_around)
        self.sum_now(torch.zeros(1, device=self.device), "The meeting before newcomers take part")

    @property
    def started(self) -> list[int]:
        """How many collectives of each kind were started: what a newcomer must know."""
        return [self._rounds.started, self._merges.started]

    def go_on_with(self, generation: int) -> None:
        """After that meeting: form groups with the newcomers who take part from this generation on."""
        if self.generation < generation:  # else somebody was lost meanwhile, and they are in it by now
            self._mend()

    def enter(self, started: list[int]) -> None:
        """A newcomer takes part from now on, as if it had been at the meeting."""
        self._rounds.enter(started[0], torch.zeros(1, device=self.device))
        self._merges.enter(started[1], None)
        self._mend()

    # ---- groups

    def _build(self, lane: str) -> Any:
        """The process group of those who are here."""
        store = c10d.PrefixStore(lane, self._peers.store(self.generation))
        return self._on_a_thread(lambda: self._made(store), self.generation)

    def _on_a_thread(self, act: Callable[[], T], generation: int) -> T:
        """What nothing wakes while it waits for a rank that dies meanwhile."""
        made, failed = list[T](), list[BaseException]()

        def run() -> None:
            try:
                made.append(act())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True, name=f"paceline-group-{generation}")
        thread.start()
        while thread.is_alive():
            thread.join(SLICE)
            if thread.is_alive():
                self._stop_if_changed(generation)
        if failed:
            raise failed[0]
        return made[0]

    def _made(self, store: c10d.Store) -> Any:
        made: Any = c10d  # its stubs lack the constructors
        if self.device.type == "cuda":
            options = made.ProcessGroupNCCL.Options()
            options._timeout = LAST_RESORT
            return made.ProcessGroupNCCL(store, self.ranks.index(self.rank), len(self.ranks), options)
        gloo = made.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = LAST_RESORT
        options._devices = [gloo.create_device(hostname=self._host)]

        def group(name: str, ranks: Sequence[int]) -> Any:
            return gloo(c10d.PrefixStore(name, store), ranks.index(self.rank), len(ranks), options)

        over = layout(self.rank, {rank: self._peers.host_of(rank) for rank in self.ranks})
        everybody = group("all", self.ranks)
        return everybody if over is None else OverHosts(everybody, self.rank, over, group)

    def abandon(self) -> None:
        """Give the groups up with work in flight."""
        for lane in (self._rounds, self._merges):
            lane.closed = True
            _give_up(lane.group)


def _give_up(group: Any) -> None:
    """Never destroy it: a group's destructor would wait for what is in flight until the last resort, and the process
    could not end while a peer hangs."""
    if isinstance(group, OverHosts):
        group.give_up()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _check_roots(here: list[int], lane: Lane, given: list[Gift]) -> None:
    """What nobody who is left can give must come from a rank that is here."""
    numbers = {gift.number for gift in given}
    missing = [root for number, root in lane.roots.items() if root not in here and number not in numbers]
    if missing:
        raise MissingRootError(
            f"Rank {missing[0]} was lost before it had given the others what they need of it.",
            remedy="Start again; with run.resume() from the last checkpoint.",
        )


class MissingRootError(PacelineError):
    """Nobody can give what is missing."""


class CollectiveWork(WaitableWork[T]):
    """One collective in flight."""

    def __init__(self, collectives: Collectives, lane: Lane, flight: Flight, then: Callable[[], T], name: str) -> None:
        self._collectives, self._lane, self.flight = collectives, lane, flight
        self._then, self.name = then, name
        self.round_number = flight.round_number  # of those that carry a round's gradients
        self._result: T | None = None

    @property
    def done(self) -> bool:
        return self._lane.arrived(self.flight)

    def wait(self, seconds: float | None = None) -> bool:
        deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
        while not self._lane.arrived(self.flight, max(0.0, min(SLICE, deadline - time.monotonic()))):
            self._collectives.look_around(self.flight.failed)
            if time.monotonic() >= deadline:
                return self.done
        return True

    def result(self) -> T:
        if self._result is None:
            self.flight.consumed = True
            self._result = self._then()
        return self._result

    def finish(self) -> T:
        self.wait()
        return self.result()
