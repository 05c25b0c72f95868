"""Synchronous SGD: read me first.

Every worker computes k micro-batches at the same parameters; their gradients are added over all workers; everybody
makes the same step. With equal data this is plain SGD on the joined batch,

    w ← w − η · (Σ_i G_i) / (Σ_i B_i),        G_i = sum of worker i's per-sample gradients, B_i = how many.

Everybody waits for the slowest: on speeds 1, 1, ½, ¼ at most 36 % of the cluster is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Node
from paceline.strategies.checks import at_least
from paceline.strategies.rounds_of_gradients import RoundsOfGradients


@dataclass(frozen=True, kw_only=True)
class AllReduce(RoundsOfGradients):
    """Synchronous SGD; everybody waits for the slowest.

    Args:
        micro_batches: computed by every worker in a round (k). More of them make larger batches and fewer
            synchronisations.
    """

    name: ClassVar[str] = "all-reduce"
    blocking: ClassVar[bool] = True
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    micro_batches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "micro_batches", 1)

    async def worker(self, node: Node) -> None:
        while not node.finished:
            batch = await node.gradient()
            for _ in range(self.micro_batches - 1):
                fresh = await node.gradient()
                batch += fresh
                if not fresh.count:  # out of data: the others wait
                    break
            node.apply(await node.all_reduce(batch))
