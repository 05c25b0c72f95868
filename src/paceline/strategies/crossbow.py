"""CROSSBOW's synchronous model averaging: after every batch replicas are corrected to a centre with momentum (Koliousis
et al. 2019, arXiv 1901.02244).

    c_i = (w_i − z) / n
    w_i ← w_i − η · g_i(w_i) − c_i,     z ← z + Σ_j c_j + μ (z − z_before)

[paper]  gradient and correction are of the same w_i, in every iteration; z is the model that counts.
[ours]   one all-reduce of the replicas, which travels while the gradient is computed. One replica on each worker: the
         paper has several on a GPU, to fill it with small batches, and tunes how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Node
from paceline.strategies.centre import Centre
from paceline.strategies.checks import at_least
from paceline.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Crossbow(Strategy):
    """CROSSBOW: a step of each replica, corrected to the common model, for every batch.

    Args:
        momentum: of the common model (μ).
    """

    name: ClassVar[str] = "crossbow"
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    momentum: float = 0.9

    def __post_init__(self) -> None:
        at_least(self, "momentum", 0.0)

    async def worker(self, node: Node) -> None:
        centre = Centre(node, 1.0, self.momentum)
        while not node.finished:
            averaging = centre.start()
            gradient = await node.gradient()
            centre.take_in(await averaging)
            centre.step(gradient)
        node.adopt(await centre.start())  # a step with the last gradient, if there was one, is in no replica yet
