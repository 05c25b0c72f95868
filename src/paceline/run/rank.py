"""Puts one rank together: its lines to the others, its node, its stock of leases, its record."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from paceline import __version__
from paceline.backends.collectives import Collectives
from paceline.backends.learning_node import Task
from paceline.backends.mailbox import Mailbox
from paceline.backends.processes import ProcessNode, run_clock
from paceline.backends.replica import Replica
from paceline.callbacks import Callback, JsonLines
from paceline.control.keys import GENERATION
from paceline.control.messages import to_ranges
from paceline.control.service import CONNECTION_CLOSED
from paceline.control.stock import LeaseStock
from paceline.control.store import ControlStore
from paceline.errors import PacelineError
from paceline.launch.surroundings import Surroundings
from paceline.node import LOST, Message
from paceline.record import FileRecorder, Recorder
from paceline.run.loader import Loader
from paceline.run.metrics import Feed, write_settings
from paceline.strategies.strategy import Strategy
from paceline.versions import versions

log = logging.getLogger("paceline")
WHY_SECONDS = 0.5  # many times the launcher's pause between two looks


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
        replica.send_as(strategy.code, surroundings.world_size)
        self._told: set[int] = set()
        self._stock: LeaseStock | None = None
        now = run_clock(surroundings.origin)
        self._file = FileRecorder(surroundings.folder / "events", surroundings.rank)
        self.recorder: Recorder = self._file
        self._feed: Feed | None = None
        self._mailbox = Mailbox(surroundings.rank, surroundings.secret, host=surroundings.host)
        # Before anything is added up: do all ranks mean the same? gloo would abort or return half a sum.
        self._control.hello(
            {
                "version": __version__,
                "world_size": surroundings.world_size,
                "servers": surroundings.servers,
                "strategy": strategy.name,
                "options": dataclasses.asdict(strategy),
                "survives": strategy.survives,
                "schedulers": schedulers,
                "parameters": replica.describe(),
                "data": {"samples": loader.samples, "micro_batch": loader.micro_batch, "seed": loader.seed},
            },
            self._mailbox.address,
        )
        self._mailbox.connect(self._control.roster)
        self._store = ControlStore(self._control)  # torch keeps only its C++ half alive
        self.collectives = Collectives(
            lambda generation: PrefixStore(f"{GENERATION}{generation}", self._store),
            surroundings.rank,
            range(surroundings.world_size),
            self._control.generation,
            replica.parameters.device,
            surroundings.host,
            self.check_peers,
        )
        if surroundings.rank == 0:
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
            Task(loader.micro_batch, loader.samples, surroundings.servers, strategy.survives, self._more_to_come),
        )

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
        on without it."""
        deadline = time.monotonic() + seconds
        while not self._control.lost.keys() - self._told and time.monotonic() < deadline:
            time.sleep(0.02)
        if not self._control.lost.keys() - self._told:
            return
        self._hear_why()
        node, lost = self.node, dict(self._control.lost)
        alive = [rank for rank in range(node.world_size) if rank not in lost]
        lacks = self._strategy.lacks(alive, node.workers, node.servers)
        if lacks or not node.serves or node.meets:  # else when it has come to the news: see ProcessNode.receive
            node.has_no_more_of_the_lost()
        if lacks:
            named = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(lost.items()))
            raise PacelineError(
                f"The run cannot go on without a lost rank ({named}).",
                where=f"rank {node.rank}, after round {node.rounds}",
                cause="Probably it failed, was killed, or lost its network; its own log says more. The strategy "
                f"{self._strategy.name} would need {lacks}.",
                remedy="Start again with run.resume() to go on from the last checkpoint.",
            )
        for rank in sorted(lost.keys() - self._told):
            self._told.add(rank)
            self._mailbox.tell(Message(rank, LOST, ()))
            if node.rank == alive[0]:
                node.warn(f"Rank {rank} was lost ({lost[rank]}); the run goes on without it.")

    def _more_to_come(self) -> bool:
        """Whether a lost rank has left samples behind that nobody has used yet."""
        if not self._told or self._loader.over:
            return False
        ledger = self._control.status()["ledger"]
        return bool(ledger and ledger["remaining"])

    def _hear_why(self) -> None:
        """A launcher knows how a process ended a moment after its connection is gone."""
        deadline = time.monotonic() + WHY_SECONDS
        while CONNECTION_CLOSED in self._control.lost.values() and time.monotonic() < deadline:
            time.sleep(0.02)

    def start_leasing(self, used: list[list[int]]) -> None:
        """Open the run's ledger, with the spans that a checkpoint had settled, and take the first leases."""
        loader = self._loader
        self._control.open_ledger(loader.samples, loader.epochs, loader.micro_batch, to_ranges(used))
        # Together: who starts early must not compute a huge first round before the others come.
        self.node.sum_now(torch.zeros(1, device=self.collectives.device))
        self._stock = LeaseStock(self._control)
        loader.start(self._stock.next_range, lambda: self.node.portion)
        self.recorder.write("start", self.node.rank, self.node.now(), pid=os.getpid())

    def stop_leasing(self, left_over: list[range]) -> None:
        """No more data here: what was taken and not used goes out again."""
        if self._stock is not None:
            left_over = left_over + self._stock.close()
            self._stock = None
        if left_over:
            self._control.give_back(left_over)

    def settled_at_the_end(self) -> list[range]:
        """The samples that the final parameters are the result of."""
        return self._control.snapshot(self.node.books.progress)

    def close(self, error: str) -> None:
        """Leave the run; `error` tells the others why, if there is a why."""
        self.recorder.write("end", self.node.rank, self.node.now())
        self._file.close()
        if self._feed is not None:
            self._feed.close(error)
        self._mailbox.close()
        if error:
            self.collectives.abandon()
        try:
            if not error:
                self._control.report_progress(self.node.books.progress, now=True)
                self.stop_leasing(self._loader.left_over())
            self._control.leave(error)
        except PacelineError as trouble:  # the run is over for this rank: nothing is lost by a farewell unheard
            log.warning("Rank %d could not say farewell: %s", self.node.rank, trouble)
