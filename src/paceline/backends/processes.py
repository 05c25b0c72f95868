"""The processes backend: one rank of a real run, on torch.distributed, a mailbox and the control plane."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.backends.collectives import Collectives, CollectiveWork
from paceline.backends.driver import NAMING_SECONDS, WaitableWork
from paceline.backends.flat import FlatSum
from paceline.backends.learning_node import LearningNode, Task
from paceline.backends.mailbox import Mailbox, Received
from paceline.backends.meeting import Meeting
from paceline.backends.movement import Movement
from paceline.backends.replica import Replica
from paceline.backends.rounds import FLAGS, RoundTotal, extra_of, settled_by_others
from paceline.backends.thread_work import ThreadWork
from paceline.control.client import ControlClient
from paceline.errors import PacelineError
from paceline.node import LOST, WHOLE, Gradient, Message, Share, Work
from paceline.record import Recorder

FIRST_MEETING = 2**60  # rounds that ranks are called to have signals too, and no strategy's own rounds come so far


class Heard(WaitableWork[Message]):
    """A message, and what is to be done when the strategy has come to one that a rank is lost."""

    def __init__(self, received: Received, of_a_loss: Callable[[], None]) -> None:
        self._received, self._of_a_loss = received, of_a_loss

    @property
    def done(self) -> bool:
        return self._received.done

    def wait(self, seconds: float | None = None) -> bool:
        return self._received.wait(seconds)

    def result(self) -> Message:
        message = self._received.result()
        if message.kind == LOST:
            self._of_a_loss()
        return message


class ProcessNode(LearningNode):
    """One rank of a real run.

    Args:
        replica: the user's model and optimizer.
        control: the rank's line to the control plane.
        mailbox: messages between ranks.
        collectives: the process group.
        recorder: where the events go.
        now: seconds since the run began.
        check_peers: raises when a peer is known to be lost.
        task: what the run is about.
    """

    def __init__(
        self,
        replica: Replica,
        control: ControlClient,
        mailbox: Mailbox,
        collectives: Collectives,
        recorder: Recorder,
        now: Callable[[], float],
        check_peers: Callable[[float], None],
        task: Task,
    ) -> None:
        super().__init__(replica, control, recorder, now, (collectives.rank, len(collectives.ranks)), task)
        self._mailbox, self._collectives, self._check_peers = mailbox, collectives, check_peers
        self.save_wanted = self.scheduler_called = False
        self._started_rounds = 0
        self._in_flight: list[WaitableWork[Any]] = []

    # ---- communication

    def all_reduce(self, gradient: Gradient, note: float = 0.0) -> Work[Gradient]:
        return self._start_round(gradient, gradient.count, note)

    def mean_model(self, share: Share = WHOLE) -> Work[Gradient]:
        if not self._task.survives:
            return self._start_round(Gradient(self.replica.share(share), share.models), None, 0.0)
        self.suspended()
        self.meets = True
        number, extra, alone = self._beside([], True, 0.0)
        self._recorder.write("join", self.rank, self._now(), round=number, samples=0, bytes=self.parameters.nbytes)

        def launch() -> CollectiveWork[Gradient]:
            if self._control.lost:  # what was handed in is used by now, or lost with a server
                self.has_no_more_of_the_lost()
            working = not self.out_of_data or self._task.more_to_come()
            own = Gradient(self.replica.share(share), share.models)
            lost = self.books.settled_since(self.answers_for & self._control.lost.keys())
            told = settled_by_others(extra, self.world_size, lost)
            contribution, _ = self.replica.contribution(own, working, told)
            assert isinstance(contribution, FlatSum)
            then = self._total_of(contribution, number, None, alone)
            return self._collectives.add_up(contribution.whole, lambda _: then(), "The mean of models")

        return self._fly(Meeting(launch, self._collectives, self._control, self._check_peers, number))

    def _start_round(self, gradient: Gradient, own: int | None, note: float) -> Work[Gradient]:
        self.suspended()  # what is done after a round may be a collective too: on all ranks before the next one
        round_number, extra, alone = self._beside(gradient.samples, own is None, note)
        contribution, sound = self.replica.contribution(gradient, not self.out_of_data, extra)
        if not sound and own is not None:
            self._drop_non_finite(own, gradient.samples, round_number)
            own = 0
        sent, self._sent = contribution.nbytes + self._sent, 0
        self._recorder.write("join", self.rank, self._now(), round=round_number, samples=own or 0, bytes=sent)

        then = self._total_of(contribution, round_number, own, alone)
        work = self._start(contribution, then, round_number)
        work.round_number = round_number
        return self._fly(work)

    def _start(
        self, contribution: FlatSum | Movement, then: Callable[[], Gradient], round_number: int
    ) -> CollectiveWork[Gradient] | ThreadWork[Gradient]:
        if isinstance(contribution, FlatSum):
            name = f"The all-reduce of round {round_number}"
            if contribution.codes is not None:
                return self._collectives.add_up_rounded(contribution, then, name)
            return self._collectives.add_up(contribution.whole, lambda _: then(), name)

        def merged() -> Gradient:
            self._sent += work.nbytes - contribution.nbytes  # what others alone have moved has travelled too
            return then()

        work = self._collectives.merge(contribution, merged, f"The merge of round {round_number}")
        return work

    def _beside(self, samples: list[range], of_models: bool, note: float) -> tuple[int, list[float], int]:
        """The next round's number; what this rank sends along beside the sums; and how much of it was known here."""
        round_number = self._started_rounds
        self._started_rounds += 1
        settled, alone, dropped = self.books.contribute(sum(map(len, samples)), of_models)
        extra = extra_of(self.rank, self.world_size, (settled, dropped, note))
        extra[:FLAGS] = [float(self.save_wanted), float(self.scheduler_called)]
        self.save_wanted = self.scheduler_called = False
        return round_number, extra, alone

    def _total_of(
        self, contribution: FlatSum | Movement, round_number: int, own: int | None, alone: int
    ) -> Callable[[], Gradient]:
        def as_total() -> Gradient:
            together, working, sums = self.replica.total(contribution)
            total = RoundTotal(together, round_number, own, working, sums)
            if not self.serves:
                total.settled[self.rank] -= alone  # news to the others, and counted here before
            return total

        return as_total

    def all_gather(self, value: float) -> Work[tuple[float, ...]]:
        self.suspended()
        row = torch.zeros(self.world_size, dtype=torch.float64, device=self._collectives.device)
        row[self.rank] = value
        return self._fly(self._collectives.add_up(row, lambda full: tuple(full.tolist()), "The gathering of numbers"))

    @property
    def called_together(self) -> bool:
        meeting = FIRST_MEETING + self._started_rounds
        if self.save_wanted or self.scheduler_called:
            self._control.signal(meeting)
        return self._control.signalled(meeting)

    def send(self, to: int, kind: str, *tensors: Tensor) -> None:
        self._sent += sum(tensor.nbytes for tensor in tensors)
        try:
            self._mailbox.send(to, kind, tensors)
        except PacelineError:
            if not self._task.survives:
                raise
            self._check_peers(NAMING_SECONDS)
            if to not in self._control.lost:  # who is lost needs no message, and the strategy will hear of it
                raise

    def receive(self) -> Work[Message]:
        return Heard(self._mailbox.receive(), self.has_no_more_of_the_lost)

    def has_no_more_of_the_lost(self) -> None:
        """From now on this rank uses nothing of lost ranks that it has not used yet: others can have it."""
        self._control.report_progress(self.books.progress, now=True)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of those that are here."""
        return self.rank == self._collectives.ranks[0]

    def signal(self, round_number: int) -> None:
        self._control.signal(round_number)

    def signalled(self, round_number: int) -> bool:
        return self._control.signalled(round_number)

    def count(self, round_number: int, samples: int, target: int) -> None:
        self._control.count(round_number, samples, target)

    # ---- for the driver

    def _fly(self, work: WaitableWork[Any]) -> WaitableWork[Any]:
        self._in_flight = [each for each in self._in_flight if not each.done]
        self._in_flight.append(work)
        return work

    def await_any(self, seconds: float) -> None:
        self._in_flight = [each for each in self._in_flight if not each.done]
        if self._in_flight:
            self._in_flight[0].wait(seconds)
        else:
            time.sleep(min(seconds, 0.001))  # nothing to wait for, and nothing to compute: do not take the core
        self.look_around()

    def look_around(self) -> None:
        self._check_peers(0.0)

    def waited(self, work: Work[object], began: float) -> None:
        if isinstance(work, CollectiveWork | ThreadWork) and work.round_number is not None:
            self._recorder.write("wait", self.rank, began, end=self._now(), round=work.round_number)

    def sum_now(self, tensor: Tensor) -> Tensor:
        """Add a tensor over all ranks and wait for it. Only where all ranks do the same: between rounds."""
        work = self._collectives.add_up(tensor, lambda added: added, "The averaging of running statistics")
        work.wait()
        return work.result()


def run_clock(origin: float) -> Callable[[], float]:
    """Seconds since `origin` (a `time.time()`): the same on all processes of a machine, and never going back."""
    offset = time.time() - time.perf_counter() - origin
    return lambda: time.perf_counter() + offset
