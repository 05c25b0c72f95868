"""A control service that can die: it notes in a journal what it is told, and begins again from it.

After a restart its ranks are known and absent. Each connects again, says `return`, and repeats whatever was not
answered; what the journal shows to have taken effect is answered from memory and not done twice, so that no sample is
handed out or counted twice. Who does not return within the heartbeat time-out is lost, in the usual way.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from paceline.control.connection import Connection
from paceline.control.journal import STATE, Entry, Journal
from paceline.control.messages import Metadata
from paceline.control.service import Answer, ControlService, Peer
from paceline.control.waiting import Later
from paceline.control.wire import Frame
from paceline.errors import PacelineError

JOURNALLED = frozenset(
    {"hello", "open_ledger", "lease", "progress", "discard", "give_back", "signal", "leave", "admit", "enlist"}
    | {"store_set", "store_add", "store_delete"}
)
"""What changes the state. Heartbeats and questions do not; a `snapshot` settles what `progress` tells, too; and that a
launcher has seen an exit is noted when the rank is lost by it, after all that the rank had sent."""
LOST = "lost"
"""In the journal, not on the wire: the service itself found that a rank is lost."""
REMEMBERED = 64  # answers a rank; it waits for a handful at a time
RETURN_SECONDS = 20.0  # a restart takes one; and questions wait 30 s for their answer


class Nobody(Connection):
    """The connection of a rank that has not returned yet."""

    def __init__(self) -> None:
        self.peer = "nobody"

    def send_encoded(self, frame: Any) -> None:
        pass

    def stop_receiving(self) -> None:
        pass


class DurableService(ControlService):
    """A `ControlService` with a journal.

    Args:
        world_size, secret: see `ControlService`.
        journal: the file; if there is one already, the service goes on from it.
        return_timeout: seconds that ranks look for a service that has died; then they stop.
        options: see `ControlService`.
    """

    def __init__(
        self, world_size: int, secret: bytes, journal: Path, *, return_timeout: float = RETURN_SECONDS, **options: Any
    ) -> None:
        self._journal = Journal(journal)
        self._return_timeout = return_timeout
        self._speaking: tuple[Peer, int | None, int] | None = None
        self._through: dict[int, int] = {}
        self._answers: dict[int, OrderedDict[int, Frame]] = {}
        self._settled_by: dict[int | None, Metadata] = {}
        self._returned: dict[Peer, int] = {}
        super().__init__(world_size, secret, **options)

    def close(self) -> None:
        super().close()
        with self._lock:  # threads of peers that have just ended may still note it
            self._journal.close()

    # ---- beginning again

    def _recover(self) -> None:
        self._handlers["return"] = self._return
        entries, self._journal.entries = self._journal.entries, []
        ranks: dict[int, Peer] = {}
        for entry in entries:
            self._play(entry, ranks)
        self._outgoing.clear()
        self._terms |= {"incarnation": time.time_ns() // 1000, "return_seconds": self._return_timeout}

    def _play(self, entry: Entry, ranks: dict[int, Peer]) -> None:
        if entry.frame.kind == STATE:
            self._restore(entry.frame.metadata[STATE])
            ranks |= self._peers
            return
        peer = ranks.get(-1 if entry.rank is None else entry.rank) or Peer(Nobody())
        if entry.frame.kind == LOST:
            self._peers.pop(entry.frame.metadata["rank"], None)
            super()._lose(**entry.frame.metadata)
            return
        self._apply(peer, entry.frame)
        if peer.rank is not None:
            ranks[peer.rank] = peer

    def _whole_state(self) -> dict[str, Any]:
        remembered = {
            str(rank): [[sequence, answer.kind, answer.metadata] for sequence, answer in answers.items()]
            for rank, answers in self._answers.items()
        }
        return {
            "members": self._members.state(),
            "samples": self._samples.state(),
            "signals": self._signals.state(),
            "keys": {key: value.hex() for key, value in self._keys.values.items()},
            "through": {str(rank): sequence for rank, sequence in self._through.items()},
            "answers": remembered,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self._members.restore(state["members"], time.monotonic())
        self._peers = {rank: Peer(Nobody(), rank) for rank in self._members.present}
        self._samples.restore(state["samples"])
        self._signals.restore(state["signals"])
        self._keys.values = {key: bytes.fromhex(value) for key, value in state["keys"].items()}
        self._through = {int(rank): sequence for rank, sequence in state["through"].items()}
        self._answers = {
            int(rank): OrderedDict((sequence, Frame(kind, metadata)) for sequence, kind, metadata in answers)
            for rank, answers in state["answers"].items()
        }

    # ---- what is noted

    def _handle(self, peer: Peer, frame: Frame) -> None:
        if frame.kind not in JOURNALLED:
            super()._handle(peer, frame)
            return
        if self._is_repeated(peer, frame):
            return
        if frame.kind == "hello" and peer not in self._returned:  # a new process counts its messages anew
            self._through.pop(frame.metadata["rank"], None)
            self._answers.pop(frame.metadata["rank"], None)
        if frame.kind == "progress" and self._settled_by.get(peer.rank) == frame.metadata:
            super()._handle(peer, frame)  # every heartbeat tells it, and it has no effect a second time
            return
        self._journal.note(peer.rank, frame, self._whole_state)
        self._apply(peer, frame)

    def _apply(self, peer: Peer, frame: Frame) -> None:
        """Let it take effect, and remember the answer: the same when it is played from the journal."""
        rank = peer.rank
        self._speaking, self._settled_by[rank] = (peer, rank, frame.sequence), frame.metadata
        try:
            super()._handle(peer, frame)
        finally:
            self._speaking = None
            rank = peer.rank if rank is None else rank  # a hello has just told it, a farewell takes it away
            if rank is not None and frame.sequence:
                self._through[rank] = frame.sequence

    def _send(self, peer: Peer, frame: Frame, sequence: int = 0) -> None:
        speaker, rank, asked = self._speaking or (None, None, 0)
        if peer is speaker and frame.kind == "error":
            self._settled_by.pop(rank, None)  # refused: told again, it may be true by then
        if peer is speaker and rank is not None and sequence == asked != 0:
            answers = self._answers.setdefault(rank, OrderedDict())
            answers[sequence] = frame
            while len(answers) > REMEMBERED:
                answers.popitem(last=False)
        super()._send(peer, frame, sequence)

    def _lose(self, rank: int, reason: str) -> None:
        if self._speaking is None:
            self._journal.note(None, Frame(LOST, {"rank": rank, "reason": reason}), self._whole_state)
        super()._lose(rank, reason)

    # ---- who returns, and who does not

    def _return(self, peer: Peer, frame: Frame) -> Answer:
        rank = frame.metadata["rank"]
        absent = self._peers.get(rank)
        if absent is not None and isinstance(absent.connection, Nobody):
            peer.rank = rank
            self._peers[rank] = peer
            self._members.heard(rank, time.monotonic())
        elif absent is not None or rank in self._members.lost:
            raise PacelineError(f"Rank {rank} was taken for dead while the control service was away.")
        self._returned[peer] = rank
        if self._members.begun:
            self._send(peer, Frame("membership", self._membership()))
        return Frame("returned", {"rounds": self._signals.rounds})

    def _is_repeated(self, peer: Peer, frame: Frame) -> bool:
        """Whether it took effect before the service died; then it is answered as it was, or would have been."""
        rank = self._returned.get(peer)
        if rank is None or not 0 < frame.sequence <= self._through.get(rank, 0):
            return False
        answer = self._answers[rank].get(frame.sequence) if rank in self._answers else None
        if frame.kind == "hello":
            later = Later(self._welcome, self._join_timeout, self._nobody_came)
            self._answer(self._waiting.ask(peer, frame.sequence, later, time.monotonic()))
        elif answer is not None:
            super()._send(peer, answer, frame.sequence)
        return True

    def _end(self, peer: Peer, reason: str) -> None:
        super()._end(peer, reason)
        if isinstance(peer.connection, Nobody):  # no thread reads it, and would find its end
            self._ended(peer)

    def _ended(self, peer: Peer) -> None:
        self._returned.pop(peer, None)
        super()._ended(peer)
