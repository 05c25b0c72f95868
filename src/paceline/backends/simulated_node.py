"""A rank in virtual time, and what it can have in flight. The driver (`simulated`) makes things happen."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.backends.learners import Learner
from paceline.backends.theatre import Post, Theatre
from paceline.backends.virtual_rounds import Collective, RoundTotal, Waiter
from paceline.backends.watch import Watch
from paceline.node import FOUND, LOST, WHOLE, Gradient, Message, Node, Share, Work
from paceline.rules.learning_rate import AS_SET, Steps, StepScale
from paceline.rules.speed import Speedometer
from paceline.simulator.cluster import Cluster, WorkTimes

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class SimulatedWork(Work[T], ABC):
    """Something in flight in virtual time."""

    round: int | None = None
    """Of an all-reduce; the record of waiting names it."""

    @property
    def joined(self) -> float:
        """From when on the wait is for the network and no longer for another rank."""
        return inf

    @property
    @abstractmethod
    def waiters(self) -> list[Waiter]:
        """Whom to wake when it is done."""


class CollectiveWork(SimulatedWork[T]):
    """One rank's part in a collective."""

    def __init__(self, collective: Collective, node: SimulatedNode) -> None:
        self.collective, self._node = collective, node
        self.round = collective.round

    @property
    def done(self) -> bool:
        return self.collective.done or self._node.rank in self.collective.early

    @property
    def joined(self) -> float:
        return self.collective.joined

    @property
    def waiters(self) -> list[Waiter]:
        return self.collective.waiters


class AllReduceWork(CollectiveWork[Gradient]):
    """`own`: this rank's samples in it; None for a mean of models, which is over no samples."""

    def __init__(self, collective: Collective, node: SimulatedNode, own: int | None) -> None:
        super().__init__(collective, node)
        self._own = own
        self._total: RoundTotal | None = None

    def result(self) -> Gradient:
        if self._total is None:  # awaiting it twice must not fill memory that a step has given back
            collective = self.collective
            payload = collective.payloads[self._node.rank]
            if collective.done:  # until then it may have to be brought again
                del collective.payloads[self._node.rank]
            values, count, working = self._node.learner.total(payload, collective.value)
            self._total = RoundTotal(values, count, working or collective.more, self._own, collective)
        return self._total


class AllGatherWork(CollectiveWork[tuple[tuple[float, ...], ...]]):
    def result(self) -> tuple[tuple[float, ...], ...]:
        of_each: tuple[tuple[float, ...], ...] = self.collective.value
        return of_each


class ReceiveWork(SimulatedWork[Message]):
    """The next message to a rank."""

    def __init__(self, node: SimulatedNode) -> None:
        self.message: Message | None = None
        self._node = node
        self._waiters: list[Waiter] = []

    @property
    def done(self) -> bool:
        return self.message is not None

    @property
    def waiters(self) -> list[Waiter]:
        return self._waiters

    def result(self) -> Message:
        assert self.message is not None
        if self.message.kind == LOST and not self._node.heard_of_loss(self.message.sender):
            return Message(self.message.sender, FOUND, ())
        return self.message


