"""ABS-SGD: delayed synchronous SGD whose batch size the clock decides (arXiv 2308.15164).

While the gradients of the last round travel, every worker computes the next batch, of no size given in advance:

    r-th round, w_r equal on all ranks:   G_i, B_i = micro-batches at w_r, until the sync of round r−1 is done
                                          w_{r+1} = w_r − η · ΣG(w_{r−1}) / ΣB          one round late
                                          start the sync of (G_i, B_i)

[paper]  computing goes on during the synchronisation; the batch has no fixed size; the delay is exactly one round.
[ours]   weights by sample count. To start the all-reduce *is* the vote for the next synchronisation: it runs when the
         last rank has started it, and what a rank computes after its vote belongs to the next round. So no signal
         is needed, and nobody waits for one.
[ours]   `delay_cure="extrapolate"`: a delay with momentum is stable only for a far smaller learning rate (largest
         stable η·λ on a quadratic with β = 0.9: synchronous 3.8, delayed 0.10, extrapolated 0.27).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Gradient, Node, Work
from paceline.rules.delay import extrapolate_
from paceline.strategies.checks import at_least, one_of
from paceline.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class AbsSgd(Strategy):
    """ABS-SGD: nobody waits; gradients are applied one round late.

    Args:
        delay_cure: `none` is the paper's rule; `extrapolate` (default) also adds the change of the update since the
            last round when the optimizer has momentum, and does nothing when it has none.
        min_micro_batches: a worker votes for the next round only after so many (the paper's k_min). More of them
            make larger batches and fewer rounds.
    """

    name: ClassVar[str] = "abs-sgd"
    delay_cure: str = "extrapolate"
    min_micro_batches: int = 1

    def __post_init__(self) -> None:
        one_of(self, "delay_cure", ("none", "extrapolate"))
        at_least(self, "min_micro_batches", 1)

    async def worker(self, node: Node) -> None:
        in_flight: Work[Gradient] | None = None
        while not node.finished:
            batch = await node.gradient()
            for _ in range(self.min_micro_batches - 1):
                batch += await node.gradient()
            while in_flight and not in_flight.done:  # the network is busy: keep computing
                batch += await node.gradient()
            if in_flight:
                self.step(node, await in_flight)  # one round late, over every rank's samples
            in_flight = node.all_reduce(batch)
        if in_flight:
            self.step(node, await in_flight)

    def step(self, node: Node, total: Gradient) -> None:
        if self.delay_cure == "none" or not node.has_momentum or not total.count:
            node.apply(total)
            return
        before = node.parameters.clone()
        node.apply(total)
        step = before.sub_(node.parameters)
        if "last_step" in node.state:
            ratio = node.learning_rate / node.state["learning_rate"]
            extrapolate_(node.parameters, step, node.state["last_step"], ratio)
        node.state["last_step"], node.state["learning_rate"] = step, node.learning_rate
