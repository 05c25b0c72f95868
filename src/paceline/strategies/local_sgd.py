"""Local SGD: every worker steps by itself, and now and then the models are averaged (Stich 2019).

    w_i ← w_i − η · g_i        H times on worker i
    w_i ← Σ_j B_j w_j / Σ_j B_j,    B_j = samples of worker j since the last average

[paper]  H equal on all workers: then the weights are equal too, and everybody waits for the slowest.
[ours]   `by_speed=True`: H_i in proportion to measured speed, the fastest H. All arrive at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Node
from paceline.strategies.checks import at_least, yes_or_no
from paceline.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class LocalSgd(Strategy):
    """Local SGD: H steps alone, then the models are averaged.

    Args:
        steps: between two averages (H). More of them need less communication, and the models drift further apart.
        by_speed: slower workers make fewer steps, so that nobody waits.
    """

    name: ClassVar[str] = "local-sgd"
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    steps: int = 8
    by_speed: bool = False

    def __post_init__(self) -> None:
        at_least(self, "steps", 1)
        yes_or_no(self, "by_speed")

    async def worker(self, node: Node) -> None:
        steps = self.steps
        while not node.finished:
            count, samples = 0, []
            for _ in range(steps):
                gradient = await node.gradient()
                if not gradient.count:  # no more data
                    break
                node.apply(gradient)
                count += gradient.count
                samples += gradient.samples
            total = await node.all_reduce(node.model(count, samples), note=node.seconds_per_sample)
            node.adopt(total)
            known = [each for each in total.notes if each > 0]
            if self.by_speed and known and node.seconds_per_sample:
                steps = max(1, round(self.steps * min(known) / node.seconds_per_sample))
