"""Rennala SGD: a round is S samples at the same point, from whoever has them first (Tyurin & Richtárik 2023).

    r-th round:   every worker computes micro-batches at w_r, until all together have S samples
                  w_{r+1} = w_r − η · ΣG / ΣB                     no delay
                  what was under way when the S were complete was taken at w_r, and comes too late

[paper]  gradients at the current point only; the rest is thrown away. Up to a constant no method needs less time on
         workers of any speeds, with the same data for all and communication that is free.
[ours]   the sum is an all-reduce, so a worker joins when its micro-batch ends. Slow workers take smaller ones.
[ours]   `unfinished="carry"`: what came too late counts in the next round, one round late, instead of being lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Gradient, Node
from paceline.rules.learning_rate import RULES, step_scale
from paceline.rules.sizes import micro_batch_size, round_target
from paceline.strategies.checks import batch_target, check_reference, one_of, target_of_a_round
from paceline.strategies.rounds_of_gradients import RoundsOfGradients

LARGEST_SCALE = 4.0


@dataclass(frozen=True, kw_only=True)
class Rennala(RoundsOfGradients):
    """Rennala SGD: no delay; a round closes when all together have enough samples.

    Args:
        target: samples of a round; `auto` goes by the measured noise scale.
        unfinished: `discard` what was under way when the round closed (the paper), or `carry` it into the next.
        lr_rule, reference_batch: as for abs-sgd.
    """

    name: ClassVar[str] = "rennala"
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    target: int | str = "auto"
    unfinished: str = "carry"
    lr_rule: str = "auto"
    reference_batch: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "unfinished", ("discard", "carry"))
        one_of(self, "lr_rule", RULES)
        check_reference(self)
        batch_target(self, "target", needed=True)

    async def worker(self, node: Node) -> None:
        target_of_a_round(self, self.target, node.micro_batch)
        round_number, size, carried = node.state.get("round", 0), node.micro_batch, Gradient(None, 0)
        while not node.finished:
            batch, carried = carried, Gradient(None, 0)
            target = round_target(self.target, node.micro_batch, node.world_size, node.noise_scale)
            if batch.count:
                node.count(round_number, batch.count, target)
            while not node.signalled(round_number):
                fresh = await node.gradient(size)
                if not fresh.count:
                    break
                if not node.signalled(round_number):
                    batch += fresh
                    node.count(round_number, fresh.count, target)
                elif self.unfinished == "carry":
                    carried = fresh
                else:
                    node.discard(fresh, "came after the round was complete")
            total = await node.all_reduce(batch, note=node.seconds_per_sample)
            self.step(node, total)
            size = micro_batch_size(node.micro_batch, node.rank, total.notes, node.overhead_samples)
            round_number += 1
            node.state["round"] = round_number

    def step(self, node: Node, total: Gradient) -> None:
        rule = self.lr_rule if self.lr_rule != "auto" else "sqrt" if node.steps.adaptive else "linear"
        reference = self.reference_batch or node.world_size * node.micro_batch
        largest = LARGEST_SCALE if self.reference_batch else 1.0  # nobody said that more would do
        node.apply(total, step_scale(rule, total.count, reference, node.noise_scale, largest))
