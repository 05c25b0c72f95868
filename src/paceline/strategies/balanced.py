"""LB-BSP: blocking, but every worker gets work in proportion to its speed (Chen et al., SoCC 2020).

The total batch X of a round is fixed; worker i computes n_i samples of it, so that all finish together:

    n_i = X · v_i / Σ v,        v_i = measured samples a second

[paper]  total batch fixed, shares by measured speed, re-sized between rounds. The strongest *blocking* baseline.
[ours]   re-sized only when that shortens the round by more than the dead band; a share above the user's micro-batch is
         computed in several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Gradient, Node
from paceline.rules.shares import among, equal_shares, resized, share_of
from paceline.strategies.checks import at_least
from paceline.strategies.rounds_of_gradients import RoundsOfGradients


@dataclass(frozen=True, kw_only=True)
class Balanced(RoundsOfGradients):
    """LB-BSP: synchronous SGD with shares in proportion to measured speed.

    Args:
        micro_batches: in a round, on average over the workers.
        dead_band: re-size the shares only when the round becomes shorter by more than this part of it.
    """

    name: ClassVar[str] = "balanced"
    blocking: ClassVar[bool] = True
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    micro_batches: int = 1
    dead_band: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "micro_batches", 1)
        at_least(self, "dead_band", 0.0)

    async def worker(self, node: Node) -> None:
        shares = tuple(node.state.get("shares", ()))
        if node.state.get("workers") != node.world_size:  # else a newcomer takes over what the others have
            node.state["workers"] = node.world_size
            shares = equal_shares(node.world_size, self.micro_batches * node.micro_batch)
        while not node.finished:
            batch = await self.share(node, share_of(shares, node.rank))
            total = await node.all_reduce(batch, note=node.seconds_per_sample)
            node.apply(total)
            shares = resized(among(shares, total.ranks), total.notes, self.dead_band)
            node.state["shares"] = shares

    async def share(self, node: Node, samples: int) -> Gradient:
        batch = await node.gradient(min(samples, node.micro_batch))
        while 0 < batch.count < samples:
            fresh = await node.gradient(min(samples - batch.count, node.micro_batch))
            batch += fresh
            if not fresh.count:
                break
        return batch
