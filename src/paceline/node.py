"""The waist of Paceline: all that a strategy may ask for.

A strategy is a coroutine over a `Node`. Only two things suspend it: asking for a gradient, and awaiting a `Work`
(something in flight). Everything else takes no time. `await` therefore means exactly "time may pass here", and the
same coroutine runs on real processes and in virtual time: a backend is whoever answers what the coroutine yields.

    strategies  ──ask──>  node.py  <──answer──  backends (processes · simulated)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from paceline.rules.learning_rate import AS_SET, Steps, StepScale

if TYPE_CHECKING:  # the command line and the timing-only simulator must not pay for importing torch
    from torch import Tensor

T = TypeVar("T")


class GradientRequest:
    """What a coroutine yields when it asks for a gradient; the backend answers by sending a `Gradient` in."""

    def __await__(self) -> Generator[GradientRequest, Gradient, Gradient]:
        return (yield self)


NEXT_GRADIENT: Final = GradientRequest()
GIVEN_UP: Final = "given up: the round was over"
"""Why samples are discarded that come again."""
LOST: Final = "lost"
"""The message that stands for a rank that is lost, to strategies that survive it; nothing of it comes after."""
FOUND: Final = "found"
"""The same when the strategy comes to it only after a newcomer has taken the rank's place."""


