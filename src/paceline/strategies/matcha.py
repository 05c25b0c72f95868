"""MATCHA: of the graph's edges only some in each round, the important ones more often (arXiv 1905.09435).

    x_i ← x_i + α Σ_j (x_j − x_i) − η · g_i(x_i)      over the neighbours j in the matchings that are drawn

[paper]  matchings, probabilities p for a budget of communication, and the best α: see `rules.matcha`. All workers draw
         the same matchings.
[ours]   a hash of seed and round draws them. At the end all take the mean of all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.rules.graph_text import matchings_in
from paceline.rules.plans import Plan, drawn
from paceline.strategies.checks import share_of_one
from paceline.strategies.gossip import Gossip


@dataclass(frozen=True, kw_only=True)
class Matcha(Gossip):
    """MATCHA: D-PSGD that exchanges models over a part of the graph's edges in each round.

    Args:
        graph: `ring`, `torus`, `complete`, `star`, `exponential`, `erdos-renyi`, edges as in `0-1+1-2`, or matchings as
            in `0-1+2-3/1-2`.
        probability: of an edge of `erdos-renyi`; 0 for one that makes it connected.
        seed: of the draws, and of `erdos-renyi`.
        budget: the part of the matchings that a round uses on average, above 0 and at most 1.
        momentum: `local`, `quasi-global` (for unequal data), or `acid` (A²CiD²: faster on large sparse graphs).
        micro_batches: computed by every worker in a round.
    """

    name: ClassVar[str] = "matcha"
    budget: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        share_of_one(self, "budget")

    def plan(self, workers: int, here: Sequence[int]) -> Plan:
        given = matchings_in(self.graph) if (*here,) == (*range(workers),) else None  # others have other edges
        return drawn(self.graph_for(workers, here), self.budget, self.seed, given)
