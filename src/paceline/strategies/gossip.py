"""Rounds among neighbours: what D-PSGD, MATCHA and Non-blocking SGD on their graphs have in common.

    x_i ← x_i + Σ_j W_ij (x_j − x_i),     x_i ← x_i − η g_i(x_i of before)

A round begins by sending x_i to the neighbours. It travels while this rank computes, and nobody else hears of it. Who
has no data left says so and goes; its neighbours then keep its weight themselves, as they do when it is lost. When all
have gone, everybody takes the mean of all models. The same happens when somebody calls all together, to save say, or is
lost; then they go on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from paceline.node import Gradient, Node
from paceline.rules.acid import Acid, in_rounds
from paceline.rules.graph_text import graph_among
from paceline.rules.graphs import Graph
from paceline.rules.plans import Plan
from paceline.strategies.checks import at_least, one_of
from paceline.strategies.circle import Circle
from paceline.strategies.movers import MOMENTA, mover
from paceline.strategies.strategy import Strategy

Batch = Callable[[int], Awaitable[tuple[Gradient, bool]]]
"""This rank's gradient of a round, and whether it has data left."""
NOT_ACCELERATED = Acid(0.0, 0.0), 1.0  # constants that nobody asks for, and all of the mixing
ROUNDS_APART = 2**32  # no rank makes so many between two meetings: each then begins at the same number on all ranks


async def gossip(node: Node, plan_for: Callable[[Sequence[int]], Plan], momentum: str, batch: Batch) -> None:
    """What one rank does from the first sample to the last."""
    circle = Circle(node)
    node.state.setdefault("meetings", 0)
    while not node.finished:
        plan = plan_for(circle.here)
        constants, part = NOT_ACCELERATED
        if momentum == "acid":
            constants, part = in_rounds(plan.graph, plan.mean_weights(), plan.largest)
        moves = mover(node, momentum, constants)
        circle.form(plan, node.state["meetings"] * ROUNDS_APART)
        has_data = True
        while has_data and not circle.is_called:
            moves.begin()
            circle.share()
            gradient, has_data = await batch(circle.round)
            difference = await circle.difference()
            if difference is not None:
                moves.move(difference.mul_(part))
            if has_data:
                moves.step(gradient)
        node.state["meetings"] += 1
        await circle.leave()
        await circle.meet(moves)


@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """What the strategies on a graph have in common: which graph it is, and what kind of momentum."""

    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    graph: str = "ring"
    probability: float = 0.0
    seed: int = 0
    momentum: str = "local"
    micro_batches: int = 1

    def __post_init__(self) -> None:
        at_least(self, "probability", 0.0)
        at_least(self, "seed", 0)
        one_of(self, "momentum", MOMENTA)
        at_least(self, "micro_batches", 1)

    @property
    def steps_alone(self) -> bool:
        return True

    def graph_for(self, workers: int, here: Sequence[int]) -> Graph:
        return graph_among(self.graph, workers, here, self.probability, self.seed)

    @abstractmethod
    def plan(self, workers: int, here: Sequence[int]) -> Plan:
        """Who mixes with whom of those who are here; the run began with so many workers."""

    async def worker(self, node: Node) -> None:
        async def batch(round_number: int) -> tuple[Gradient, bool]:
            gradient = await node.gradient()
            for _ in range(self.micro_batches - 1):
                gradient += await node.gradient()
            return gradient, gradient.count > 0

        await gossip(node, partial(self.plan, node.world_size), self.momentum, batch)