class Work(ABC, Generic[T]):
    """Something in flight. `done` polls and takes no time; `await work` suspends until it is there."""

    __slots__ = ()

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether awaiting it would return at once."""

    @abstractmethod
    def result(self) -> T:
        """What it brought. Only a backend calls this, and only when the work is done."""

    def __await__(self) -> Generator[Work[T], None, T]:
        if not self.done:
            yield self
        return self.result()


class Values(Protocol):
    """A sum of gradients, in whatever memory a backend keeps it."""

    def plus(self, other: Any) -> Values:
        """The sum of both; either may be used up."""

    def tensor(self) -> Tensor:
        """The sum as one flat tensor, to look at."""


class Gradient:
    """A sum of per-sample gradients and how many samples it is over.

    Args:
        values: the sum; `None` in the timing-only simulator and for an empty contribution.
        count: samples that it is over. Zero for an empty contribution, which changes no mean.
        samples: their positions in the run's global order. The ledger's proof that none is lost and none is used
            twice.
        notes: of a total: the number that each rank sent along, in the order of the ranks; 0.0 of who is lost.
        ranks: of a total: those who took part in the round, the same on all ranks. Who is missing is lost.

    >>> batch = Gradient(None, 32, [range(0, 32)])
    >>> batch += Gradient(None, 16, [range(64, 80)])
    >>> batch.count, batch.samples
    (48, [range(0, 32), range(64, 80)])
    """

    __slots__ = ("count", "notes", "ranks", "samples", "values")

    def __init__(self, values: Values | None, count: int, samples: list[range] | None = None) -> None:
        self.values = values
        self.count = count
        self.samples = [] if samples is None else samples
        self.notes: tuple[float, ...] = ()
        self.ranks: tuple[int, ...] = ()

    def __iadd__(self, other: Gradient) -> Gradient:
        self.samples += other.samples
        self.count += other.count
        if self.values is None:
            self.values = other.values
        elif other.values is not None:
            self.values = self.values.plus(other.values)
        return self


@dataclass(frozen=True)
class Message:
    """What one rank sent to another: a kind to match on, and any number of tensors."""

    sender: int
    kind: str
    tensors: Sequence[Tensor]


@dataclass(frozen=True)
class Share:
    """What a rank brings to the model of the run, which is the mean of all models.

    Args:
        models: how many its part counts as.
        first, last: the part of the flat parameters that it brings, `last` excluded; all of them by default.
    """

    models: int = 1
    first: int = 0
    last: int | None = None

    @property
    def part(self) -> slice:
        return slice(self.first, self.last)

    @property
    def empty(self) -> bool:
        """Whether it brings nothing."""
        return self.first == self.last


WHOLE: Final = Share()


class Node(ABC):
    """One rank, as its strategy sees it."""

    rank: int
    world_size: int
    """With how many ranks the run began. Those that serve are the last of them. Those that have joined since have
    higher numbers, and places of their own in what a round tells of each rank."""
    servers: int = 0
    """Ranks that hold parameters and compute no gradient."""
    micro_batch: int
    """Samples in a micro-batch, as the user set it: the most that a device is asked for at once."""
    at_most: int
    """Samples in the micro-batch that is asked for."""
    samples_applied: int
    """Samples that the parameters here are the result of, as far as this rank knows."""
    until: int | None = None
    """The round whose signal ends the micro-batch that is asked for."""
    here: tuple[int, ...]
    """Who takes part, the same on all ranks: those of the last round of all, and newcomers who were let in after it."""
    saving: bool = False
    """Whether a checkpoint is taken when the next round of all is applied: see `Strategy.carries`."""
    answers_for: set[int]
    """Workers whose last gradients came to this server: what they had handed in it tells for them, if they are lost."""
    state: dict[str, Any]
    """What must survive the round: tensors and numbers. A checkpoint holds it; locals die with the round."""

    @property
    def workers(self) -> int:
        """Ranks that compute gradients, of those with which the run began: the first so many."""
        return self.world_size - self.servers

    @property
    def serves(self) -> bool:
        """Whether this rank is a server."""
        return self.workers <= self.rank < self.world_size

    # ---- learning

    def gradient(self, at_most: int | None = None, until: int | None = None) -> Awaitable[Gradient]:
        """One micro-batch at the present parameters; smaller, of `at_most` samples, if the model can be trained on less
        than the user's. (A data loader with workers of its own has some ahead, of the size asked for earlier.) Empty
        when this rank has no data: then it lasts until something in flight here arrives, so that a loop over empty
        gradients does not spin. `until`: when this round is signalled, the micro-batch is given up. The answer is then
        empty too, what was computed of it counts as discarded, and the same samples come again with the next one."""
        wanted = self.micro_batch if at_most is None or not self.divisible else max(1, at_most)
        self.at_most = min(wanted, self.micro_batch)
        self.until = until
        return NEXT_GRADIENT

    @abstractmethod
    def apply(self, gradient: Gradient, scale: StepScale = AS_SET) -> None:
        """One step of the user's optimizer with the mean of the gradient, which is used up. None if it is empty.
        It starts from where the last `apply` or `adopt` ended. A gradient of this rank alone that has NaN or infinity
        in it is discarded, and left empty."""

    @abstractmethod
    def look_ahead(self, gradient: Gradient, scale: StepScale = AS_SET, further: bool = False) -> None:
        """Until the next `apply`, compute at the point to which a step with this gradient would lead. The optimizer
        forgets the step, and the gradient is not used up. Nothing happens if it is empty. `further`: the step starts
        from where the last look ahead led that was not itself further."""

    @abstractmethod
    def discard(self, gradient: Gradient, reason: str) -> None:
        """Do not use it, and say so in the books: its samples are settled by this rank's next contribution."""

    @abstractmethod
    def model(self, count: int, samples: list[range], weight: float | None = None) -> Gradient:
        """This rank's parameters as a contribution that settles these samples. In the mean it weighs so much, by
        default as much as it has samples. One of no weight brings no model."""

    @abstractmethod
    def movement(self, model: Tensor, common: Tensor, weight: float, count: int, samples: list[range]) -> Gradient:
        """The same, for a model that may be large and may have left the parameters behind: a contribution by how far it
        has moved from a `common` one that all ranks hold alike. Only what some rank has moved travels. Neither tensor
        may change until all have arrived; then `common` is the mean of the models, each by its weight, in place."""

    @abstractmethod
    def adopt(self, total: Gradient) -> None:
        """The mean of all ranks' `model` or `movement` contributions, each by its weight, or the `mean_model`, becomes
        the parameters."""

    @abstractmethod
    def settle(self, gradient: Gradient) -> None:
        """A step of this rank alone, with a gradient that `apply` has used up, stands: it counts as a round, and its
        samples as used. (Where ranks step together, the round itself settles them.)"""

    @abstractmethod
    def hand_in(self, gradient: Gradient) -> tuple[Tensor, int] | None:
        """This rank's gradient is to travel to a server, in messages of the strategy: it counts as a round here, and is
        used up. Returns its mean as one flat tensor, in memory that the next call uses again; and the samples that this
        rank has handed in so far, discarded ones included. They are used when a server says so: see `settle_for`. None
        if it has NaN or infinity in it: then it is discarded."""

    @abstractmethod
    def take_back(self, samples: list[range], reason: str) -> None:
        """A server has refused these, which were handed in: they are discarded."""

    @abstractmethod
    def step(self, mean: Tensor, scale: StepScale = AS_SET, first: int = 0) -> bool:
        """One step of the user's optimizer with a mean gradient that has come in a message. It may be that of a part of
        the flat parameters, of whole ones from the place `first` on. False, and no step, if it has NaN or infinity."""

    @abstractmethod
    def settle_for(self, worker: int, samples: int, handed_in: int, delay: int = 0) -> None:
        """A server's step with so many samples of a worker stands; that worker has handed in so many up to these.
        `delay`: steps that were made since the worker had the parameters that it computed at."""

    @abstractmethod
    def learned(self, samples: int) -> None:
        """By what others have sent, the parameters here are now the result of so many samples in all."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether no rank had data left in the last applied round of all. The same on all ranks after the same one."""

    @property
    @abstractmethod
    def parameters(self) -> Tensor:
        """The model's parameters as one flat tensor that shares their memory."""

    @property
    @abstractmethod
    def sizes(self) -> Sequence[int]:
        """Numbers in each of the model's parameters, in the order in which they lie in the flat tensor."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Which pass over the data this rank's last micro-batch was of, from 0."""

    @property
    @abstractmethod
    def steps(self) -> Steps:
        """How the user's optimizer makes its steps: learning rate, momentum, and of which kind they are."""

    @property
    @abstractmethod
    def divisible(self) -> bool:
        """Whether the model can be trained on smaller micro-batches; with BatchNorm all must be of the same size."""

    # ---- what was measured

    @property
    @abstractmethod
    def seconds_per_sample(self) -> float:
        """What this rank's last micro-batches took to compute, smoothed; 0.0 before the first."""

    @property
    @abstractmethod
    def overhead_samples(self) -> float:
        """What a micro-batch costs beside its samples, in samples; 0.0 while it is not known."""

    @property
    @abstractmethod
    def noise_scale(self) -> float | None:
        """The batch size at which the gradient's noise is as large as the gradient, over the last rounds; the same on
        all ranks. None while it is not known."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began: to measure how long something took, and nothing else."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Tell the user that something is wrong: in the log and in the run's record."""

    @abstractmethod
    def tell(self, text: str) -> None:
        """Tell the user what was decided and why: in the log and in the run's record."""

    # ---- communication: starting it takes no time

    @abstractmethod
    def all_reduce(self, gradient: Gradient, note: float = 0.0) -> Work[Gradient]:
        """Start to add the gradients (sums and counts) of all ranks. It uses up what is given; the result is equal,
        bit for bit, on every rank. All ranks start the same collectives in the same order, and a rank hands in its
        gradients in the order in which it computed them. `note` reaches every rank: see `Gradient.notes`."""

    @abstractmethod
    def mean_model(self, share: Share = WHOLE) -> Work[Gradient]:
        """Start to average the parameters of all ranks, of each its share; `adopt` takes the result. A round of all
        ranks like any other, but over no samples."""

    @property
    @abstractmethod
    def called_together(self) -> bool:
        """Whether somebody needs all ranks in a round, to save say. Ranks that step alone ask now and then."""

    @abstractmethod
    def all_gather(self, *numbers: float) -> Work[tuple[tuple[float, ...], ...]]:
        """Start to collect numbers of every rank, which all travel together. For each of them a tuple comes back, in
        the order of the ranks; NaN of those that are lost."""

    @abstractmethod
    def send(self, to: int, kind: str, *tensors: Tensor) -> None:
        """Start to send a message. Messages from one rank to another arrive in the order of sending."""

    @abstractmethod
    def receive(self) -> Work[Message]:
        """The next message to this rank, from whomever."""

    @abstractmethod
    def signal(self, round_number: int) -> None:
        """Tell every rank that the round is over. Signalling twice is the same as once."""

    @abstractmethod
    def signalled(self, round_number: int) -> bool:
        """Whether somebody, or this rank itself, has signalled the round."""

    @abstractmethod
    def count(self, round_number: int, samples: int, target: int) -> None:
        """Add this rank's newest samples to what the ranks have computed for the round. As soon as they have `target`
        together, the round is signalled to everybody."""
