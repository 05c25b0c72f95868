"""Puts one rank together: its lines to the others, its node, its stock of leases, its record."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline import __version__
from paceline.backends.collectives import Collectives
from paceline.backends.mailbox import Mailbox
from paceline.backends.parting import may_go
from paceline.backends.peers import ControlPeers
from paceline.backends.processes import ProcessNode, run_clock
from paceline.backends.replica import Replica
from paceline.backends.task import Task
from paceline.callbacks import Callback, JsonLines
from paceline.control.membership import NEVER_CAME, ON_NOTICE
from paceline.control.messages import to_ranges
from paceline.control.service import CONNECTION_CLOSED
from paceline.control.stock import LeaseStock
from paceline.errors import PacelineError
from paceline.launch.surroundings import Surroundings
from paceline.record import FileRecorder, Recorder
from paceline.run.checkpoint import Checkpoint
from paceline.run.loader import Loader
from paceline.run.metrics import Feed, write_settings
from paceline.strategies.strategy import Strategy
from paceline.versions import versions

log = logging.getLogger("paceline")
WHY_SECONDS = 0.5  # many times the launcher's pause between two looks
LOOK_SECONDS = 0.02  # between two looks of a newcomer at who is here
STATE = "state"  # the message that brings it the state of the run


class Rank:
    """All connections of one rank, made in the order in which they can fail with the clearest message.

    Args:
        surroundings: where this rank is.
        replica: the user's model and optimizer.
        loader: the user's data.
        strategy: to be compared with the other ranks'.
        schedulers: of the learning rate, in words; to be compared too.
        callbacks: the user's; rank 0 tells them how it goes.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        replica: Replica,
        loader: Loader,
        strategy: Strategy,
        schedulers: list[str],
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._control, self._loader, self._strategy = surroundings.control, loader, strategy
        replica.send_as(strategy.code)
        self._told: set[int] = set()
        self._once_lost = False  # somebody, who may be back
        self._unexplained: dict[int, float] = {}
        self._stock: LeaseStock | None = None
        self._parted = False
        now = run_clock(surroundings.origin)
        self._file = FileRecorder(surroundings.folder / "events", surroundings.rank, surroundings.joins)
        self.recorder: Recorder = self._file
        self._feed: Feed | None = None
        self._mailbox = Mailbox(surroundings.rank, surroundings.secret, host=surroundings.host)
        # Before anything is added up: do all ranks mean the same? gloo would abort or return half a sum.
        self._control.hello(self._meant(surroundings, replica, schedulers), self._mailbox.address)
        self._mailbox.connect(self._control.roster)
        self._told |= self._control.lost.keys()  # who joins has not known them
        self._once_lost = surroundings.joins
        self.collectives = Collectives(
            ControlPeers(self._control, self.check_peers),
            surroundings.rank,
            surroundings.world_size,
            replica.parameters.device,
            surroundings.host,
            surroundings.joins,
        )
        if surroundings.rank == 0 and not surroundings.joins:
            info = self._described(surroundings, replica)
            write_settings(surroundings.folder, info)
            self._feed = Feed(self._file, [JsonLines(), *callbacks], info, lambda: self.node.samples_applied)
            self.recorder = self._feed
        self.node = ProcessNode(
            replica,
            self._control,
            self._mailbox,
            self.collectives,
            self.recorder,
            now,
            self.check_peers,
            Task(
                loader.micro_batch,
                loader.samples,
                surroundings.servers,
                strategy.survives,
                strategy.carries,
                self._more_to_come,
            ),
        )

    def _meant(self, surroundings: Surroundings, replica: Replica, schedulers: list[str]) -> dict[str, Any]:
        """What all ranks must mean alike, and what the control plane must know of the strategy."""
        strategy, loader = self._strategy, self._loader
        return {
            "version": __version__,
            "world_size": surroundings.world_size,
            "servers": surroundings.servers,
            "strategy": strategy.name,
            "options": dataclasses.asdict(strategy),
            "survives": strategy.survives,
            "admits": strategy.admits,
            "schedulers": schedulers,
            "parameters": replica.describe(),
            "data": {"samples": loader.samples, "micro_batch": loader.micro_batch, "seed": loader.seed},
        }

    def _described(self, surroundings: Surroundings, replica: Replica) -> dict[str, Any]:
        """The run, for its folder and for callbacks."""
        loader = self._loader
        return {
            "strategy": self._strategy.name,
            "options": dataclasses.asdict(self._strategy),
            "workers": surroundings.workers,
            "servers": surroundings.servers,
            "parameters": replica.parameters.numel(),
            "micro_batch": loader.micro_batch,
            "samples": loader.samples,
            "epochs": loader.epochs,
            "seed": loader.seed,
            "began": surroundings.origin,
            "folder": str(surroundings.folder),
            "versions": versions(),
        }

    def check_peers(self, seconds: float) -> None:
        """If a rank is known to be lost, or becomes known within the time: tell the strategy, or raise if it cannot go
        on without it. Raises as well if nobody can tell this rank any more: then it is lost itself."""
        self._control.check()
        self._control.attention.look()
        if not (seconds or self._control.lost or self._unexplained):
            return  # after nearly every micro-batch
        deadline = time.monotonic() + seconds
        while not self._control.lost.keys() - self._told and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._unexplained:
            self._explain()
        self._told |= {rank for rank, why in self._control.lost.items() if why == NEVER_CAME}
        if not self._control.lost.keys() - self._told:
            return
        node, lost = self.node, dict(self._control.lost)
        alive = [rank for rank in range(node.seats) if rank not in lost]
        lacks = self._strategy.lacks(alive, node.workers, node.servers) if node.rank in alive else "this rank itself"
        if node.servers and (lacks or not node.serves or node.meets):  # else when it has come to the news: see `Heard`
            node.has_no_more_of_the_lost()
        if lacks:
            raise self._cannot_go_on(lacks)
        for rank in sorted(lost.keys() - self._told):
            self._told.add(rank)
            self._once_lost = True
            self._mailbox.lose(rank)
            self._unexplained[rank] = time.monotonic() + WHY_SECONDS

    def _cannot_go_on(self, lacks: str) -> PacelineError:
        deadline = time.monotonic() + WHY_SECONDS
        while CONNECTION_CLOSED in self._control.lost.values() and time.monotonic() < deadline:
            time.sleep(0.02)  # a launcher knows how a process ended a moment after its connection is gone
        named = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(self._control.lost.items()))
        return PacelineError(
            f"The run cannot go on without a lost rank ({named}).",
            where=f"rank {self.node.rank}, after round {self.node.rounds}",
            cause="Probably it failed, was killed, or lost its network; its own log says more. The strategy "
            f"{self._strategy.name} would need {lacks}.",
            remedy="Start again with run.resume() to go on from the last checkpoint.",
        )

    def _explain(self) -> None:
        """Tell the user of losses, when it is known why, or will not be: training does not wait for that."""
        for rank, deadline in list(self._unexplained.items()):
            reason = self._control.lost.get(rank, "")
            if reason != CONNECTION_CLOSED or time.monotonic() > deadline:
                del self._unexplained[rank]
                first = next((each for each in range(self.node.seats) if each not in self._control.lost), -1)
                if self.node.rank == first:  # also while those who are left still agree on who is here
                    self.recorder.write("lost", rank, self.node.now(), reason=reason)
                    if reason == ON_NOTICE:
                        self.node.tell(f"Rank {rank} has left on notice; the run goes on without it.")
                    else:
                        self.node.warn(f"Rank {rank} was lost ({reason}); the run goes on without it.")

    def _more_to_come(self) -> bool:
        """Whether a lost rank has left samples behind that nobody has used yet, and that this rank may get: a server,
        and one whose loop was left, take none."""
        if not self._once_lost or self.node.serves or self._loader.over or self._stock is None:
            return False
        self.node.tell_progress()
        ledger = self._control.status()["ledger"]
        return bool(ledger and ledger["remaining"])

    def start_leasing(self, used: list[list[int]]) -> None:
        """Open the run's ledger, with the spans that a checkpoint had settled, and take the first leases."""
        loader = self._loader
        self._control.open_ledger(loader.samples, loader.epochs, loader.micro_batch, to_ranges(used))
        # Together: who starts early must not compute a huge first round before the others come.
        self.node.meet()
        self.lease()

    def lease(self) -> None:
        """Take leases from now on."""
        loader = self._loader
        self._stock = LeaseStock(self._control)
        loader.start(self._stock.next_range, lambda: self.node.portion)
        self.recorder.write("start", self.node.rank, self.node.now(), pid=os.getpid())

    def rest(self) -> None:
        """Nobody waits for this rank any more."""
        self._control.attention.rest()

    def stop_leasing(self, left_over: list[range]) -> None:
        """No more data here: what was taken and not used goes out again."""
        if self._stock is not None:
            left_over = left_over + self._stock.close()
            self._stock = None
        if left_over:
            self._control.give_back(left_over)

    def settled(self) -> list[range]:
        """The samples that the parameters are the result of, after a round that all ranks have."""
        return self._control.snapshot(self.node.books.progress)

    # ---- newcomers

    def admit(self, number: int, state: Callable[[], Checkpoint]) -> None:
        """All who take part together, between two rounds: let those in who wait. The first of the others gives them
        the state of the run."""
        self.node.bear_witness()
        self.collectives.meet_to_admit()
        newcomers, generation = self._control.admit(number)
        while self._control.generation < generation:
            self.check_peers(0.01)
        self.node.make_room(len(self._control.roster))
        self.node.welcome(newcomers, self._control.status()["progress"])
        for newcomer in newcomers:
            self._told.discard(newcomer)
            self._unexplained.pop(newcomer, None)
            self._mailbox.welcome(newcomer, self._control.roster)
        givers = [rank for rank in self.collectives.ranks if rank not in {*newcomers, *self._control.lost}]
        if newcomers and self.node.rank == givers[0]:
            self.give_state(newcomers, state())
        self.collectives.go_on_with(generation)

    def give_state(self, newcomers: Sequence[int], state: Checkpoint) -> None:
        """To those who were let in; with it they take part in whatever is started from now on."""
        state.values["started"] = self.collectives.started
        body = torch.frombuffer(bytearray(state.to_bytes()), dtype=torch.uint8)
        for newcomer in newcomers:
            self.node.send(newcomer, STATE, body)
            self.node.tell(f"Rank {newcomer} takes part from round {self.node.rounds} on.")

    def enter(self) -> Checkpoint:
        """A newcomer waits until the others let it in; the state of the run. Whoever of them is lost before that may be
        the one who was to give it, and then the others must not wait for this rank."""
        state = self._mailbox.receive()
        while not state.wait(LOOK_SECONDS) or not self._control.takes_part:
            self._control.check()
            generation, lost, left, seats = self._control.membership
            over = len(lost | left) == seats
            if over or (self._control.takes_part and generation != self._control.admitted_in):
                raise PacelineError(
                    f"Rank {self.node.rank} could not join the run.",
                    cause="It was over, or another rank was lost in the middle of it.",
                    remedy="Let it join again; `paceline run --replace` does so.",
                )
        self._mailbox.connect(self._control.roster)  # others may have come with this one
        return Checkpoint.from_bytes(bytes(state.result().tensors[0].numpy()))

    def may_go(self, first: int) -> bool:
        """Whether nothing of this rank can be missed, which was told to leave before the round `first`."""
        self.node.tell_progress()
        bids_farewell = self.node.servers > 0 and self.node.meets
        return may_go(first, self.node.last_round, bids_farewell, self._control.held())

    def part(self) -> bool:
        """Go before the end, with nothing left to do here; whether nobody is left."""
        self.collectives.abandon()
        self._parted = True
        return self._control.leave(ON_NOTICE)

    def close(self, error: str) -> None:
        """Leave the run; `error` tells the others why, if there is a why."""
        while self._unexplained:
            self._explain()
            time.sleep(0.02 if self._unexplained else 0.0)
        self.recorder.write("end", self.node.rank, self.node.now())
        self._file.close()
        if self._feed is not None:
            self._feed.close(error)
        self._mailbox.close()
        if self._parted:
            return
        if error:
            self.collectives.abandon()
        try:
            if not error:
                self._control.report_progress(self.node.books.progress, now=True)  # all have met: nobody lacks a round
                self.stop_leasing(self._loader.left_over())
            self._control.leave(error)
        except PacelineError as trouble:  # the run is over for this rank: nothing is lost by a farewell unheard
            log.warning("Rank %d could not say farewell: %s", self.node.rank, trouble)
