"""AD-PSGD: asynchronous and without a centre; pairs of workers average now and then (arXiv 1710.06952).

    worker i, all the time:   g ← g_i(x_i)
                              x_i, x_j ← (x_i + x_j)/2      atomically, j a random neighbour
                              x_i ← x_i − η g

[paper]  nobody waits for a round. Who asks (active) and who answers (passive) are the two sides of a bipartite graph,
         so that no two ever wait for each other.
[ours]   nobody waits at all: x_i travels to j while i computes, j answers with half the difference after its present
         micro-batch, and both move by it, one up, one down. If i has stepped meanwhile, the sum of all models is still
         what it was. So any graph will do, with no sides. A lost rank owes nobody an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Message, Node
from paceline.rules.acid import Acid, acid, even_rates
from paceline.rules.chance import chance
from paceline.rules.graph_text import graph_among
from paceline.rules.graphs import Graph
from paceline.strategies.checks import at_least, one_of
from paceline.strategies.company import Company
from paceline.strategies.movers import MOMENTA, Mover, mover
from paceline.strategies.strategy import Strategy

UNUSED = Acid(0.0, 0.0)  # constants that nobody asks for


@dataclass(frozen=True, kw_only=True)
class AdPsgd(Strategy):
    """AD-PSGD: every worker steps at its own speed, and averages with one random neighbour at a time.

    Args:
        graph: `ring`, `torus`, `complete`, `star`, `exponential`, `erdos-renyi`, or edges as in `0-1+1-2`.
        probability: of an edge of `erdos-renyi`; 0 for one that makes it connected.
        seed: of the choice of neighbours, and of `erdos-renyi`.
        momentum: `local`, `quasi-global` (for unequal data), or `acid` (A²CiD²: faster on large sparse graphs).
    """

    name: ClassVar[str] = "ad-psgd"
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    graph: str = "complete"
    probability: float = 0.0
    seed: int = 0
    momentum: str = "local"

    def __post_init__(self) -> None:
        at_least(self, "probability", 0.0)
        at_least(self, "seed", 0)
        one_of(self, "momentum", MOMENTA)

    @property
    def steps_alone(self) -> bool:
        return True

    async def worker(self, node: Node) -> None:
        pairs = Pairs(node, self.seed)
        while not node.finished:
            graph = graph_among(self.graph, node.world_size, pairs.here, self.probability, self.seed)
            constants = UNUSED  # with A²CiD² one averaging of its own idea, and about one of a neighbour's
            if self.momentum == "acid":
                constants = acid(graph, even_rates(graph, averagings=2.0))
            moves = mover(node, self.momentum, constants)
            pairs.form(graph, moves)
            has_data = True
            while has_data and not pairs.is_called:
                moves.begin()
                pairs.ask()
                gradient = await node.gradient()
                has_data = gradient.count > 0
                await pairs.hear_what_came()
                if has_data:
                    moves.step(gradient)
            await pairs.leave()
            await pairs.meet(moves)


class Pairs(Company):
    """A rank's averagings with single neighbours: at most one of its own idea is on its way."""

    def __init__(self, node: Node, seed: int) -> None:
        super().__init__(node)
        self._seed = seed
        self._asked = 0
        self._answer_due: int | None = None  # from whom
        self._gone: set[int] = set()

    def form(self, graph: Graph, moves: Mover) -> None:
        """On a graph of those who are here, each by its place among them."""
        self._moves = moves
        self._neighbours = [self.here[place] for place in graph.neighbours(self.here.index(self.node.rank))]

    def ask(self) -> None:
        """Send the model to a random neighbour, unless an answer is still due."""
        here = [rank for rank in self._neighbours if rank not in self._gone and rank not in self.lost]
        if here and not self._waits:
            draw = chance("partner", self._seed, self.node.rank, self._asked)
            self._asked, self._answer_due = self._asked + 1, here[int(draw * len(here))]
            self.node.send(self._answer_due, "average", self.node.parameters)

    def hear(self, message: Message) -> None:
        match message.kind:
            case "average" if message.sender == self._answer_due and self.node.rank < message.sender:
                pass  # both have asked each other: if both answered, they would change places. The lower rank's counts.
            case "average":
                if message.sender == self._answer_due:
                    self._answer_due = None
                half = (self.node.parameters - message.tensors[0]).div_(2)
                self.node.send(message.sender, "half", half)
                self._moves.move(half.neg_())
            case "half":
                self._answer_due = None
                self._moves.move(message.tensors[0])
            case "leaves":
                self._gone.add(message.sender)

    @property
    def _waits(self) -> bool:
        return self._answer_due is not None and self._answer_due not in self.lost

    async def leave(self) -> None:
        """Ask nobody any more, and answer until nobody asks."""
        while self._waits:
            await self.hear_next()
        for rank in self._neighbours:
            self.node.send(rank, "leaves")
        await self.until_gone(self._neighbours, self._gone)
        self._gone.clear()
        self._answer_due = None  # a lost rank owes one, and its successor does not
