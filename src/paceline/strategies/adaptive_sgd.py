"""Adaptive SGD: batches for whoever is ready, larger ones for faster workers, models merged by updates (2110.07029).

    mega-batch of M samples:   each idle worker takes the next b_i samples;  w_i ← w_i − lr_i · g_i;  u_i ← u_i + 1
    all taken, none under way: α_i = b_i/Σb if all u are equal, else u_i/Σu
                               if max ‖w_i‖/d is below the gate: α of the most updates ·(1+δ), of the fewest ·(1−δ)
                               w_i ← w' = Σ α_j w_j + γ (w − w_before)
                               b_i ← b_i + β (u_i − ū), within bounds;   lr_i in proportion to b_i

[paper]  the above. Perturbed weights add up to more than one, so that with momentum the model grows at every merge at
         which updates are unequal; only the gate ends it. `paper=True` is that.
[code]   δ = 0.1; `rule=release`: b_i ± 32 by the sign.
[ours]   `renormalise`: perturbed weights are divided by their sum. β is bounded (see `rules.batch_scaling`).
[ours]   the largest batch is b_max again after each change, and the others grow with it; with `paper` the level sinks.
[ours]   taken is what is asked for: the control plane counts a batch when its worker begins it. A worker that hears
         late that M are taken begins one more.
[ours]   no momentum by default: with γ = 0.9 the merged model overshoots where replicas get far between two merges.
[ours]   the rate is in proportion to the samples that a batch really has, for Adam and its kin to their root.
[ours]   `overlap=True`: nobody waits. Workers go on with the next mega-batch while the others end theirs and while the
         models travel; w_i ← w_i + w' − (w_i that was merged).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Node
from paceline.rules.batch_scaling import RULES
from paceline.strategies.checks import as_published, at_least, one_of, share_of_one, target_of_a_round, yes_or_no
from paceline.strategies.merges import Merges
from paceline.strategies.strategy import Strategy

PUBLISHED = {"rule": "paper", "renormalise": False, "overlap": False}
PUBLISHED_MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class AdaptiveSgd(Strategy):
    """Adaptive SGD: faster workers get larger batches, until all make as many steps between two merges.

    Args:
        mega_batch: samples between two merges (M); 0 for 8 micro-batches of each worker.
        rule: how batches follow the updates: `paper` or `release`.
        beta: samples for each update above or below the mean (β); 0 for a 64th of the micro-batch.
        smallest_batch: b_min, samples; 0 for a 16th of the micro-batch, which is the largest.
        reference_batch: that the learning rate was tuned for; 0 for the micro-batch.
        perturbation: δ; 0 for none.
        norm_gate: nothing is perturbed when the norm of a model, divided by its size, is not below it.
        renormalise: perturbed weights add up to one again.
        momentum: of the merged model (γ); 0 for none, with `paper` for 0.9.
        decay: times the learning rate, after each merge. Schedulers of torch work as well.
        overlap: nobody waits for a merge.
        paper: as published: batches by the paper's rule, perturbed weights as they are, momentum, no overlap.
    """

    name: ClassVar[str] = "adaptive-sgd"
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    mega_batch: int = 0
    rule: str = "paper"
    beta: float = 0.0
    smallest_batch: int = 0
    reference_batch: int = 0
    perturbation: float = 0.1
    norm_gate: float = 0.1
    renormalise: bool = True
    momentum: float = 0.0
    decay: float = 1.0
    overlap: bool = False
    paper: bool = False

    def __post_init__(self) -> None:
        for option in ("renormalise", "overlap", "paper"):
            yes_or_no(self, option)
        if self.paper:
            as_published(self, PUBLISHED)
            object.__setattr__(self, "momentum", self.momentum or PUBLISHED_MOMENTUM)
        one_of(self, "rule", RULES)
        for option in ("mega_batch", "smallest_batch", "reference_batch"):
            at_least(self, option, 0)
        for option in ("beta", "perturbation", "norm_gate", "momentum"):
            at_least(self, option, 0.0)
        share_of_one(self, "decay")

    async def worker(self, node: Node) -> None:
        target_of_a_round(self, self.mega_batch or node.micro_batch, node.micro_batch)
        if self.paper and node.rank == 0 and (node.steps.momentum or node.steps.adaptive):
            node.warn(
                "Adaptive SGD as published steps with plain SGD; here the optimizer of each replica has a memory."
            )
        merges = Merges(self, node)
        while not node.finished:
            while not node.signalled(node.state["round"]):
                batch = await merges.next_batch()
                if not batch.count:  # no more data
                    break
                merges.step(batch)
                await merges.go_on(wait=False)
            await merges.go_on(wait=True)  # the merge before this one, if the workers overlap
            if node.finished:  # some ranks have come to the end of that one earlier, and begin no other
                break
            merges.start()
            await merges.go_on(wait=not self.overlap)
        await merges.go_on(wait=True)
