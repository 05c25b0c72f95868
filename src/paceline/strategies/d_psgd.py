"""D-PSGD: no centre; every worker averages with its neighbours (Lian et al. 2017, arXiv 1705.09056).

    x_i ← Σ_j W_ij x_j − η · g_i(x_i)          W symmetric, rows sum to one, zero where there is no edge

[paper]  the neighbours' models travel while the gradient is computed, at the model of before. It needs no all-reduce,
         but a worker still waits for the slowest of its neighbours.
[ours]   Metropolis weights by default: they need only the degrees. At the end all take the mean of all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.rules.mixing import RULES
from paceline.rules.plans import Plan, every_round
from paceline.strategies.checks import one_of
from paceline.strategies.gossip import Gossip


@dataclass(frozen=True, kw_only=True)
class DPsgd(Gossip):
    """D-PSGD: in every round each worker averages its model with its neighbours', and steps by itself.

    Args:
        graph: `ring`, `torus`, `complete`, `star`, `exponential`, `erdos-renyi`, or edges as in `0-1+1-2`.
        probability: of an edge of `erdos-renyi`; 0 for one that makes it connected.
        seed: of `erdos-renyi`.
        mixing: `metropolis`, `best-constant`, or on a complete graph `uniform`.
        momentum: `local`, `quasi-global` (for unequal data), or `acid` (A²CiD²: faster on large sparse graphs).
        micro_batches: computed by every worker in a round.
    """

    name: ClassVar[str] = "d-psgd"
    mixing: str = "metropolis"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "mixing", tuple(RULES))

    def plan(self, workers: int, here: Sequence[int]) -> Plan:
        return every_round(self.graph_for(workers, here), self.mixing)
