"""Elastic averaging SGD: replicas explore by themselves, tied to a centre by springs (Zhang et al. 2015, 1412.6651).

    w_i ← w_i − η · g_i                                        K times on worker i
    w_i ← w_i − ρ (w_i − z),     z ← z + ρ Σ_j (w_j − z)       both with the models of before

[paper]  z is the model that counts. nρ = 0.9 (their β), whatever the number n of workers. K is their τ.
[ours]   the synchronous form, as one all-reduce of the replicas: everybody makes K steps and waits for the slowest. It
         is the baseline of Adaptive SGD's authors; `local-sgd` is the same with the replicas drawn all the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Node
from paceline.strategies.centre import Centre
from paceline.strategies.checks import at_least, share_of_one
from paceline.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class ElasticAveraging(Strategy):
    """Elastic averaging: K steps alone, then replicas and centre are drawn towards each other.

    Args:
        steps: between two averages (K).
        elasticity: how far the centre moves to the mean of the replicas; a replica moves to the centre by as much,
            divided by the number of workers.
    """

    name: ClassVar[str] = "elastic-averaging"
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    steps: int = 8
    elasticity: float = 0.9

    def __post_init__(self) -> None:
        at_least(self, "steps", 1)
        share_of_one(self, "elasticity")

    async def worker(self, node: Node) -> None:
        centre = Centre(node, self.elasticity, momentum=0.0)
        while not node.finished:
            for _ in range(self.steps):
                gradient = await node.gradient()
                if not gradient.count:  # no more data
                    break
                centre.step(gradient)
            centre.take_in(await centre.start())
