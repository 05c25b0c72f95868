"""LB-BSP: blocking, but every worker gets work in proportion to its speed (Chen et al., SoCC 2020).

The total batch of a round is fixed; worker i computes n_i micro-batches of it, so that all finish together:

    n_i chosen to minimise max_i n_i · t_i,   Σ n_i = N · k,        t_i = measured seconds a micro-batch

[paper]  total batch fixed, shares by measured speed, re-sized between rounds. The strongest *blocking* baseline.
[ours]   shares are whole micro-batches, re-sized only when that shortens the round by more than the dead band.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Node
from paceline.rules.shares import equal_shares, resized
from paceline.strategies.checks import at_least
from paceline.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Balanced(Strategy):
    """LB-BSP: synchronous SGD with shares in proportion to measured speed.

    Args:
        micro_batches: in a round, on average over the workers. The more, the finer the shares can be.
        dead_band: re-size the shares only when the round becomes shorter by more than this part of it.
    """

    name: ClassVar[str] = "balanced"
    micro_batches: int = 4
    dead_band: float = 0.05

    def __post_init__(self) -> None:
        at_least(self, "micro_batches", 1)
        at_least(self, "dead_band", 0.0)

    async def worker(self, node: Node) -> None:
        counts = equal_shares(node.world_size, self.micro_batches)
        while not node.finished:
            batch = await node.gradient()
            for _ in range(counts[node.rank] - 1):
                batch += await node.gradient()
            speeds = node.all_gather(node.seconds_per_sample)
            node.apply(await node.all_reduce(batch))
            counts = resized(counts, await speeds, self.dead_band)
