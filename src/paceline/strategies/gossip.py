"""Rounds among neighbours: what D-PSGD, MATCHA and Non-blocking SGD on their graphs have in common.

    x_i ← x_i + Σ_j W_ij (x_j − x_i),     x_i ← x_i − η g_i(x_i of before)

A round begins by sending x_i to the neighbours. It travels while this rank computes, and nobody else hears of it. Who
has no data left says so and goes; its neighbours then keep its weight themselves. When all have gone, everybody takes
the mean of all models. The same happens when somebody calls all together, to save say; then they go on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.node import Gradient, Message, Node
from paceline.rules.acid import Acid, in_rounds
from paceline.rules.graph_text import graph_of
from paceline.rules.graphs import Graph
from paceline.rules.mixing import pull
from paceline.rules.plans import Plan
from paceline.strategies.checks import at_least, one_of
from paceline.strategies.movers import MOMENTA, mover
from paceline.strategies.strategy import Strategy

if TYPE_CHECKING:
    from torch import Tensor

Batch = Callable[[int], Awaitable[tuple[Gradient, bool]]]
"""This rank's gradient of a round, and whether it has data left."""


class Circle:
    """A rank's exchange with its neighbours, round by round. A neighbour may be a round ahead, or gone."""

    def __init__(self, node: Node, plan: Plan) -> None:
        self.node, self._plan = node, plan
        self._neighbours = plan.graph.neighbours(node.rank)
        self.round = -1  # over all meetings
        self._early: dict[tuple[int, int], Tensor] = {}
        self._gone: dict[int, int] = {}

    def share(self) -> None:
        """A round begins: this rank's model goes to those with whom it mixes."""
        self.round += 1
        for rank in self._partners():
            self.node.send(rank, f"model {self.round}", self.node.parameters)

    async def difference(self) -> Tensor | None:
        """Σ_j W_ij (x_j − x_i) over the neighbours of this round; None if there is none."""
        weights = self._partners()
        while any((self.round, rank) not in self._early for rank in weights):
            self._hear(await self.node.receive())
            weights = self._partners()
        return pull(self.node.parameters, [(self._early.pop((self.round, j)), w) for j, w in weights.items()])

    async def leave(self, first_round: int) -> None:
        """Tell the neighbours, and wait until they have left too. The next round of all is `first_round`."""
        for rank in self._neighbours:
            self.node.send(rank, f"leaves {self.round}")
        while len(self._gone) < len(self._neighbours):
            self._hear(await self.node.receive())
        self._early.clear()
        self._gone.clear()
        self.round = first_round - 1

    def _partners(self) -> Mapping[int, float]:
        """Who mixes with this rank in this round: a neighbour that has gone has taken part in its last round."""
        weights = self._plan.weights(self.node.rank, self.round)
        return {rank: weight for rank, weight in weights.items() if self._gone.get(rank, self.round) >= self.round}

    def _hear(self, message: Message) -> None:
        what, round_number = message.kind.split()
        if what == "leaves":
            self._gone[message.sender] = int(round_number)
        else:
            self._early[int(round_number), message.sender] = message.tensors[0]


async def gossip(node: Node, plan: Plan, momentum: str, batch: Batch) -> None:
    """What one rank does from the first sample to the last."""
    circle = Circle(node, plan)
    constants, part = NOT_ACCELERATED
    if momentum == "acid":
        constants, part = in_rounds(plan.graph, plan.mean_weights(), plan.largest)
    moves = mover(node, momentum, constants)
    meetings = 0
    while not node.finished:
        has_data = True
        while has_data and not node.called_together:
            moves.begin()
            circle.share()
            gradient, has_data = await batch(circle.round)
            difference = await circle.difference()
            if difference is not None:
                moves.move(difference.mul_(part))
            if has_data:
                moves.step(gradient)
        meetings += 1
        await circle.leave(meetings * ROUNDS_APART)
        node.adopt(await node.mean_model())
        moves.meet()


NOT_ACCELERATED = Acid(0.0, 0.0), 1.0  # constants that nobody asks for, and all of the mixing
ROUNDS_APART = 2**32  # no rank makes so many between two meetings: each then begins at the same number on all ranks


@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy):
    """What the strategies on a graph have in common: which graph it is, and what kind of momentum."""

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

    def graph_for(self, workers: int) -> Graph:
        return graph_of(self.graph, workers, self.probability, self.seed)

    @abstractmethod
    def plan(self, workers: int) -> Plan:
        """Who mixes with whom."""

    async def worker(self, node: Node) -> None:
        async def batch(round_number: int) -> tuple[Gradient, bool]:
            gradient = await node.gradient()
            for _ in range(self.micro_batches - 1):
                gradient += await node.gradient()
            return gradient, gradient.count > 0

        await gossip(node, self.plan(node.world_size), self.momentum, batch)
