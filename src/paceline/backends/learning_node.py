"""A rank of a real run, as far as it learns: its model, its steps, and what becomes of its samples."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from torch import Tensor

from paceline.backends.books import Books
from paceline.backends.device import Device
from paceline.backends.driver import DrivenNode
from paceline.backends.replica import Replica
from paceline.backends.rounds import RoundNews, RoundTotal, extra_numbers
from paceline.backends.task import Task
from paceline.backends.watch import NOISE_EVERY, Watch
from paceline.control.client import ControlClient
from paceline.node import GIVEN_UP, Gradient
from paceline.record import Recorder
from paceline.rules.learning_rate import AS_SET, Steps, StepScale
from paceline.rules.speed import Speedometer

log = logging.getLogger("paceline")


class LearningNode(DrivenNode):
    """A rank's model, its steps, and what becomes of its samples.

    Args:
        replica: the user's model and optimizer.
        control: the rank's line to the control plane.
        recorder: where the events go.
        now: seconds since the run began.
        place: this rank, and how many there are.
        task: what the run is about.
    """

    def __init__(
        self,
        replica: Replica,
        control: ControlClient,
        recorder: Recorder,
        now: Callable[[], float],
        place: tuple[int, int],
        task: Task,
    ) -> None:
        (self.rank, self.world_size), self.servers = place, task.servers
        self.micro_batch = self.at_most = task.micro_batch
        self._task, self.meets = task, False
        self.state: dict[str, Any] = {}
        self.here = tuple(range(self.world_size))
        self.answers_for: set[int] = set()
        self.replica, self._control, self._recorder, self._now = replica, control, recorder, now
        self.rounds, self.seats = 0, self.world_size
        """Own rounds; and below which number ranks are: more than the run began with, if others have joined."""
        self.books = Books(self.rank, self.world_size, self.serves)
        self.samples_computed = self._epoch = 0
        self.out_of_data = self.serves
        self.after_round: Callable[[RoundNews], None] = lambda news: None
        self._finished = False
        self._speed = Speedometer()
        self._watch = Watch(self.rank, self.warn)
        replica.on_sparse = self._watch.sparse
        self._news: RoundNews | None = None
        self._sent = 0  # bytes of messages, since the last step alone or round of all
        self._norm = 0.0  # of the last applied gradient
        self._stable = list(self.books.progress)
        self.last_round = -1
        """Of all ranks, applied."""
        self._testimony: tuple[int, int, set[int]] | None = None
        self.listens = False
        """Whether the strategy takes in what others send: then it may come upon something of a lost rank until it has
        come to the message that says so."""
        self._known_as_lost: set[int] = set()  # by the strategy
        self._device = Device(replica, self.micro_batch)

    # ---- learning

    def computed(self, began: float, count: int, samples: list[range]) -> Gradient:
        """The gradient that the user's backward pass has just left; empty if it was given up, and comes again."""
        self._device.bound_run_ahead()
        ended = self._now()
        if self.over:
            self._recorder.write("compute", self.rank, began, end=ended, samples=count)
            self._recorder.write("discard", self.rank, ended, samples=count, reason=GIVEN_UP)
            self.samples_computed += count
            self.replica.drop_gradients()
            return self.nothing()
        self._speed.see(count, ended - began)
        self._epoch = samples[-1].start // self._task.samples
        self._device.measure(count)
        self._recorder.write("compute", self.rank, began, end=ended, samples=count)
        self.samples_computed += count
        return self.replica.take_gradients(count, samples)

    @property
    def over(self) -> bool:
        """Whether the micro-batch that was asked for is no longer wanted."""
        return self.until is not None and self._control.signalled(self.until)

    @property
    def portion(self) -> int:
        """Samples of the next micro-batch: what the strategy asks for, if it fits into the device's memory."""
        return int(min(self.at_most, self._device.fits))

    def nothing(self) -> Gradient:
        """The gradient of a rank without data."""
        return Gradient(None, 0)

    def apply(self, gradient: Gradient, scale: StepScale = AS_SET) -> None:
        self.suspended()  # two rounds may be applied without a pause between them: the first is over now
        self._norm = norm = self.replica.apply(gradient, scale)
        if isinstance(gradient, RoundTotal):
            self._watch.see(self.rounds, norm, gradient.count, gradient.working, self.replica.steps.learning_rate)
            self._round_applied(gradient)
        elif not isfinite(norm):
            self._watch.non_finite(gradient.count, self.rounds)
            self.discard(gradient, "non-finite gradient")
            gradient.count, gradient.samples = 0, []

    def look_ahead(self, gradient: Gradient, scale: StepScale = AS_SET, further: bool = False) -> None:
        self.suspended()  # whoever looks at the parameters after a round sees those that all ranks have
        self.replica.look_ahead(gradient, scale, further)

    def model(self, count: int, samples: list[range], weight: float | None = None) -> Gradient:
        weight = count if weight is None else weight
        return Gradient(self.replica.model_contribution(weight) if weight else None, count, samples)

    def movement(self, model: Tensor, common: Tensor, weight: float, count: int, samples: list[range]) -> Gradient:
        return Gradient(self.replica.movement(model, common, weight), count, samples)

    def adopt(self, total: Gradient) -> None:
        self.suspended()
        self.replica.adopt(total)
        assert isinstance(total, RoundTotal)
        self._watch.see(self.rounds, 0.0, total.count, total.working, self.replica.steps.learning_rate)
        self._round_applied(total)

    def settle(self, gradient: Gradient) -> None:
        self.suspended()
        count = sum(map(len, gradient.samples))
        if self.books.settle(count):
            self._watch.see(self.rounds, self._norm, count, True, self.replica.steps.learning_rate)
        self._recorder.write("step", self.rank, self._now(), round=self.rounds, samples=count, bytes=self._sent)
        self._sent = 0
        # What the others do is not known here. But samples go out in one order, so that those handed out before this
        # rank's newest are about those that all ranks have applied.
        newest = max((part.stop for part in gradient.samples), default=0)
        self._round_alone(max(newest, self.samples_applied))

    def _round_alone(self, samples_applied: int) -> None:
        self._count_round(None, samples_applied)
        self.suspended()  # at once: when the next round is over too, nothing is waited for in between
        self.look_around()  # who steps alone may never wait for anybody

    # ---- servers and those that they serve

    def hand_in(self, gradient: Gradient) -> tuple[Tensor, int] | None:
        self.suspended()
        count, samples = gradient.count, gradient.samples
        mean = self.replica.mean(gradient)
        if mean is None:
            self._watch.non_finite(count, self.rounds)
            self.discard(Gradient(None, count, samples), "non-finite gradient")
        else:
            self.books.settle(count)
        self._count_round(None, self.samples_applied)
        return None if mean is None else (mean, self.books.progress[self.rank])

    def take_back(self, samples: list[range], reason: str) -> None:
        count = sum(map(len, samples))
        self.books.take_back(count)
        self._account_discard(samples, count, reason)

    def step(self, mean: Tensor, scale: StepScale = AS_SET, first: int = 0) -> bool:
        self._norm = self.replica.step(mean, scale, first)
        return isfinite(self._norm)

    def settle_for(self, worker: int, samples: int, handed_in: int, delay: int = 0) -> None:
        self.books.settle_for(worker, samples, handed_in)
        if not samples:
            self._watch.dropped()
        self._watch.see(self.rounds, self._norm, samples, True, self.replica.steps.learning_rate)
        facts = {"round": self.rounds, "samples": samples, "bytes": self._sent, "of": worker, "delay": delay}
        self._recorder.write("step", self.rank, self._now(), **facts)
        self._sent = 0
        self._round_alone(self.samples_applied)

    def learned(self, samples: int) -> None:
        before, after = self.books.advance(max(samples, self.samples_applied))
        self._news = RoundNews(before, after)
        self.suspended()

    @property
    def samples_applied(self) -> int:  # type: ignore[override]  # the books keep it
        return self.books.applied

    @property
    def sizes(self) -> Sequence[int]:
        return self.replica.sizes

    @property
    def epoch(self) -> int:
        return self._epoch

    def _round_applied(self, total: RoundTotal) -> None:
        self._finished = self._finished or not total.working  # once it is said, strategies only await what is in flight
        self.meets = False
        self.books.round_applied(total.settled, total)
        self.last_round, self.here = total.parts[-1][0], total.ranks
        self._count_round(total, self.samples_applied)
        self._testify()
        now, noise = self._now(), self.replica.noise
        for number, count, own in total.parts:
            self._recorder.write("applied", self.rank, now, round=number, samples=count, own=own)
        if self.rank == 0 and self.rounds % NOISE_EVERY == 0 and noise.value is not None:
            last = total.parts[-1][0]
            measured = {"squared_norm": noise.squared_norm, "variance": noise.variance}
            self._recorder.write("noise", self.rank, now, round=last, **measured)

    def _count_round(self, total: RoundTotal | None, samples_applied: int) -> None:
        """A round is over, of all ranks or of this one."""
        before, after = self.books.advance(samples_applied)
        news = RoundNews(before, after)
        if total is not None:
            wishes = (self._saves_after(total), total.scheduler_called, total.joining)
            news = RoundNews(before, after, total.parts[-1][0], *wishes)
        self.rounds += 1
        if total is not None:
            # Who has come to a round has the one before. This one others may still lack: if this rank alone has it and
            # is lost, it is repeated without the part of this rank, whose samples must go out again.
            self._control.report_progress(self._stable)
            self._stable = list(self.books.progress)
        elif not self.servers or self.serves:  # a worker's samples are used when its server says so
            if not self.servers:
                self._stable = list(self.books.progress)  # a step alone stands, whatever becomes of others
            self._control.report_progress(self.books.progress)
        self._control.report({"rounds": self.rounds, "samples": self.samples_computed})
        self._news = news

    def _saves_after(self, total: RoundTotal) -> bool:
        """Whether a checkpoint is taken now: a round late if the strategy must bring in first what it carries."""
        due = total.saving or self.saving
        self.saving = due and self._task.carries and not self.saving and not self._finished
        return due and not self.saving

    def witness(self, held: int, generation: int) -> None:
        """All who are left have the rounds up to `held`. Nothing of those who were lost by this generation comes after
        them: when they are applied here, this rank has no doubt any more about what was used."""
        self._testimony = held, generation, set(self._control.lost)
        self._testify()

    def heard_of_loss(self, rank: int) -> bool:
        """The strategy has come to the message that the rank is lost; whether it still is."""
        if rank in self._control.lost:
            self._known_as_lost.add(rank)
            self._testify()
        return rank in self._control.lost

    def _testify(self) -> None:
        if self._testimony is None:
            return
        held, generation, lost = self._testimony
        if self.last_round >= held and (not self.listens or lost <= self._known_as_lost):
            self._stable = list(self.books.progress)
            self._control.report_progress(self._stable, generation=generation)
            self._testimony = None

    def tell_progress(self) -> None:
        """What is known to be settled, at once."""
        self._control.report_progress(self._stable, generation=0)

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def parameters(self) -> Tensor:
        return self.replica.parameters

    @property
    def steps(self) -> Steps:
        return self.replica.steps

    @property
    def divisible(self) -> bool:
        return self.replica.divisible

    @property
    def seconds_per_sample(self) -> float:
        return self._speed.seconds_per_sample

    @property
    def overhead_samples(self) -> float:
        return self._speed.overhead_samples

    @property
    def noise_scale(self) -> float | None:
        return self.replica.noise.value

    def warn(self, text: str) -> None:
        self._recorder.write("warning", self.rank, self._now(), text=text)
        log.warning(text)

    def tell(self, text: str) -> None:
        self._recorder.write("note", self.rank, self._now(), text=text)
        log.info(text)

    def now(self) -> float:
        return self._now()

    def spent(self, seconds: float) -> None:
        self._speed.see_overhead(seconds)

    # ---- samples that are not used, and the end of a round

    def discard(self, gradient: Gradient, reason: str) -> None:
        self.books.discard(sum(map(len, gradient.samples)))
        self._account_discard(gradient.samples, gradient.count, reason)
        self.replica.release(gradient)

    def computed_in_vain(self, began: float, samples: list[range], reason: str) -> None:
        """These samples were computed since `began`, and the loop makes no step with them."""
        count = sum(map(len, samples))
        self._recorder.write("compute", self.rank, began, end=self._now(), samples=count)
        self.samples_computed += count
        self.discard(Gradient(None, count, samples), reason)

    def _account_discard(self, samples: list[range], count: int, reason: str) -> None:
        self._control.discard(samples, reason)
        self._recorder.write("discard", self.rank, self._now(), samples=count, reason=reason)

    def _drop_non_finite(self, count: int, samples: list[range], round_number: int) -> None:
        self._account_discard(samples, count, "non-finite gradient")
        self._watch.non_finite(count, round_number)

    def suspended(self) -> None:
        """A round was applied, and the strategy has corrected the step if it wanted to."""
        if self._news is not None:
            news, self._news = self._news, None
            self.after_round(news)

    # ---- newcomers

    def course_so_far(self) -> dict[str, Any]:
        """What all ranks know alike after a round, beside the model: a newcomer takes it over."""
        alike = {"last_round": self.last_round, "here": self.here, "saving": self.saving}
        return {**alike, "books": self.books.state()}

    def bear_witness(self) -> None:
        """All have met, and nobody will come upon anything that a lost rank had sent: the ledger knows what it used."""
        if self._testimony is not None:
            self._known_as_lost |= self._testimony[2]
            self._testify()
        if self.servers:  # what a lost rank has handed in must be known before its successor counts on from there
            self._control.report_progress(self.books.progress, now=True)
        self._control.snapshot(self._stable)

    def welcome(self, newcomers: Sequence[int], progress: Mapping[str, int]) -> None:
        """They take part from now on. Each goes on counting where the ledger says that its predecessor has ended."""
        self.here = tuple(sorted({*self.here, *newcomers}))
        self._known_as_lost.difference_update(newcomers)
        self.books.go_on_from({rank: progress.get(str(rank), 0) for rank in newcomers})

    def make_room(self, seats: int) -> None:
        """Ranks below this number may take part from now on."""
        if seats > self.seats:
            self.seats = seats
            self.books.make_room(seats)
            self.replica.make_room(extra_numbers(seats))

    def take_over(self, course: dict[str, Any]) -> None:
        self.last_round, self.here, self.saving = course["last_round"], tuple(course["here"]), course["saving"]
        self.books.restore(course["books"])
        self.make_room(len(self.books.progress))
        self._stable = list(self.books.progress)

    @property
    @abstractmethod
    def leads(self) -> bool:
        """Whether this is the first rank of those that are here."""
