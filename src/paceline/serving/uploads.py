"""What a worker sends of its gradients: all of them, or the largest entries while the rest waits; see
`rules.compression`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.node import Node

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.rules.compression import Compressor
    from paceline.strategies.parameter_server import ParameterServer

DGC_MOMENTUM = 0.9


class Upload:
    """One worker's uploads.

    Args:
        options: the strategy.
        node: the worker.
    """

    def __init__(self, options: ParameterServer, node: Node) -> None:
        self._compressor = None if options.compress == "none" else compressor(options, node)
        self._epoch = 0
        alone = options.placement(node.workers, node.servers).groups == 1
        self.speeds: Sequence[float] = (0.0,) if alone else ()
        """Seconds of an iteration of each group, on average; of none while they are not known. Of one alone they do not
        matter, and nobody tells them."""

    def epoch_ended(self, epoch: int) -> bool:
        """Whether this is the first micro-batch of another epoch."""
        return self._compressor is not None and epoch != self._epoch

    def begin(self, epoch: int, group: int) -> None:
        """Another epoch begins; while nobody knows the groups' speeds its ratio is that of the first."""
        self._epoch = epoch
        if self._compressor is not None:
            known = len(self.speeds) > group
            self._compressor.begin(epoch if known else min(epoch, 1), self.speeds, group)

    def parts(self, mean: Tensor | None, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[Tensor, ...]]:
        """What goes to each server of the group: a part of the gradient; or places in that part and what stands there.
        Nothing, of a gradient that was discarded."""
        if mean is None:
            yield from (() for _ in bounds)
        elif self._compressor is None:
            yield from ((mean[first:last],) for first, last in bounds)
        else:
            yield from self._sparse_parts(mean, bounds)

    def _sparse_parts(self, mean: Tensor, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[Tensor, ...]]:
        from paceline.rules.compression import Sparse

        assert self._compressor is not None
        pushed = self._compressor.push(mean)
        assert isinstance(pushed, Sparse)
        yield from pushed.parts(bounds)

    def rest(self) -> Tensor | None:
        """All that was kept back."""
        return None if self._compressor is None else self._compressor.flush()


def compressor(options: ParameterServer, node: Node) -> Compressor:
    """Of the kind that the strategy's options name."""
    import torch

    from paceline.rules.compression import Dgc, GDTopK, TopK

    like = node.parameters
    if not isinstance(like, torch.Tensor):
        raise PacelineError(
            f"compress={options.compress} needs gradients, and a simulation of timing alone has none.",
            remedy="Race it with real gradients: paceline race --backend simulated.",
        )
    if options.compress == "top-k":
        return TopK(like, options.ratio)
    if options.compress == "gdtopk":
        return GDTopK(like, options.direction)
    if node.steps.momentum and not node.steps.adaptive:
        raise PacelineError(
            f"compress=dgc has its own momentum, and the optimizer's is {node.steps.momentum:g}.",
            cause="Both together would count a gradient twice as far.",
            remedy="Make the optimizer without momentum, or take compress=top-k.",
        )
    return Dgc(like, options.ratio, DGC_MOMENTUM)
