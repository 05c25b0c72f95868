"""Replicas that keep models of their own, drawn to a common one: what elastic averaging and CROSSBOW share."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from paceline.node import Gradient, Node, Work
from paceline.rules.merging import draw_, push_on_

if TYPE_CHECKING:
    from torch import Tensor

NOTHING = Gradient(None, 0)


def end_round(node: Node) -> None:
    """Whoever looks at the parameters of a round, or saves them, does it now, while all ranks hold the same ones."""
    node.look_ahead(NOTHING)


class Centre:
    """The common model z, which is the model of the run. Each rank has a copy, moved by the same sums to the same bits.

        w_i ← w_i − ρ (w_i − z),     z ← z + ρ Σ (w_i − z) + μ (z − z_before),     nρ = elasticity

    Args:
        node: of this rank.
        elasticity: how far the centre moves to the mean of the replicas; 1 is all the way.
        momentum: μ.
    """

    def __init__(self, node: Node, elasticity: float, momentum: float) -> None:
        self._node, self._elasticity, self._momentum = node, elasticity, momentum
        for name in ("centre", "centre_before"):
            if name not in node.state:
                node.state[name] = node.parameters.clone()
        self._own: Tensor = node.parameters.clone()
        self._count = 0
        self._samples: list[range] = []

    def step(self, gradient: Gradient) -> None:
        """The rank's own step, which its next contribution settles."""
        self._node.apply(gradient)
        self._count += gradient.count
        self._samples += gradient.samples

    def start(self) -> Work[Gradient]:
        """Start to add up all replicas: each counts as one, whatever its samples."""
        work = self._node.all_reduce(self._node.model(self._count, self._samples, weight=1.0))
        self._count, self._samples = 0, []
        return work

    def take_in(self, total: Gradient) -> None:
        """All replicas have arrived, and this one has not moved since it left."""
        node, centre = self._node, self._node.state["centre"]
        self._own.copy_(node.parameters)
        draw_(self._own, centre, self._elasticity / len(total.ranks))
        model = node.parameters
        model.copy_(centre)  # what stays if nobody has brought a finite model
        node.adopt(total)
        model.mul_(self._elasticity).add_(centre, alpha=1 - self._elasticity)
        push_on_(model, centre, node.state["centre_before"], self._momentum)
        if not node.finished:
            end_round(node)
            if isfinite(self._own.norm()):  # a replica that is not begins again from the centre
                model.copy_(self._own)
