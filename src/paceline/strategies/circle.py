"""A rank's exchange with its neighbours, round by round: what travels in `gossip`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.node import Message, Node
from paceline.rules.mixing import pull
from paceline.rules.plans import Plan
from paceline.strategies.company import Company

if TYPE_CHECKING:
    from torch import Tensor


class Circle(Company):
    """A rank's exchange with its neighbours, round by round. A neighbour may be a round ahead, or gone, or lost."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.round = -1  # over all meetings
        self._early: dict[tuple[int, int], Tensor] = {}
        self._gone: dict[int, int] = {}

    def form(self, plan: Plan, first_round: int) -> None:
        """By a plan for those who are here, each by its place among them."""
        self._plan, self._place, self.round = plan, self.here.index(self.node.rank), first_round - 1
        self._neighbours = [self.here[place] for place in plan.graph.neighbours(self._place)]

    def share(self) -> None:
        """A round begins: this rank's model goes to those with whom it mixes."""
        self.round += 1
        for rank in self._partners():
            self.node.send(rank, f"model {self.round}", self.node.parameters)

    async def difference(self) -> Tensor | None:
        """Σ_j W_ij (x_j − x_i) over the neighbours of this round; None if there is none."""
        await self.hear_what_came()
        while any((self.round, rank) not in self._early for rank in self._partners()):
            await self.hear_next()
        return pull(self.node.parameters, [(self._early.pop((self.round, j)), w) for j, w in self._partners().items()])

    async def leave(self) -> None:
        """Tell the neighbours, and wait until they have left too."""
        for rank in self._neighbours:
            self.node.send(rank, f"leaves {self.round}")
        await self.until_gone(self._neighbours, self._gone)
        self._early.clear()
        self._gone.clear()

    def _partners(self) -> Mapping[int, float]:
        weights = self._plan.weights(self._place, self.round)
        return {self.here[j]: weight for j, weight in weights.items() if self._takes_part(self.here[j])}

    def _takes_part(self, rank: int) -> bool:
        """In this round: a neighbour that has gone has taken part in its last one, a lost one if its model has come."""
        if rank in self.lost:
            return (self.round, rank) in self._early
        return self._gone.get(rank, self.round) >= self.round

    def hear(self, message: Message) -> None:
        what, round_number = message.kind.split()
        if what == "leaves":
            self._gone[message.sender] = int(round_number)
        else:
            self._early[int(round_number), message.sender] = message.tensors[0]
