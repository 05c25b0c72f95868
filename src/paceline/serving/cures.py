"""What a worker does about it that its gradients come late: others step while it computes.

    momentum   v ← β·v + x;   push x + β·v        kept by the worker, not by the server: see `rules.delay.lead_`
    predict    compute at  w + (N−1)/N · (w − w of the pull before):  where the other N − 1 will have brought it when
               the gradient arrives, if all go on as they did
    both       with Adam the server's β₂ is raised to 1/N: see `scale_at_server`

Where a group steps together, with a bound of 0, no gradient is late and nothing is cured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.node import Node
from paceline.rules.delay import lead_
from paceline.rules.learning_rate import StepScale

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.strategies.parameter_server import ParameterServer

CURES = ("auto", "momentum", "predict", "none")


def workers_keep_momentum(options: ParameterServer, node: Node) -> bool:
    """Whether workers keep it: that of SGD. Adam's is not a sum of gradients, and clipping at a server is meant for
    gradients, not for sums of many."""
    late = options.delay_cure in ("auto", "momentum") and options.bound.high > 0 and node.workers > 1
    return late and node.steps.momentum > 0 and not node.steps.adaptive and not node.steps.clips


def scale_at_server(options: ParameterServer, node: Node, scale: float) -> StepScale:
    """Of a step with a push. Adam forgets the size of gradients as fast as in synchronous training, a round of pushes
    counting as one; its direction it may forget sooner: gradients that come late are a momentum themselves. Where
    workers keep the momentum the server has none; weight decay, which torch's SGD sends through the momentum, is then
    as much stronger as that would have made it."""
    if not workers_keep_momentum(options, node):
        late = options.delay_cure != "none" and options.bound.high > 0
        return StepScale(scale, size_power=scale if late else 1.0)
    return StepScale(scale, momentum=0.0, weight_decay=1 / (1 - node.steps.momentum))


class Cure:
    """One worker's.

    Args:
        options: the strategy.
        node: the worker.
    """

    def __init__(self, options: ParameterServer, node: Node) -> None:
        self._options, self._node = options, node
        self._others = (node.workers - 1) / node.workers
        self._predicts = options.delay_cure in ("auto", "predict") and options.bound.high > 0 and self._others > 0
        self._before = node.parameters.clone() if self._predicts else node.parameters
        self._known: set[int] = set()  # parts of the model whose last parameters are known

    def entered(self) -> None:
        """The worker is with a group whose parameters it has not had before."""
        self._known.clear()

    def pushed(self, mean: Tensor) -> Tensor:
        """What to push of a gradient, in its memory."""
        state = self._node.state
        if workers_keep_momentum(self._options, self._node):
            if "velocity" not in state:
                state["velocity"] = mean.clone().zero_()
            lead_(state["velocity"], mean, self._node.steps.momentum)
        return mean

    def arrived(self, part: tuple[int, int], parameters: Tensor) -> None:
        """Parameters that were pulled: compute at these, or at where they will be."""
        first, last = part
        here = self._node.parameters[first:last].copy_(parameters)
        if self._predicts:
            before = self._before[first:last]
            if first in self._known:
                here.lerp_(before, -self._others)  # in one pass over the model: w + others · (w − before)
            before.copy_(parameters)
            self._known.add(first)
