"""ABS-SGD: delayed synchronous SGD whose batch size the clock decides (arXiv 2308.15164).

While the gradients of the last round travel, every worker computes the next batch, of no size given in advance:

    r-th round, w_r equal on all ranks:   G_i, B_i = micro-batches, until the sync of round r−1 is done
                                          w_{r+1} = w_r − η · ΣG / ΣB of round r−1          one round late
                                          start the sync of (G_i, B_i)

[paper]  computing goes on during the synchronisation; the batch has no fixed size; the delay is exactly one round.
[ours]   weights by sample count. To start the all-reduce *is* the vote for the next synchronisation: it runs when the
         last rank has started it, and what a rank computes after its vote belongs to the next round. So no signal
         is needed, and nobody waits for one.
[ours]   what the delay costs is cured, the learning rate follows the batch, and slow ranks take smaller micro-batches:
         see `delayed_steps`. `paper=True` switches all of it off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Gradient, Node, Work
from paceline.rules.learning_rate import RULES
from paceline.rules.sizes import round_target
from paceline.strategies.acco import train_in_halves
from paceline.strategies.checks import (
    as_published,
    at_least,
    batch_target,
    check_reference,
    one_of,
    only_as_default,
    target_of_a_round,
    yes_or_no,
)
from paceline.strategies.delayed_steps import CURES, DelayedSteps
from paceline.strategies.rounds_of_gradients import RoundsOfGradients

PUBLISHED = {"trigger": "vote", "delay_cure": "none", "lr_rule": "none", "micro_batches": "fixed"}


@dataclass(frozen=True, kw_only=True)
class AbsSgd(RoundsOfGradients):
    """ABS-SGD: nobody waits; gradients are applied one round late, and look one round ahead.

    Args:
        trigger: when a round closes, beside that the synchronisation before it is done. `vote`: every worker has
            `min_micro_batches`. `fastest`: some worker has them. `target`: all workers together have `target` samples.
        target: samples of a round with `trigger=target`; `auto` goes by the measured noise scale.
        min_micro_batches: the paper's k_min. More of them make larger batches and fewer rounds. 0 is up to the
            strategy: 2 where it goes on from each and the micro-batches are small enough, else 1.
        delay_cure: `anticipate` (what `auto` takes) computes where the worker's own part of the round under way would
            lead; `extrapolate` adds the change of the update once more; `acco` computes half of a round at the new
            point and half at an estimate of it, with two synchronisations an update; `none` is the paper's rule.
        lr_rule: how the step follows the batch: `linear`, `sqrt`, `adascale` or `none`; `auto` is linear for SGD and
            sqrt for Adam and its kin, from the batch that synchronous training would have.
        reference_batch: that the learning rate was tuned for; a rule that is named needs it.
        max_lr_scale: the batch counts as so many times the reference at most. Without a reference_batch `auto` never
            goes above the user's own learning rate: where that is near the edge, more would diverge.
        micro_batches: `by-speed` gives slow workers smaller ones, so that no round is held up; `fixed` does not.
        paper: as published: vote, no cure, no rule, fixed micro-batches.
    """

    name: ClassVar[str] = "abs-sgd"
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    carries: ClassVar[bool] = True
    trigger: str = "vote"
    target: int | str = ""
    min_micro_batches: int = 0
    delay_cure: str = "auto"
    lr_rule: str = "auto"
    reference_batch: int = 0
    max_lr_scale: float = 4.0
    micro_batches: str = "by-speed"
    paper: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        yes_or_no(self, "paper")
        if self.paper:
            as_published(self, PUBLISHED)
        one_of(self, "trigger", ("vote", "target", "fastest"))
        one_of(self, "delay_cure", CURES)
        one_of(self, "lr_rule", RULES)
        one_of(self, "micro_batches", ("by-speed", "fixed"))
        at_least(self, "min_micro_batches", 0)
        at_least(self, "max_lr_scale", 1.0)
        check_reference(self)
        if self.delay_cure == "acco":
            only_as_default(self, ("trigger", "min_micro_batches"), "delay_cure=acco")
        batch_target(self, "target", needed=self.trigger == "target")

    async def worker(self, node: Node) -> None:
        target_of_a_round(self, self.target, node.micro_batch)
        steps = DelayedSteps(self, node)
        if self.delay_cure == "acco":
            await train_in_halves(node, steps)
            return
        round_number, in_flight = node.state.get("round", 0), None
        while not node.finished:
            batch = await self.next_batch(node, round_number, in_flight, steps)
            if in_flight:
                steps.apply(await in_flight)  # one round late, over every rank's samples
            steps.look_ahead(batch)
            in_flight = node.all_reduce(batch, note=node.seconds_per_sample)
            round_number += 1
            node.state["round"] = round_number
            if node.saving:  # a checkpoint holds no gradients: nothing may be in flight
                steps.apply(await in_flight)
                steps.begin_anew()
                in_flight = None
        if in_flight:
            steps.apply(await in_flight)

    async def next_batch(
        self, node: Node, round_number: int, in_flight: Work[Gradient] | None, steps: DelayedSteps
    ) -> Gradient:
        batch, done, out_of_data = Gradient(None, 0), 0, False
        least = self.min_micro_batches or steps.least_of_a_round
        while not (out_of_data or self.closed(node, round_number, done, least)) or (in_flight and not in_flight.done):
            steps.walk(batch)
            fresh = await node.gradient(steps.micro_batch)
            batch += fresh
            done += 1
            out_of_data = not fresh.count
            if self.trigger == "fastest" and done == least:
                node.signal(round_number)
            elif self.trigger == "target" and fresh.count:
                target = round_target(self.target, node.micro_batch, node.world_size, node.noise_scale)
                node.count(round_number, fresh.count, target)
        return batch

    def closed(self, node: Node, round_number: int, micro_batches: int, least: int) -> bool:
        if self.trigger == "vote":
            return micro_batches >= least
        return node.signalled(round_number)
