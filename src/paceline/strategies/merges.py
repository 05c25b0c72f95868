"""One rank's part in Adaptive SGD: its steps, and the merges of all models, which may travel while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite, isnan
from typing import TYPE_CHECKING

from paceline.node import Gradient, Node, Work
from paceline.rules.batch_scaling import at_full_size, make_room_, scaled_batches
from paceline.rules.learning_rate import step_scale
from paceline.rules.merging import may_perturb, merge_weights, perturbed, push_on_
from paceline.strategies.centre import end_round

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.strategies.adaptive_sgd import AdaptiveSgd

UPDATES_OF_A_MEGA_BATCH = 8  # of each worker, in whole micro-batches, where nobody says how many samples it has
SMALLEST_PART = 16  # of the micro-batch, where nobody says what the smallest batch is
SLOWNESS = 64  # β is so small a part of the micro-batch by default: 16 samples of 1024


class Merges:
    """Steps and merges of one rank. All ranks know all batch sizes: they follow from what all have told each other.

    Args:
        options: the strategy.
        node: the rank.
    """

    def __init__(self, options: AdaptiveSgd, node: Node) -> None:
        self._options, self._node = options, node
        self.mega_batch = options.mega_batch or UPDATES_OF_A_MEGA_BATCH * node.workers * node.micro_batch
        self._bounds = (options.smallest_batch or max(1, node.micro_batch // SMALLEST_PART), node.micro_batch)
        self._beta = options.beta or node.micro_batch / SLOWNESS
        self._rule = "sqrt" if node.steps.adaptive else "linear"
        if node.state.get("workers") != node.workers:  # a run may be resumed on other workers
            node.state["workers"], node.state["batches"] = node.workers, []
        make_room_(node.state["batches"], max(node.workers, node.rank + 1), node.micro_batch)
        for name in ("merged", "merged_before")[: 2 if options.momentum else 1]:
            if name not in node.state:
                node.state[name] = node.parameters.clone()
        node.state.setdefault("merges", 0)
        node.state.setdefault("round", 0)
        self._last = node.state["merged"].clone() if options.momentum else None  # the other is merged in place
        self._left: Tensor | None = None  # with overlap: the model that went into the merge under way
        self._updates = self._count = 0
        self._samples: list[range] = []
        self._told: Work[tuple[tuple[float, ...], ...]] | None = None
        self._merging: Work[Gradient] | None = None
        self._weight = 1.0

    # ---- steps

    async def next_batch(self) -> Gradient:
        """As many samples as this rank's batches have now, unless there are no more. What is left of a lease comes in
        pieces: they are put together, all at the same model."""
        node = self._node
        size = round(node.state["batches"][node.rank]) if node.divisible else node.micro_batch
        node.count(node.state["round"], size, self.mega_batch)
        batch = await node.gradient(size)
        while 0 < batch.count < size < node.micro_batch:
            more = await node.gradient(size - batch.count)
            if not more.count:
                break
            batch += more
        return batch

    def step(self, batch: Gradient) -> None:
        """This rank's own step, at a rate in proportion to its samples; an update when it is done."""
        reference = self._options.reference_batch or self._node.micro_batch
        scale = step_scale(self._rule, batch.count, reference, None, largest=inf)
        decay = self._options.decay ** self._node.state["merges"]
        self._node.apply(batch, replace(scale, learning_rate=scale.learning_rate * decay))
        self._updates += batch.count > 0  # none if it was not finite
        self._count += batch.count
        self._samples += batch.samples

    # ---- merges

    def start(self) -> None:
        """The mega-batch is over here: tell the others of this rank's updates, and how large its model is."""
        node = self._node
        self._told = node.all_gather(float(self._updates), float(node.parameters.norm()))
        self._updates = 0
        node.state["round"] += 1  # a newcomer, who comes when this one is merged, begins with the next

    async def go_on(self, wait: bool) -> None:
        """Whatever has arrived of the merge under way is taken in; `wait`: all of it."""
        if self._told and (wait or self._told.done):
            (updates, norms), self._told = await self._told, None
            self._merge(updates, norms)
        if self._merging and (wait or self._merging.done):
            total, self._merging = await self._merging, None
            self._take_in(total)

    def _merge(self, updates: Sequence[float], norms: Sequence[float]) -> None:
        node, options = self._node, self._options
        make_room_(node.state["batches"], len(updates), node.micro_batch)
        here = [rank for rank, made in enumerate(updates) if not isnan(made)]
        updates, norms = ([of_all[rank] for rank in here] for of_all in (updates, norms))
        batches = [node.state["batches"][rank] for rank in here]
        weights = merge_weights(updates, batches)
        if may_perturb(norms, node.parameters.shape[0], options.norm_gate):
            weights = perturbed(weights, updates, options.perturbation)
        self._weight = 1.0 if options.renormalise else sum(weights)
        own = (weights[here.index(node.rank)], self._count, self._samples)
        self._merging = node.all_reduce(node.movement(self._leaving(), node.state["merged"], *own))
        self._count, self._samples = 0, []
        if node.divisible:
            bounds = self._bounds
            scaled = scaled_batches(options.rule, batches, updates, self._beta, bounds)
            if not options.paper:
                scaled = at_full_size(scaled, bounds[1])
            for rank, batch in zip(here, scaled, strict=True):
                node.state["batches"][rank] = batch

    def _leaving(self) -> Tensor:
        """The model that goes into a merge. The rank steps on with its parameters only where workers overlap."""
        model = self._node.parameters
        if not self._options.overlap:
            return model
        self._left = model.clone() if self._left is None else self._left.copy_(model)
        return self._left

    def _take_in(self, total: Gradient) -> None:
        """The merged model is here. What this rank has done since its own left is added to it."""
        node, model, merged, since = self._node, self._node.parameters, self._node.state["merged"], self._left
        if since is not None:
            since.sub_(model)  # less what has been done since
        node.adopt(total)
        if total.count:
            node.state["merges"] += 1
            self._push_on(model, merged)
        if since is not None and not node.finished and isfinite(since.norm()):
            end_round(node)
            model.sub_(since)

    def _push_on(self, model: Tensor, merged: Tensor) -> None:
        """Perturbed weights and momentum: what all ranks do alike to the mean, which is the merged model without."""
        if self._weight != 1.0:
            model.mul_(self._weight)
        if self._last is not None:
            push_on_(model, self._last, self._node.state["merged_before"], self._options.momentum)
        if self._weight != 1.0 or self._last is not None:
            merged.copy_(model)
