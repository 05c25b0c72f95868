"""What a simulated rank learns with: behind a small interface, so that the driver never asks which it is.

A `Learner` computes: with tensors (`replica_learner`), or with nothing but counts, so that thousands of workers are
cheap (`TimingLearner`; this module never imports torch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from paceline.node import Gradient, Share, Values
from paceline.rules.codes import code_bytes
from paceline.rules.learning_rate import Steps, StepScale
from paceline.rules.noise import NoiseScale

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.backends.watch import Watch


class Learner(Protocol):
    """One rank's model and optimizer, or what stands for them."""

    @property
    def nbytes(self) -> int:
        """Size of one contribution to an all-reduce."""

    @property
    def parameters(self) -> Tensor: ...

    @property
    def steps(self) -> Steps: ...

    @property
    def divisible(self) -> bool: ...

    @property
    def noise(self) -> NoiseScale: ...

    def compute(self, samples: list[range]) -> Gradient:
        """The gradient of a micro-batch, at the parameters of now."""

    def contribution(self, gradient: Gradient, working: bool) -> tuple[Any, bool]:
        """What travels, and whether it is sound (finite). `working`: this rank still has data."""

    def reduce(self, contributions: Sequence[Any]) -> Any:
        """The sum of all ranks' contributions, added in the order of the ranks."""

    def total(self, own: Any, reduced: Any) -> tuple[Values | None, int, bool]:
        """The sum in this rank's own memory, how many samples it is over, and whether some rank still has data."""

    def apply(self, gradient: Gradient, scale: StepScale) -> float:
        """One step with the gradient's mean; returns its norm."""

    def look_ahead(self, gradient: Gradient, scale: StepScale, further: bool) -> None:
        """Until the next step, compute where a step with this would lead."""

    def model(self, weight: float) -> Values | None:
        """The parameters as a contribution that weighs so much."""

    def movement(self, model: Tensor, common: Tensor, weight: float) -> Values | None:
        """How far a model has moved from a common one, as a contribution that weighs so much."""

    def travelling(self, contributions: Sequence[Any]) -> int:
        """Bytes that each rank sends for these of all ranks."""

    def share(self, share: Share) -> Values | None:
        """The part of the parameters that it brings to the mean model."""

    def mean(self, gradient: Gradient) -> Tensor | None:
        """The gradient's mean as one flat tensor, in memory that the next call uses again; None if not finite."""

    def step(self, mean: Tensor, scale: StepScale, first: int) -> float:
        """One step with a mean gradient of the parameters from the place `first` on; returns its norm."""

    @property
    def sizes(self) -> Sequence[int]:
        """Numbers in each parameter."""

    @property
    def epoch(self) -> int:
        """Which pass over the data the last micro-batch was of."""

    def adopt(self, total: Gradient) -> None:
        """The mean of the models becomes the model."""

    def copies(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What a message carries: the sender may change its tensors the moment after."""

    def take_over(self, other: Any) -> None:
        """Become what the learner of another rank is, after a round that all ranks have."""

    def leaked(self) -> str:
        """The mode that the coroutine has left switched on while it waits; '' when all is well."""

    def sending_as(self, code: str) -> Learner:
        """The same, whose gradients travel in that code; see `rules.codes`."""

    def watched_by(self, watch: Watch) -> None:
        """Who tells the user what the learner alone can see."""


BYTES = 4  # of a number
LAYERS = 64  # of a model that nobody computes: enough to be cut into parts


class Weightless:
    """Stands for a model's parameters where nothing is computed: it has a size and no values. Whatever a strategy adds
    to it or takes from it is the same thing again. (A tensor on torch's `meta` device would do, fifty times slower.)

    >>> model = Weightless(nbytes=4_000_000)
    >>> (model * 0.5).add_(model, alpha=0.5).nbytes
    4000000
    """

    dtype = None

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @property
    def shape(self) -> tuple[int]:
        return (self.nbytes // BYTES,)

    def norm(self) -> float:
        return 0.0

    def _itself(self, *_: object, **__: object) -> Weightless:
        return self

    def __getitem__(self, part: slice) -> Weightless:
        first, last, _ = part.indices(self.nbytes // BYTES)
        return Weightless((last - first) * BYTES)

    __add__ = __sub__ = __mul__ = _itself
    add_ = sub_ = mul_ = div_ = neg_ = lerp_ = copy_ = zero_ = clone = _itself


@dataclass(frozen=True)
class TimingLearner:
    """Counts samples and computes nothing. It has no state: one may serve all ranks.

    Args:
        nbytes: what one contribution weighs; a million float32 parameters by default.
        code: in which it travels.
    """

    nbytes: int = 4_000_000
    steps: Steps = Steps()  # noqa: RUF009  (a frozen value)
    divisible: bool = True
    epoch: int = 0
    noise: NoiseScale = field(default_factory=NoiseScale)
    code: str = "none"

    def sending_as(self, code: str) -> TimingLearner:
        return self if code == self.code else replace(self, code=code)

    @cached_property
    def parameters(self) -> Tensor:
        return cast("Tensor", Weightless(self.nbytes))

    def compute(self, samples: list[range]) -> Gradient:
        return Gradient(None, len(samples[0]) if len(samples) == 1 else sum(map(len, samples)), samples)

    def contribution(self, gradient: Gradient, working: bool) -> tuple[tuple[int, bool], bool]:
        return (gradient.count, working), True

    def reduce(self, contributions: Sequence[tuple[int, bool]]) -> tuple[int, bool]:
        return sum(count for count, _ in contributions), any(working for _, working in contributions)

    def total(self, own: tuple[int, bool], reduced: tuple[int, bool]) -> tuple[None, int, bool]:
        return None, *reduced

    def apply(self, gradient: Gradient, scale: StepScale) -> float:
        return 0.0

    def look_ahead(self, gradient: Gradient, scale: StepScale, further: bool) -> None:
        pass

    def model(self, weight: float) -> None:
        return None

    def movement(self, model: Tensor, common: Tensor, weight: float) -> None:
        return None

    def travelling(self, contributions: Sequence[Any]) -> int:
        return self.nbytes if self.code == "none" else code_bytes(self.code, self.nbytes // BYTES)

    def share(self, share: Share) -> None:
        return None

    def mean(self, gradient: Gradient) -> Tensor:
        return self.parameters

    def step(self, mean: Tensor, scale: StepScale, first: int) -> float:
        return 0.0

    @cached_property
    def sizes(self) -> Sequence[int]:
        size, more = divmod(self.nbytes // BYTES, LAYERS)
        return [size + (place < more) for place in range(LAYERS)]

    def adopt(self, total: Gradient) -> None:
        pass

    def copies(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def take_over(self, other: Any) -> None:
        pass

    def leaked(self) -> str:
        return ""

    def watched_by(self, watch: Watch) -> None:
        pass
