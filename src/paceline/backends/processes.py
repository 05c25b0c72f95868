"""The processes backend: one rank of a real run, on torch.distributed, a mailbox and the control plane."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from paceline.backends.collectives import Collectives, CollectiveWork
from paceline.backends.driver import DrivenNode, WaitableWork
from paceline.backends.mailbox import Mailbox
from paceline.backends.replica import Replica
from paceline.backends.rounds import FLAGS, RoundNews, RoundTotal, extra_of
from paceline.backends.watch import NOISE_EVERY, Watch
from paceline.control.client import ControlClient
from paceline.node import GIVEN_UP, Gradient, Message, Work
from paceline.record import Recorder
from paceline.rules.learning_rate import AS_SET, Steps, StepScale
from paceline.rules.memory import MemoryMeter
from paceline.rules.speed import Speedometer

log = logging.getLogger("paceline")


FIRST_MEETING = 2**60  # rounds that ranks are called to have signals too, and no strategy's own rounds come so far


class ProcessNode(DrivenNode):
    """One rank of a real run.

    Args:
        replica: the user's model and optimizer.
        control: the rank's line to the control plane.
        mailbox: messages between ranks.
        collectives: the process group.
        recorder: where the events go.
        now: seconds since the run began.
        check_peers: raises when a peer is known to be lost.
        micro_batch: the user's.
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
        micro_batch: int,
    ) -> None:
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.micro_batch = self.at_most = micro_batch
        self.state: dict[str, Any] = {}
        self.replica, self._control, self._mailbox = replica, control, mailbox
        self._collectives, self._recorder, self._now = collectives, recorder, now
        self._check_peers = check_peers
        self.rounds = 0
        self.progress = [0] * self.world_size  # samples that each rank has brought to an end, over all rounds
        self.samples_applied = self.resumed_samples = self._furthest = 0
        self.samples_computed = 0
        self.out_of_data = False
        self.save_wanted = self.scheduler_called = False
        self.settled_at_save: list[range] = []
        self.after_round: Callable[[RoundNews], None] = lambda news: None
        self._finished = False
        self._speed = Speedometer()
        self._watch = Watch(self.rank, self.warn)
        replica.on_sparse = self._watch.sparse
        self._started_rounds = 0
        self._in_flight: list[WaitableWork[Any]] = []
        self._news: RoundNews | None = None
        self._discarded = 0  # samples, since the last contribution or step alone
        self._settled_alone = 0  # samples, since the last round of all ranks
        self._dropped_alone = 0  # of those, the ones that were discarded
        self._dropped = 0  # by all ranks in steps alone, until the last round of all
        self._sent = 0  # bytes of messages, since the last of either
        self._norm = 0.0  # of the last applied gradient
        self._last_backward: torch.cuda.Event | None = None
        self._memory: MemoryMeter | None = None
        if replica.parameters.is_cuda and replica.divisible:
            self._memory = MemoryMeter(micro_batch, torch.cuda.mem_get_info(replica.parameters.device)[1])

    # ---- learning

    def computed(self, began: float, count: int, samples: list[range]) -> Gradient:
        """The gradient that the user's backward pass has just left; empty if it was given up, and comes again."""
        self._bound_run_ahead()
        ended = self._now()
        if self.over:
            self._recorder.write("compute", self.rank, began, end=ended, samples=count)
            self._recorder.write("discard", self.rank, ended, samples=count, reason=GIVEN_UP)
            self.samples_computed += count
            self.replica.drop_gradients()
            return self.nothing()
        self._speed.see(count, ended - began)
        self._measure_memory(count)
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
        return self.at_most if self._memory is None else min(self.at_most, self._memory.fits)

    def _measure_memory(self, count: int) -> None:
        if self._memory is not None:
            device = self.replica.parameters.device
            peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
            self._memory.see(count, now, peak)  # the gradients, which stay for the moment, count as there before
            torch.cuda.reset_peak_memory_stats(device)

    def nothing(self) -> Gradient:
        """The gradient of a rank without data."""
        return Gradient(None, 0)

    def _bound_run_ahead(self) -> None:
        """On CUDA a backward pass is only enqueued when it returns; without a bound a strategy that computes while
        the network is busy would enqueue dozens. Wait for the one before: at most one runs ahead."""
        if self.replica.parameters.is_cuda:
            if self._last_backward is not None:
                self._last_backward.synchronize()
            self._last_backward = torch.cuda.Event()
            self._last_backward.record()

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

    def model(self, count: int, samples: list[range]) -> Gradient:
        return Gradient(self.replica.model_contribution(count), count, samples) if count else Gradient(None, 0, samples)

    def adopt(self, total: Gradient) -> None:
        self.suspended()
        self.replica.adopt(total)
        assert isinstance(total, RoundTotal)
        self._watch.see(self.rounds, 0.0, total.count, total.working, self.replica.steps.learning_rate)
        self._round_applied(total)

    def settle(self, gradient: Gradient) -> None:
        self.suspended()
        count = sum(map(len, gradient.samples))
        settled, self._discarded = count + self._discarded, 0
        if settled:
            self._watch.see(self.rounds, self._norm, count, True, self.replica.steps.learning_rate)
        self._settled_alone += settled
        self._dropped_alone += settled - count
        self.progress[self.rank] += settled
        self._recorder.write("step", self.rank, self._now(), round=self.rounds, samples=count, bytes=self._sent)
        self._sent = 0
        # What the others do is not known here. But samples go out in one order, so that those handed out before this
        # rank's newest are about those that all ranks have applied.
        newest = max((part.stop for part in gradient.samples), default=0)
        self._count_round(None, max(newest, self.samples_applied))
        self.suspended()  # at once: when the next round is over too, nothing is waited for in between
        self.look_around()  # who steps alone may never wait for anybody

    def _round_applied(self, total: RoundTotal) -> None:
        self._finished = not total.working
        self.progress = [before + int(more) for before, more in zip(self.progress, total.settled, strict=True)]
        self._dropped += total.dropped
        applied = self.samples_applied + sum(count for _, count, _ in total.parts)
        if total.of_models:  # steps alone have guessed
            applied = self.resumed_samples + sum(self.progress) - self._dropped
        self._count_round(total, applied)
        if total.saving and self.rank == 0:  # while it has not joined the next round, nobody settles more
            self.settled_at_save = self._control.snapshot(self.progress)
        now, noise = self._now(), self.replica.noise
        for number, count, own in total.parts:
            self._recorder.write("applied", self.rank, now, round=number, samples=count, own=own)
        if self.rank == 0 and self.rounds % NOISE_EVERY == 0 and noise.value is not None:
            last = total.parts[-1][0]
            measured = {"squared_norm": noise.squared_norm, "variance": noise.variance}
            self._recorder.write("noise", self.rank, now, round=last, **measured)

    def _count_round(self, total: RoundTotal | None, samples_applied: int) -> None:
        """A round is over, of all ranks or of this one."""
        before = max(self._furthest, self.resumed_samples)
        self._furthest = max(before, samples_applied)
        self.samples_applied = samples_applied
        news = RoundNews(before, self._furthest)
        if total is not None:
            news = RoundNews(before, self._furthest, total.parts[-1][0], total.saving, total.scheduler_called)
        self.rounds += 1
        self._control.report_progress(self.progress)
        self._control.report({"rounds": self.rounds, "samples": self.samples_computed})
        self._news = news

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

    # ---- communication

    def all_reduce(self, gradient: Gradient, note: float = 0.0) -> Work[Gradient]:
        return self._start_round(gradient, gradient.count, note)

    def mean_model(self) -> Work[Gradient]:
        return self._start_round(Gradient(self.replica.model_contribution(1), 1), None, 0.0)

    def _start_round(self, gradient: Gradient, own: int | None, note: float) -> Work[Gradient]:
        self.suspended()  # what is done after a round may be a collective too: on all ranks before the next one
        round_number = self._started_rounds
        self._started_rounds += 1
        settled = self._discarded + sum(map(len, gradient.samples))
        alone, dropped = self._settled_alone, self._dropped_alone + (self._discarded if own is None else 0)
        self._settled_alone = self._dropped_alone = self._discarded = 0
        extra = extra_of(self.rank, self.world_size, (alone + settled, dropped, note))
        extra[:FLAGS] = [float(self.save_wanted), float(self.scheduler_called)]
        self.save_wanted = self.scheduler_called = False
        contribution, sound = self.replica.contribution(gradient, not self.out_of_data, extra)
        if not sound and own is not None:
            self._drop_non_finite(own, gradient.samples, round_number)
            own = 0
        sent, self._sent = contribution.whole.nbytes + self._sent, 0
        self._recorder.write("join", self.rank, self._now(), round=round_number, samples=own or 0, bytes=sent)

        def as_total(_: Tensor) -> Gradient:
            together, working, sums = self.replica.total(contribution)
            total = RoundTotal(together, round_number, own, working, sums)
            total.settled[self.rank] -= alone  # news to the others, and counted here before
            return total

        work = self._collectives.add_up(contribution.whole, as_total, f"The all-reduce of round {round_number}")
        work.round_number = round_number
        return self._fly(work)

    def _drop_non_finite(self, count: int, samples: list[range], round_number: int) -> None:
        self._account_discard(samples, count, "non-finite gradient")
        self._watch.non_finite(count, round_number)

    def discard(self, gradient: Gradient, reason: str) -> None:
        self._discarded += sum(map(len, gradient.samples))
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
        self._mailbox.send(to, kind, tensors)

    def receive(self) -> Work[Message]:
        return self._mailbox.receive()

    def signal(self, round_number: int) -> None:
        self._control.signal(round_number)

    def signalled(self, round_number: int) -> bool:
        return self._control.signalled(round_number)

    def count(self, round_number: int, samples: int, target: int) -> None:
        self._control.count(round_number, samples, target)

    # ---- for the driver

    def suspended(self) -> None:
        """A round was applied, and the strategy has corrected the step if it wanted to."""
        if self._news is not None:
            news, self._news = self._news, None
            self.after_round(news)

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

    def spent(self, seconds: float) -> None:
        self._speed.see_overhead(seconds)

    def waited(self, work: Work[object], began: float) -> None:
        if isinstance(work, CollectiveWork) and work.round_number is not None:
            self._recorder.write("wait", self.rank, began, end=self._now(), round=work.round_number)

    def now(self) -> float:
        return self._now()

    def sum_now(self, tensor: Tensor) -> Tensor:
        """Add a tensor over all ranks and wait for it. Only where all ranks do the same: between rounds."""
        work = self._collectives.add_up(tensor, lambda added: added, "The averaging of running statistics")
        work.wait()
        return work.result()


def run_clock(origin: float) -> Callable[[], float]:
    """Seconds since `origin` (a `time.time()`): the same on all processes of a machine, and never going back."""
    offset = time.time() - time.perf_counter() - origin
    return lambda: time.perf_counter() + offset
