"""The control service: one small server that outlives any rank. It runs in a launcher, or in a child of rank 0.

One thread reads each connection, and one lock guards all state: requests are a few microseconds each, leases are taken
ahead in chunks, so there is nothing to win by more. What is to be sent is collected under the lock and sent after it:
a rank that is stopped can delay the one thread that talks to it, never the state.

**How a rank is lost.** A closed connection, missed heartbeats and a launcher that saw the process die all end in the
same place: the end of that connection's stream. What the rank had sent before (that it contributed to a round, say)
is always read first, so a sample is never handed out again after it was used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from paceline.control.attention import stuck
from paceline.control.connection import Connection, Listener, log
from paceline.control.keys import Keys, about_a_key, is_of_the_past, topic_of
from paceline.control.membership import DifferentRunError, Membership
from paceline.control.messages import Metadata, to_ranges
from paceline.control.samples import Samples
from paceline.control.signals import RoundSignals
from paceline.control.waiting import Later, WaitingRoom
from paceline.control.wire import Frame, WireError, encode, error_frame
from paceline.errors import PacelineError

CONNECTION_CLOSED = "its connection was closed"
DONE = Frame("done")
LOOK_SECONDS = 0.25  # at most, between two looks who is late: each costs 0.2 ms of a core that trains, too
MOST_AHEAD = 64  # rounds that a newcomer hears of; ranks are a few apart


@dataclass(eq=False)
class Peer:
    """One connection, and the rank that said hello on it."""

    connection: Connection
    rank: int | None = None
    reason: str = CONNECTION_CLOSED
    attention: Metadata = field(default_factory=lambda: {"busy": 0.0, "waits": 0.0, "longest": 0.0})


Answer = Frame | Later | None


class ControlService:
    """Membership, sample leases, round signals, metrics and a key-value store for one run.

    Args:
        world_size: ranks that must arrive before the run begins.
        secret: only who knows it gets in.
        host: the address to listen on; only this machine by default.
        port: 0 takes any free one; see `address`.
        heartbeat_timeout: seconds of silence after which a rank is lost. Ten: a machine that swaps or a debugger
            stops a process for seconds; a local launcher reports deaths at once anyway.
        join_timeout: seconds that ranks wait for the others to arrive. Five minutes: cold starts on shared file
            systems take minutes.
        stuck_timeout: seconds that a rank may be busy with its own code while others wait for it, at least; 0 for ever.
            Five minutes: what is compiled for the first micro-batch may take so long, and NCCL gives up after ten.
    """

    def __init__(
        self,
        world_size: int,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        heartbeat_timeout: float = 10.0,
        join_timeout: float = 300.0,
        stuck_timeout: float = 300.0,
    ) -> None:
        self._join_timeout, self._beat, self._stuck_timeout = join_timeout, heartbeat_timeout / 4, stuck_timeout
        self._terms: Metadata = {"heartbeat_seconds": self._beat, "join_seconds": join_timeout}
        self._terms |= {"incarnation": 0, "return_seconds": 0.0}
        self._members = Membership(world_size, heartbeat_timeout)
        self._failure: PacelineError | None = None
        self._peers: dict[int, Peer] = {}
        self._metrics: dict[int, Metadata] = {}
        self._samples = Samples(world_size)
        self._signals, self._keys = RoundSignals(), Keys()
        self._waiting: WaitingRoom[Peer] = WaitingRoom()
        self._outgoing: list[tuple[Peer, list[memoryview]]] = []
        self._lock = threading.Lock()
        self._handlers: dict[str, Callable[[Peer, Frame], Answer]] = {
            "hello": self._hello,
            "open_ledger": self._open_ledger,
            "lease": lambda peer, frame: self._samples.lease(self._member(peer), **frame.metadata),
            "progress": self._progress,
            "discard": self._discard,
            "give_back": self._give_back,
            "snapshot": lambda peer, frame: self._samples.settled_by(**frame.metadata),
            "signal": self._signal,
            "heartbeat": self._heartbeat,
            "leave": self._leave,
            "admit": self._admit,
            "enlist": lambda peer, frame: Frame("enlisted", {"ranks": self._members.enlist(**frame.metadata)}),
            "exited": lambda peer, frame: self._exited(**frame.metadata),
            "status": lambda *_: Frame("state", {"state": self._status()}),
            "store_set": self._store_set,
            "store_add": self._store_add,
            "store_get": lambda peer, frame: self._wait_for([frame.metadata["key"]], self._keys.get(**frame.metadata)),
            "store_wait": lambda peer, frame: self._wait_for(frame.metadata["keys"], self._keys.wait(**frame.metadata)),
            "store_check": lambda peer, frame: self._keys.check(**frame.metadata),
            "store_delete": lambda peer, frame: self._keys.delete(**frame.metadata),
        }
        self._recover()
        self._listener = Listener(secret, self._serve, (host, port))
        self.address = self._listener.address
        self._closing = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="paceline-control", daemon=True)
        self._ticker.start()

    def _recover(self) -> None:
        """Before anybody can connect; see `DurableService`."""

    # ---- for the process that runs it

    def report_exit(self, rank: int, reason: str) -> None:
        """A launcher saw the rank's process end: the others learn it now, not after missed heartbeats."""
        with self._state():
            self._exited(rank, reason)

    def _exited(self, rank: int, reason: str) -> None:
        peer = self._peers.get(rank)
        if peer is None and self._members.lost.get(rank, CONNECTION_CLOSED) == CONNECTION_CLOSED:
            self._lose(rank, reason)  # unless the rank itself has said why: that tells more
        elif peer is not None:
            self._end(peer, reason)

    def status(self) -> dict[str, Any]:
        """Members, latest metrics and the ledger's counters."""
        with self._state():
            return self._status()

    def close(self) -> None:
        """Stop. Every client sees its connection close."""
        self._closing.set()
        self._listener.close()
        self._ticker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the loop of one connection, and the clock

    @contextmanager
    def _state(self) -> Iterator[None]:
        """Hold the lock; then send what was decided under it."""
        try:
            with self._lock:
                try:
                    yield
                finally:
                    outgoing, self._outgoing = self._outgoing, []
        finally:
            for peer, frame in outgoing:
                try:
                    peer.connection.send_encoded(frame)
                except OSError:
                    peer.connection.stop_receiving()  # its reader finds out, and the rank is lost in the usual way

    def _serve(self, connection: Connection) -> None:
        peer = Peer(connection)
        try:
            connection.send(Frame("greeting", self._terms))
            while True:
                frame = connection.receive()
                with self._state():
                    self._handle(peer, frame)
        except WireError as error:
            peer.reason = str(error)
            log.warning("Closed a connection from %s: %s", connection.peer, error)
        except OSError:
            pass  # the end of the stream
        finally:
            with self._state():
                self._ended(peer)

    def _handle(self, peer: Peer, frame: Frame) -> None:
        now = time.monotonic()
        if peer.rank is not None:
            self._members.heard(peer.rank, now)
        handler = self._handlers.get(frame.kind)
        if handler is None:
            raise WireError(f"{frame.kind} is nothing that a service is asked")
        try:
            answer = handler(peer, frame)
        except PacelineError as error:
            answer = error_frame(error)
        if isinstance(answer, Later):
            self._answer(self._waiting.ask(peer, frame.sequence, answer, now))
        elif answer is not None:
            self._send(peer, answer, frame.sequence)

    def _tick(self) -> None:
        while not self._closing.wait(min(LOOK_SECONDS, self._beat / 4)):
            now = time.monotonic()
            with self._state():
                for peer, sequence, error in self._waiting.overdue(now):
                    self._send(peer, error_frame(error), sequence)
                if self._failure is not None:
                    self._answer(self._waiting.news("arrivals"))
                for rank in self._members.silent(now):
                    self._end(self._peers[rank], f"it gave no sign of life for {self._members.heartbeat_timeout:g} s")
                for rank, busy in stuck({r: p.attention for r, p in self._peers.items()}, self._stuck_timeout).items():
                    self._end(self._peers[rank], f"it was busy with its own code for {busy:.0f} s while others waited")

    # ---- sending, under the lock

    def _send(self, peer: Peer, frame: Frame, sequence: int = 0) -> None:
        stamped = replace(frame, generation=self._members.generation, sequence=sequence)
        self._outgoing.append((peer, encode(stamped)))

    def _answer(self, answers: list[tuple[Peer, int, Frame]]) -> None:
        for peer, sequence, frame in answers:
            self._send(peer, frame, sequence)

    def _push(self, frame: Frame) -> None:
        encoded = encode(replace(frame, generation=self._members.generation))
        self._outgoing += [(peer, encoded) for peer in self._peers.values()]

    # ---- membership

    def _hello(self, peer: Peer, frame: Frame) -> Answer:
        if self._failure is not None:
            raise self._failure
        rank, mailbox, begun = frame.metadata["rank"], frame.metadata["mailbox"], self._members.begun
        try:
            self._members.arrive(rank, frame.metadata["description"], mailbox and tuple(mailbox), time.monotonic())
        except DifferentRunError as error:
            if not begun:
                self._fail(error)
            raise
        peer.rank = rank
        if begun:
            self._announce()  # before it is a peer itself: it gets the same in its welcome
            for number in self._signals.rounds[-MOST_AHEAD:]:  # others may have ended a round that it will be in
                self._send(peer, Frame("signalled", {"round": number}))
        self._peers[rank] = peer
        self._answer(self._waiting.news("arrivals"))
        return Later(self._welcome, self._join_timeout, self._nobody_came)

    def _welcome(self) -> Frame | str:
        if self._failure is not None:
            return error_frame(self._failure)
        return Frame("welcome", self._membership()) if self._members.begun else "arrivals"

    def _membership(self) -> Metadata:
        members = self._members
        lost = {str(rank): reason for rank, reason in members.lost.items()}
        roster = [list(address) if address else None for address in members.roster]
        gone = {"lost": lost, "left": sorted(members.left), "joining": sorted(members.joining)}
        return {"generation": members.generation, "admitted_in": members.admitted[1], "roster": roster, **gone}

    def _announce(self) -> None:
        self._push(Frame("membership", self._membership()))

    def _nobody_came(self) -> PacelineError:
        """The first to give up gives up for all."""
        missing = ", ".join(map(str, self._members.missing))
        self._failure = self._failure or PacelineError(
            f"Only {len(self._members.present)} of {self._members.world_size} ranks arrived within "
            f"{self._join_timeout:g} s; missing: rank {missing}.",
            cause="They were not started, crashed at the start, or cannot reach this address.",
            remedy="Look at the missing ranks' output, and check the address and the number of processes.",
        )
        return self._failure

    def _fail(self, error: PacelineError) -> None:
        """The run cannot begin any more: tell all who wait, and all who come."""
        self._failure = self._failure or error
        self._answer(self._waiting.news("arrivals"))

    def _end(self, peer: Peer, reason: str) -> None:
        peer.reason = reason
        peer.connection.stop_receiving()

    def _ended(self, peer: Peer) -> None:
        self._waiting.forget(peer)
        if peer.rank is not None and self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
            self._lose(peer.rank, peer.reason)

    def _lose(self, rank: int, reason: str) -> None:
        newcomer = rank in self._members.joining
        before, news = self._members.generation, self._members.lose(rank, reason)
        if news:
            self._announce()
        if not news or newcomer or (self._members.begun and self._members.generation == before):
            return  # a better reason, or one who has not taken part yet: groups that are being formed will be complete
        self._samples.lost(rank, self._members.generation, self._members.taking_part)
        if not self._members.begun:
            self._fail(PacelineError(f"Rank {rank} was lost before all ranks had arrived: {reason}."))
        # A group that was being formed will not be complete: who waits for a key may wait for the lost rank's.
        for peer, sequence in self._waiting.give_up(about_a_key):
            self._send(peer, error_frame(self._failure or PacelineError(f"Rank {rank} was lost: {reason}.")), sequence)

    def _admit(self, peer: Peer, frame: Frame) -> Answer:
        """All who take part ask for the same admission, between the same two rounds; the first to ask decides it."""
        self._member(peer)
        if frame.metadata["number"] == self._members.admissions:
            self._members.admit()
            self._announce()
        ranks, generation = self._members.admitted
        return Frame("admitted", {"ranks": ranks, "generation": generation})

    def _leave(self, peer: Peer, frame: Frame) -> Answer:
        rank = self._member(peer)
        del self._peers[rank]
        peer.rank = None
        if frame.metadata["error"]:
            self._lose(rank, frame.metadata["error"])
        else:
            self._members.leave(rank)
            self._samples.left(rank)
            self._announce()
        return Frame("left", {"last": not self._members.present})

    def _heartbeat(self, peer: Peer, frame: Frame) -> None:
        if peer.rank is not None:
            peer.attention = frame.metadata
            self._metrics[peer.rank] = frame.metadata["metrics"]

    def _signal(self, peer: Peer, frame: Frame) -> Answer:
        if self._signals.add(**frame.metadata):
            self._push(Frame("signalled", {"round": frame.metadata["round"]}))
        return None

    def _member(self, peer: Peer) -> int:
        if peer.rank is None:
            raise PacelineError("Only a rank of the run may ask for that.", remedy="Say hello first.")
        return peer.rank

    def _status(self) -> dict[str, Any]:
        return {
            **self._membership(),
            "present": sorted(self._members.present),
            "missing": self._members.missing,
            "survives": self._members.begun and bool(self._members.description.get("survives")),
            "metrics": {str(rank): latest for rank, latest in self._metrics.items()},
            "ledger": self._samples.counters,
            "held": self._samples.held,
            "progress": self._samples.progress,
            "admits": bool(self._members.description.get("admits")),
            "servers": list(self._members.servers),
        }

    # ---- samples

    def _open_ledger(self, peer: Peer, frame: Frame) -> Answer:
        self._samples.open(self._member(peer), frame.metadata)
        return DONE

    def _progress(self, peer: Peer, frame: Frame) -> Answer:
        if peer.rank is not None:  # a heartbeat may still tell it after the farewell
            self._samples.heard(peer.rank, **frame.metadata)
        return None

    def _discard(self, peer: Peer, frame: Frame) -> None:
        ranges, reason = to_ranges(frame.metadata["ranges"]), frame.metadata["reason"]
        self._samples.ledger.discard(self._member(peer), ranges, reason)

    def _give_back(self, peer: Peer, frame: Frame) -> Answer:
        self._samples.ledger.give_back(self._member(peer), to_ranges(frame.metadata["ranges"]))
        return DONE

    # ---- key-value store

    def _put(self, key: str, value: bytes) -> None:
        self._keys.values[key] = value
        self._answer(self._waiting.news(topic_of(key)))

    def _wait_for(self, keys: list[str], answer: Later) -> Answer:
        if self._failure is not None:
            raise self._failure
        if any(is_of_the_past(key, self._members.generation) for key in self._keys.missing(keys)):
            raise PacelineError("The membership has changed while a group was being formed.")
        return answer

    def _store_set(self, peer: Peer, frame: Frame) -> Answer:
        self._put(frame.metadata["key"], b"".join(frame.buffers))
        return DONE

    def _store_add(self, peer: Peer, frame: Frame) -> Answer:
        total = self._keys.sum(frame.metadata["key"], frame.metadata["amount"])
        self._put(frame.metadata["key"], str(total).encode())
        return Frame("sum", {"value": total})
