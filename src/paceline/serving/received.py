"""A push as its server takes it in: checked, because it comes from another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Received:
    """One push.

    Args:
        worker: who pushed.
        number: of its pushes.
        samples: that the gradient is the mean of; 0 if there is none.
        handed_in: samples of the worker up to these.
        seconds: that its last iteration took, without waiting for others; 0.0 if it is not known.
    """

    __slots__ = ("delay", "handed_in", "mean", "number", "samples", "seconds", "worker")

    def __init__(
        self, worker: int, number: str = "0", samples: str = "0", handed_in: str = "0", seconds: str = "0.0"
    ) -> None:
        self.worker, self.number, self.samples = worker, int(number), int(samples)
        self.handed_in, self.seconds = int(handed_in), float(seconds)
        self.delay = 0
        self.mean: Any = None  # kept where a round is stepped with together


def dense(tensors: Sequence[Tensor], parameters: Tensor) -> Tensor:
    """The gradient of a push, for parameters of this shape: it came so, or as places and values."""
    found = f"{len(tensors)} tensors"
    if len(tensors) == 2 and tensors[1].dtype == parameters.dtype:
        from paceline.rules.compression import Sparse

        push = Sparse(tensors[0], tensors[1], len(parameters))
        push.check()
        return push.add_to(parameters.new_zeros(len(parameters)))
    if len(tensors) == 1:
        [mean] = tensors
        if (mean.shape, mean.dtype) == (parameters.shape, parameters.dtype):
            return mean
        found = f"a tensor of shape {tuple(mean.shape)} and {mean.dtype}"
    raise PacelineError(
        f"A push holds {found} where a gradient of shape {tuple(parameters.shape)} and {parameters.dtype} belongs.",
        cause="The worker does not train the same model.",
    )
