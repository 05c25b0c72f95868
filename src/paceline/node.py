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

if TYPE_CHECKING:  # the command line and the timing-only simulator must not pay for importing torch
    from torch import Tensor

T = TypeVar("T")


class GradientRequest:
    """What a coroutine yields when it asks for a gradient; the backend answers by sending a `Gradient` in."""

    def __await__(self) -> Generator[GradientRequest, Gradient, Gradient]:
        return (yield self)


NEXT_GRADIENT: Final = GradientRequest()


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


class Gradient:
    """A sum of per-sample gradients and how many samples it is over.

    Args:
        values: the sum; `None` in the timing-only simulator and for an empty contribution.
        count: samples that it is over. Zero for an empty contribution, which changes no mean.
        samples: the positions in the run's global order that it settles: those of the sum, and any that were
            discarded since the gradient before it. The ledger's proof that none is lost and none is used twice.

    >>> batch = Gradient(None, 32, [range(0, 32)])
    >>> batch += Gradient(None, 16, [range(64, 80)])
    >>> batch.count, batch.samples
    (48, [range(0, 32), range(64, 80)])
    """

    __slots__ = ("count", "samples", "values")

    def __init__(self, values: Values | None, count: int, samples: list[range] | None = None) -> None:
        self.values = values
        self.count = count
        self.samples = [] if samples is None else samples

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


class Node(ABC):
    """One rank, as its strategy sees it."""

    rank: int
    world_size: int
    state: dict[str, Any]
    """What must survive the round: tensors and numbers. A checkpoint holds it; locals die with the round."""

    # ---- learning

    def gradient(self) -> Awaitable[Gradient]:
        """One micro-batch at the present parameters. Empty when this rank has no data (then it lasts until
        something in flight here arrives, so that a loop over empty gradients does not spin)."""
        return NEXT_GRADIENT

    @abstractmethod
    def apply(self, gradient: Gradient) -> None:
        """One step of the user's optimizer with the mean of the gradient, which is used up. None if it is empty."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether no rank had data left in the last applied round. The same on all ranks after the same round."""

    @property
    @abstractmethod
    def parameters(self) -> Tensor:
        """The model's parameters as one flat tensor that shares their memory."""

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """The user's optimizer's present learning rate (of its first group)."""

    @property
    @abstractmethod
    def has_momentum(self) -> bool:
        """Whether the user's optimizer averages past gradients (momentum, Adam's first moment)."""

    @property
    @abstractmethod
    def seconds_per_sample(self) -> float:
        """What this rank's last micro-batches took to compute, smoothed; 0.0 before the first."""

    # ---- communication: starting it takes no time

    @abstractmethod
    def all_reduce(self, gradient: Gradient) -> Work[Gradient]:
        """Start to add the gradients (sums and counts) of all ranks. It uses up what is given; the result is equal,
        bit for bit, on every rank. All ranks start the same collectives in the same order, and a rank hands in its
        gradients in the order in which it computed them."""

    @abstractmethod
    def all_gather(self, value: float) -> Work[tuple[float, ...]]:
        """Start to collect one number of every rank, in the order of the ranks."""

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
