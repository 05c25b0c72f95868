"""The processes backend: one rank of a real run, on torch.distributed, a mailbox and the control plane."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import nan
from typing import Any

import torch
from torch import Tensor

from paceline.backends.collectives import Collectives, CollectiveWork
from paceline.backends.driver import NAMING_SECONDS, WaitableWork
from paceline.backends.flat import Brought, FlatSum
from paceline.backends.lane import Care
from paceline.backends.learning_node import LearningNode
from paceline.backends.mailbox import Mailbox, Received
from paceline.backends.merge_work import MergeWork
from paceline.backends.movement import Movement
from paceline.backends.replica import Replica
from paceline.backends.rounds import FLAGS, RoundTotal, extra_of, settled_by_others
from paceline.backends.task import Task
from paceline.control.client import ControlClient
from paceline.errors import PacelineError
from paceline.node import FOUND, LOST, WHOLE, Gradient, Message, Share, Work
from paceline.record import Recorder

HELD_UP_SECONDS = 1.0  # before anybody looks whether a collective is held up: most take less
FIRST_MEETING = 2**60  # rounds that ranks are called to have signals too, and no strategy's own rounds come so far


class Heard(WaitableWork[Message]):
    """A message, and what is to be done when the strategy has come to it: `of_a_loss` gets a rank that was lost, and
    says whether it still is.
    `settled` gets the sender, and the samples that it had settled when it sent the message, if messages say so."""

    def __init__(
        self, received: Received, of_a_loss: Callable[[int], bool], settled: Callable[[int, int], None] | None
    ) -> None:
        self._received, self._of_a_loss, self._settled = received, of_a_loss, settled

    @property
    def done(self) -> bool:
        return self._received.done

    def wait(self, seconds: float | None = None) -> bool:
        return self._received.wait(seconds)

    def result(self) -> Message:
        message = self._received.result()
        if message.kind == LOST:
            return message if self._of_a_loss(message.sender) else Message(message.sender, FOUND, ())
        if self._settled is not None:
            *tensors, settled = message.tensors
            self._settled(message.sender, int(settled))
            return Message(message.sender, message.kind, tensors)
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
        collectives.on_mended = self._mended
        self.save_wanted = self.scheduler_called = False
        self.on_looking_around: Callable[[], None] = lambda: None
        """Called whenever this rank looks around; it may end the wait by raising."""
        self.rounds_started = 0
        self._in_flight: list[WaitableWork[Any]] = []
        self._flown_at = 0.0

    # ---- communication

    def all_reduce(self, gradient: Gradient, note: float = 0.0) -> Work[Gradient]:
        return self._start_round(gradient, gradient.count, note)

    def mean_model(self, share: Share = WHOLE) -> Work[Gradient]:
        self.suspended()
        self.meets = True
        number, extra, alone = self._beside([], True, 0.0)
        nbytes, self._sent = self.parameters.nbytes + self._sent, 0
        self._recorder.write("join", self.rank, self._now(), round=number, samples=0, bytes=nbytes)
        brought: list[FlatSum] = []

        def bring() -> Tensor:
            """Each time anew: what a lost rank has left behind is told by whoever knows of it."""
            if self._control.lost and self.servers:  # what was handed in is used by now, or lost with a server
                self.has_no_more_of_the_lost()
            own = Gradient(self.replica.share(share), share.models)
            lost = self.books.settled_since(self.answers_for & self._control.lost.keys())
            told = settled_by_others(extra, self.seats, lost)
            contribution, _ = self.replica.contribution(own, self._works, told)
            assert isinstance(contribution, FlatSum)
            contribution.held = True
            brought[:] = [contribution]
            return contribution.whole

        def let_go() -> None:
            brought[0].held = False
            if brought[0].given_back:
                self.replica.give_back(brought[0])

        def then() -> Gradient:
            return self._total_of(brought[0], number, None, alone)

        return self._fly(
            self._collectives.add_up(bring(), then, "The mean of models", Care(bring, let_go=let_go), number)
        )

    @property
    def _works(self) -> bool:
        """Whether there is more to learn from, here or from what a lost rank has left behind."""
        return not self.out_of_data or self._task.more_to_come()

    def _start_round(self, gradient: Gradient, own: int | None, note: float) -> Work[Gradient]:
        self.suspended()  # what is done after a round may be a collective too: on all ranks before the next one
        round_number, extra, alone = self._beside(gradient.samples, own is None, note)
        contribution, sound = self.replica.contribution(gradient, self._works, extra)
        if not sound and own is not None:
            self._drop_non_finite(own, gradient.samples, round_number)
            own = 0
        sent, self._sent = contribution.nbytes + self._sent, 0
        self._recorder.write("join", self.rank, self._now(), round=round_number, samples=own or 0, bytes=sent)
        return self._fly(self._start(contribution, round_number, own, alone))

    def _start(
        self, contribution: FlatSum | Movement, round_number: int, own: int | None, alone: int
    ) -> CollectiveWork[Gradient] | MergeWork[Gradient]:
        if isinstance(contribution, FlatSum):
            others = len(self._collectives.ranks) > 1
            brought = Brought(contribution, self.replica, others, lambda: self._works)

            def added_up() -> Gradient:
                return self._total_of(brought.flat, round_number, own, alone)

            name = f"The all-reduce of round {round_number}"
            if contribution.codes is not None:
                return self._collectives.add_up_rounded(brought, added_up, name, round_number)
            care = Care(brought.again, brought.is_there, brought.let_go)
            return self._collectives.add_up(contribution.whole, added_up, name, care, round_number)

        def merged() -> Gradient:
            self._sent += work.nbytes - contribution.nbytes  # what others alone have moved has travelled too
            return self._total_of(contribution, round_number, own, alone)

        contribution.works = lambda: self._works
        work = self._collectives.merge(contribution, merged, f"The merge of round {round_number}", round_number)
        return work

    def _beside(self, samples: list[range], of_models: bool, note: float) -> tuple[int, list[float], int]:
        """The next round's number; what this rank sends along beside the sums; and how much of it was known here."""
        round_number = self.rounds_started
        self.rounds_started += 1
        settled, alone, dropped = self.books.contribute(sum(map(len, samples)), of_models)
        extra = extra_of(self.rank, self.seats, (settled, dropped, note))
        extra[:FLAGS] = map(float, (self.save_wanted, self.scheduler_called, bool(self._control.joining)))
        self.save_wanted = self.scheduler_called = False
        return round_number, extra, alone

    def _total_of(self, contribution: FlatSum | Movement, round_number: int, own: int | None, alone: int) -> Gradient:
        together, working, sums = self.replica.total(contribution)
        total = RoundTotal(together, round_number, own, working, sums)
        if not self.serves:
            total.settled[self.rank] -= alone  # news to the others, and counted here before
        return total

    def all_gather(self, *numbers: float) -> Work[tuple[tuple[float, ...], ...]]:
        self.suspended()
        rows = torch.zeros(1 + len(numbers), self.seats, dtype=torch.float64, device=self._collectives.device)
        rows[:, self.rank] = torch.tensor([1.0, *numbers])  # who is lost has said nothing: its number is none
        kept = rows.clone()

        def gathered() -> tuple[tuple[float, ...], ...]:
            said, *found = work.flight.tensor.tolist()
            return tuple(tuple(each if there else nan for each, there in zip(row, said, strict=True)) for row in found)

        work = self._collectives.add_up(rows, gathered, "The gathering of numbers", Care(kept.clone))
        return self._fly(work)

    @property
    def called_together(self) -> bool:
        meeting = FIRST_MEETING + self.rounds_started
        if self.save_wanted or self.scheduler_called or self._control.joining:
            self._control.signal(meeting)
        return self._control.signalled(meeting)

    def send(self, to: int, kind: str, *tensors: Tensor) -> None:
        if to in self._control.lost and self._task.survives:
            return
        self._sent += sum(tensor.nbytes for tensor in tensors)
        if not self.servers:  # if this rank is lost, those who have its model know what is in it
            tensors = (*tensors, torch.tensor(self.books.progress[self.rank]))
        try:
            self._mailbox.send(to, kind, tensors)
        except PacelineError:
            if not self._task.survives:
                raise
            self._check_peers(NAMING_SECONDS)
            if to not in self._control.lost:  # who is lost needs no message, and the strategy will hear of it
                raise

    def receive(self) -> Work[Message]:
        if self.servers:
            return Heard(self._mailbox.receive(), self.has_no_more_of_the_lost, None)
        self.listens = True
        return Heard(self._mailbox.receive(), self.heard_of_loss, self.books.hear)

    def has_no_more_of_the_lost(self, rank: int | None = None) -> bool:
        """From now on this rank uses nothing of lost ranks that it has not used yet: others can have it. Whether this
        one is still lost."""
        self._control.report_progress(self.books.progress, now=True)
        return rank in self._control.lost

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
        self._flown_at = time.monotonic()
        return work

    def await_any(self, seconds: float) -> None:
        self._in_flight = [each for each in self._in_flight if not each.done]
        if self._in_flight:
            self._in_flight[0].wait(seconds)
        else:
            time.sleep(min(seconds, 0.001))  # nothing to wait for, and nothing to compute: do not take the core
        self.look_around(waits=True)

    def look_around(self, waits: bool = False) -> None:
        self._collectives.look_around()
        self._control.attention.wait((waits and not self.serves) or self._is_held_up)
        self.on_looking_around()

    @property
    def _is_held_up(self) -> bool:
        """Whether a collective waits for somebody, also while this rank goes on computing. A server waits for messages
        all the time, and for nobody."""
        return time.monotonic() - self._flown_at > HELD_UP_SECONDS and any(not each.done for each in self._in_flight)

    def _mended(self, generation: int) -> None:
        """Those who are left have agreed on what counts: in what they hold is all that they get of the lost ones."""
        if not self.servers:
            self.witness(max(self._collectives.held_rounds, default=-1), generation)

    def take_over(self, course: dict[str, Any]) -> None:
        super().take_over(course)
        self.rounds_started = self.last_round + 1  # nothing is in flight when newcomers are let in

    def waited(self, work: Work[object], began: float) -> None:
        if isinstance(work, CollectiveWork | MergeWork) and work.round_number is not None:
            self._recorder.write("wait", self.rank, began, end=self._now(), round=work.round_number)

    def sum_now(self, tensor: Tensor) -> Tensor:
        """Add a tensor over all ranks and wait for it. Only where all ranks do the same: between rounds."""
        return self._collectives.sum_now(tensor, "The averaging of running statistics")

    def meet(self) -> None:
        """Wait until all ranks are here, and have whatever counts until now."""
        self._collectives.sum_now(torch.zeros(1, device=self._collectives.device), "The meeting of all ranks")


def run_clock(origin: float) -> Callable[[], float]:
    """Seconds since `origin` (a `time.time()`): the same on all processes of a machine, and never going back."""
    offset = time.time() - time.perf_counter() - origin
    return lambda: time.perf_counter() + offset
