"""How a rank's model moves where ranks step alone: towards its neighbours' models, and by its own steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.node import Gradient, Node
from paceline.rules.acid import Acid, drift_
from paceline.rules.learning_rate import StepScale
from paceline.rules.quasi_global import remember_

if TYPE_CHECKING:
    from torch import Tensor

MOMENTA = ("local", "quasi-global", "acid")
WITHOUT_MOMENTUM = StepScale(momentum=0.0)


class Mover:
    """The plain way: `local` momentum, which is whatever the user's optimizer does on this rank."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def begin(self) -> None:
        """A round begins: the gradient will be computed at the model of now."""

    def move(self, difference: Tensor) -> None:
        """Towards the neighbours: what is added to this model was taken from theirs."""
        self._node.parameters.add_(difference)

    def step(self, gradient: Gradient) -> None:
        """This rank's own step, and the end of its round."""
        self._node.apply(gradient)
        self._node.settle(gradient)

    def meet(self) -> None:
        """All ranks hold the same model now."""


class QuasiGlobal(Mover):
    """See `rules.quasi_global`: the momentum of the user's SGD is switched off, and its β used here."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        if node.steps.adaptive or not node.steps.momentum:
            raise PacelineError(
                "Quasi-global momentum needs SGD with a momentum.",
                cause="It takes the place of the optimizer's own momentum, and has its β from there.",
                remedy="Take torch.optim.SGD(..., momentum=0.9), or leave momentum=quasi-global out.",
            )
        if "quasi_global" not in node.state:
            node.state["quasi_global"] = node.parameters.clone().zero_()
        self._momentum: Tensor = node.state["quasi_global"]
        self._before = node.parameters.clone()

    def begin(self) -> None:
        self._before.copy_(self._node.parameters)

    def step(self, gradient: Gradient) -> None:
        steps, model = self._node.steps, self._node.parameters
        if gradient.count:
            model.sub_(self._momentum, alpha=steps.learning_rate * steps.momentum)
        self._node.apply(gradient, WITHOUT_MOMENTUM)
        self._node.settle(gradient)
        if steps.learning_rate:
            remember_(self._momentum, self._before, model, steps.learning_rate, steps.momentum)


class Accelerated(Mover):
    """A²CiD², see `rules.acid`: a second copy of the model, and a drift between the two.

    Args:
        node: of this rank.
        constants: of the graph; the unit of time is a round of this rank.
    """

    def __init__(self, node: Node, constants: Acid) -> None:
        super().__init__(node)
        self._constants = constants
        if "second_copy" not in node.state:
            node.state["second_copy"] = node.parameters.clone()
        self._second: Tensor = node.state["second_copy"]

    def move(self, difference: Tensor) -> None:
        super().move(difference)
        self._second.add_(difference, alpha=2 * self._constants.alpha_tilde)  # x moves by α = ½ of what lies between

    def step(self, gradient: Gradient) -> None:
        model = self._node.parameters
        drift_(model, self._second, self._constants.eta, 1.0)
        before = model.clone()
        super().step(gradient)
        self._second.add_(model - before)

    def meet(self) -> None:
        self._second.copy_(self._node.parameters)


def mover(node: Node, momentum: str, constants: Acid) -> Mover:
    """Of one of the kinds in `MOMENTA`."""
    match momentum:
        case "quasi-global":
            return QuasiGlobal(node)
        case "acid":
            return Accelerated(node, constants)
    return Mover(node)