class SimulatedNode(Node):
    """One rank in virtual time.

    Its course belongs to the driver: what the rank is doing, since when, and what it has done so far. In slots, because
    with thousands of ranks the time goes into fetching memory.
    """

    __slots__ = (
        "_run", "answer", "answers_for", "at_most", "bids_farewell", "close", "collectives", "computing",
        "discarded", "due", "empties", "ended", "finished", "handed_in", "here", "idle", "in_flight", "last_round",
        "learner", "mailbox", "micro_batch", "norm", "open_until", "out_of_data", "own_rounds", "post", "rank",
        "receivers", "resume", "rounds", "samples_applied", "sent", "servers", "signals", "since", "speed",
        "state", "ticket", "times", "unsent", "until", "waits_for", "watch", "world_size",
    )  # fmt: skip

    finished: bool
    until: int | None
    servers: int
    samples_applied: int
    post: Post
    """Set when all nodes are there."""

    def __init__(
        self,
        rank: int,
        cluster: Cluster,
        learner: Learner,
        micro_batch: int,
        run: Theatre,
    ) -> None:
        self.rank, self.learner, self._run = rank, learner, run
        self.world_size, self.servers = cluster.begins_with, cluster.servers
        self.state: dict[str, Any] = {}
        self.here = tuple(range(self.world_size))
        self.answers_for: set[int] = set()
        durations = iter(()) if self.serves else cluster.durations(rank, self._round)
        self.times = WorkTimes(durations, micro_batch)
        self.micro_batch = self.at_most = micro_batch
        self.until = None
        self.speed, self.watch = Speedometer(), Watch(rank, self.warn)
        learner.watched_by(self.watch)
        self.resume: Callable[[Gradient | None], object] | None = None
        """Sends into the coroutine, once the rank has started and until it is through."""
        self.close: Callable[[], None] | None = None
        self.ended = self.finished = self.idle = self.bids_farewell = False
        self.out_of_data = self.serves
        self.computing: Gradient | None = None
        """The micro-batch under way."""
        self.due = inf
        """When it ends: one that was given up leaves its end on the clock."""
        self.waits_for: SimulatedWork[Any] | None = None
        self.answer: Gradient | None = None
        """What to send in when the wait is over."""
        self.since = 0.0
        self.ticket = self.empties = self.unsent = self.discarded = self.samples_applied = self.collectives = 0
        self.rounds = self.own_rounds = self.handed_in = 0
        """Of all ranks, started; and steps that this rank has made alone."""
        self.last_round, self.open_until = -1, 0
        """The last round applied; and the first in which a rank without data may say that it has none."""
        self.sent, self.norm = 0, 0.0
        """Bytes of messages since the last step alone, and the norm of its gradient."""
        self.signals: set[int] = set()
        self.mailbox: deque[Message] = deque()
        self.receivers: deque[ReceiveWork] = deque()
        self.in_flight: list[SimulatedWork[Any]] = []

    def _round(self) -> int:
        return self.rounds + self.own_rounds

    # ---- learning

    def apply(self, gradient: Gradient, scale: StepScale = AS_SET) -> None:
        self._run.round_over(self)
        self.norm = norm = self.learner.apply(gradient, scale)
        if isinstance(gradient, RoundTotal):
            self.watch.see(self.rounds, norm, gradient.count, gradient.working, self.learner.steps.learning_rate)
            self._run.round_applied(self, gradient)
        elif not isfinite(norm):
            self.watch.non_finite(gradient.count, self.rounds)
            self._run.discard(self, gradient, "non-finite gradient")
            gradient.count, gradient.samples = 0, []

    def look_ahead(self, gradient: Gradient, scale: StepScale = AS_SET, further: bool = False) -> None:
        self._run.round_over(self)
        self.learner.look_ahead(gradient, scale, further)

    def discard(self, gradient: Gradient, reason: str) -> None:
        self._run.discard(self, gradient, reason)

    def model(self, count: int, samples: list[range], weight: float | None = None) -> Gradient:
        weight = count if weight is None else weight
        return Gradient(self.learner.model(weight) if weight else None, count, samples)

    def movement(self, model: Tensor, common: Tensor, weight: float, count: int, samples: list[range]) -> Gradient:
        return Gradient(self.learner.movement(model, common, weight), count, samples)

    def adopt(self, total: Gradient) -> None:
        self._run.round_over(self)
        self.learner.adopt(total)
        assert isinstance(total, RoundTotal)
        self.watch.see(self.rounds, 0.0, total.count, total.working, self.learner.steps.learning_rate)
        self._run.round_applied(self, total)

    def settle(self, gradient: Gradient) -> None:
        self._run.settle(self, gradient)

    def hand_in(self, gradient: Gradient) -> tuple[Tensor, int] | None:
        mean = self.learner.mean(gradient)
        if mean is None:
            self.watch.non_finite(gradient.count, self.rounds)
            self._run.discard(self, gradient, "non-finite gradient")
            return None
        return mean, self._run.hand_in(self, gradient)

    def take_back(self, samples: list[range], reason: str) -> None:
        self._run.take_back(self, samples, reason)

    def step(self, mean: Tensor, scale: StepScale = AS_SET, first: int = 0) -> bool:
        self.norm = self.learner.step(mean, scale, first)
        return isfinite(self.norm)

    def settle_for(self, worker: int, samples: int, handed_in: int, delay: int = 0) -> None:
        self._run.settle_for(self, worker, samples, handed_in, delay)

    def learned(self, samples: int) -> None:
        self._run.learned(self, samples)

    @property
    def parameters(self) -> Tensor:
        return self.learner.parameters

    @property
    def sizes(self) -> Sequence[int]:
        return self.learner.sizes

    @property
    def epoch(self) -> int:
        return self.learner.epoch

    @property
    def steps(self) -> Steps:
        return self.learner.steps

    @property
    def divisible(self) -> bool:
        return self.learner.divisible

    @property
    def seconds_per_sample(self) -> float:
        return self.speed.seconds_per_sample

    @property
    def overhead_samples(self) -> float:
        return self.speed.overhead_samples

    @property
    def noise_scale(self) -> float | None:
        return self.learner.noise.value

    def now(self) -> float:
        return self._run.now

    def warn(self, text: str) -> None:
        self._run.say(self, "warning", text)

    def tell(self, text: str) -> None:
        self._run.say(self, "note", text)

    # ---- communication

    def all_reduce(self, gradient: Gradient, note: float = 0.0) -> Work[Gradient]:
        return self._run.start_all_reduce(self, gradient, note)

    def mean_model(self, share: Share = WHOLE) -> Work[Gradient]:
        return self._run.start_mean(self, share)

    @property
    def called_together(self) -> bool:
        return self._run.somebody_joins

    def all_gather(self, *numbers: float) -> Work[tuple[tuple[float, ...], ...]]:
        return self._run.start_all_gather(self, numbers)

    def send(self, to: int, kind: str, *tensors: Tensor) -> None:
        self.post.start_message(to, Message(self.rank, kind, self.learner.copies(tensors)))

    def receive(self) -> Work[Message]:
        work = ReceiveWork(self)
        if self.mailbox:
            work.message = self.mailbox.popleft()
        else:
            self.receivers.append(work)
        return work

    def heard_of_loss(self, rank: int) -> bool:
        """The strategy has come to the message that the rank is lost; whether it still is."""
        return self._run.heard_of_loss(self, rank)

    def signal(self, round_number: int) -> None:
        self.post.start_signal(self, round_number)

    def signalled(self, round_number: int) -> bool:
        return round_number in self.signals

    def count(self, round_number: int, samples: int, target: int) -> None:
        self.post.start_count(self, round_number, samples, target)

    # ---- for the driver

    def fly(self, work: SimulatedWork[Any]) -> None:
        """Remember what is in flight: an arrival ends the wait of a rank without data."""
        self.in_flight = [each for each in self.in_flight if not each.done]
        self.in_flight.append(work)

    def take_over(self, other: SimulatedNode, handed_in: int) -> None:
        """A newcomer: it has what the others have after a round, and none of what they have in hand. It counts what it
        hands in on from where the one before it has ended."""
        self.handed_in = handed_in
        self.learner.take_over(other.learner)
        self.state, self.signals = copy.deepcopy(other.state), set(other.signals)
        self.rounds, self.own_rounds, self.collectives = other.rounds, other.own_rounds, other.collectives
        self.samples_applied, self.last_round, self.post = other.samples_applied, other.last_round, other.post
        self.here = other.here

    def take_in(self, message: Message) -> list[Waiter]:
        """A message has arrived: whom it wakes."""
        if not self.receivers:
            self.mailbox.append(message)
            return []
        work = self.receivers.popleft()
        work.message = message
        return work.waiters
