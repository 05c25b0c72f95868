"""What a simulated rank learns with and from: behind two small interfaces, so that the driver never asks which it is.

A `Learner` computes: with tensors (`replica_learner`), or with nothing but counts, so that thousands of workers are
cheap (`TimingLearner`; this module never imports torch). A `Source` hands out samples: the exactly-once ledger, or an
endless counter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paceline.control.ledger import Ledger
from paceline.errors import PacelineError
from paceline.node import Gradient

if TYPE_CHECKING:
    from torch import Tensor


class Learner(Protocol):
    """One rank's model and optimizer, or what stands for them."""

    @property
    def nbytes(self) -> int:
        """Size of one contribution to an all-reduce."""

    @property
    def parameters(self) -> Tensor: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def has_momentum(self) -> bool: ...

    def compute(self, samples: list[range]) -> Gradient:
        """The gradient of a micro-batch, at the parameters of now."""

    def contribution(self, gradient: Gradient, working: bool) -> tuple[Any, bool]:
        """What travels, and whether it is sound (finite). `working`: this rank still has data."""

    def reduce(self, contributions: Sequence[Any]) -> Any:
        """The sum of all ranks' contributions, added in the order of the ranks."""

    def total(self, own: Any, reduced: Any) -> tuple[Tensor | None, int, bool]:
        """The sum in this rank's own memory, how many samples it is over, and whether some rank still has data."""

    def apply(self, gradient: Gradient) -> None:
        """One step with the gradient's mean."""

    def copies(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a message carries: the sender may change its tensors the moment after."""

    def leaked(self) -> str:
        """The mode that the coroutine has left switched on while it waits; '' when all is well."""


@dataclass(frozen=True)
class TimingLearner:
    """Counts samples and computes nothing. It has no state: one may serve all ranks.

    Args:
        nbytes: what one contribution weighs in the network; a million float32 parameters by default.
    """

    nbytes: int = 4_000_000
    learning_rate: float = 0.0
    has_momentum: bool = False

    @property
    def parameters(self) -> Tensor:
        raise PacelineError(
            "The strategy asks for the parameters, and a timing-only simulation has none.",
            remedy="Simulate it with real gradients: give simulate(..., learners=...).",
        )

    def compute(self, samples: list[range]) -> Gradient:
        return Gradient(None, len(samples[0]) if len(samples) == 1 else sum(map(len, samples)), samples)

    def contribution(self, gradient: Gradient, working: bool) -> tuple[tuple[int, bool], bool]:
        return (gradient.count, working), True

    def reduce(self, contributions: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
        return sum(count for count, _ in contributions), any(working for _, working in contributions)

    def total(self, own: tuple[int, bool], reduced: tuple[int, bool]) -> tuple[Tensor | None, int, bool]:
        return None, *reduced

    def apply(self, gradient: Gradient) -> None:
        pass

    def copies(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def leaked(self) -> str:
        return ""


@dataclass(frozen=True)
class Data:
    """How much there is to learn from.

    Args:
        samples: length of the data set.
        epochs: how often each sample is used; `None` for as long as the run lasts.
    """

    samples: int
    epochs: int | None = None


class Source(Protocol):
    """Who gets which samples, and what became of them."""

    def take(self, rank: int) -> list[range]:
        """One micro-batch; [] when there is none now."""

    def contribute(self, rank: int, round_number: int, samples: Iterable[range]) -> None: ...

    def commit(self, round_number: int, members: Collection[int]) -> None:
        """The round was applied, with these ranks' contributions in its sum (also of one that crashed since)."""

    def discard(self, rank: int, samples: Iterable[range], reason: str) -> None: ...

    def release(self, rank: int) -> None: ...


class Endless:
    """Always the next positions. A run that only a time limits loses nothing, so there is nothing to keep books on."""

    def __init__(self, micro_batch: int) -> None:
        self._next, self._micro_batch = 0, micro_batch

    def take(self, rank: int) -> list[range]:
        start = self._next
        self._next = stop = start + self._micro_batch
        return [range(start, stop)]

    def contribute(self, rank: int, round_number: int, samples: Iterable[range]) -> None:
        pass

    def commit(self, round_number: int, members: Collection[int]) -> None:
        pass

    def discard(self, rank: int, samples: Iterable[range], reason: str) -> None:
        pass

    def release(self, rank: int) -> None:
        pass


class Leases(Ledger):
    """The ledger of real runs, asked for one micro-batch at a time: in virtual time an answer takes no time."""

    def take(self, rank: int) -> list[range]:
        return self.lease(rank, 1)
