"""The steps of a method that is one round late: cured, scaled to the batch, and watched.

    anticipate    compute at y_i = w − u(G_i/B_i), with u the step of the user's optimizer and G_i the worker's own part
                  of the round under way; and from there on as far as its part of the next one leads           [ours]
    extrapolate   w ← w − u_t − (u_t − (η_t/η_{t−1})·u_{t−1})                                       (arXiv 2606.30634)
    none          w ← w − u_t                                                                                  [paper]

`anticipate` needs no traffic and leaves no delay in the mean: without noise a worker's own gradient is everybody's,
y is the next w exactly, and with one micro-batch a round the method is synchronous SGD. With noise its points differ
from the next w by what the worker's batch differs from everybody's, as in a local step of local SGD. When a round has
several micro-batches, because the network is slow, a worker goes on after each of them: a long round then costs no more
samples than several short ones, which synchronous training cannot do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.node import Gradient, Node
from paceline.rules.delay import extrapolate_
from paceline.rules.learning_rate import AS_SET, StepScale, step_scale
from paceline.rules.sizes import least_of_a_round, micro_batch_size
from paceline.rules.stability import CurvatureProbe, largest_stable

if TYPE_CHECKING:
    from paceline.strategies.abs_sgd import AbsSgd

CURES = ("auto", "anticipate", "extrapolate", "acco", "none")
PROBE_EVERY, PROBE_ROUNDS = 12, 8  # of twelve rounds eight in a row are looked at: the guard costs little
SETTLED = 3  # rounds: the first ones may be long because a slow rank has not been measured yet


class DelayedSteps:
    """One rank's steps.

    Args:
        options: the strategy.
        node: the rank.
    """

    def __init__(self, options: AbsSgd, node: Node) -> None:
        self._node, self._options = node, options
        self.cure = "anticipate" if options.delay_cure == "auto" else options.delay_cure
        automatic = "sqrt" if node.steps.adaptive else "linear"
        self._rule = automatic if options.lr_rule == "auto" else options.lr_rule
        self._reference = options.reference_batch or node.world_size * node.micro_batch
        self._largest_scale = options.max_lr_scale if options.reference_batch else 1.0  # nobody said that more would do
        self._probe, self._steps, self._guards = CurvatureProbe(), 0, self.cure in ("none", "extrapolate")
        self.begin_anew()

    def begin_anew(self) -> None:
        """With nothing in flight, and nothing known of the others: at the start, and from a checkpoint on, so that a
        run that goes on takes the same course as one that is resumed."""
        self.scale: StepScale = AS_SET
        self._own, self._others = 0, float(self._node.world_size)  # own samples, and how many times that the round had
        self._last_owns = (0,) * SETTLED  # own samples of the last rounds
        self.micro_batch, self.least_of_a_round = self._node.micro_batch, 1

    def look_ahead(self, own: Gradient) -> None:
        """Before the worker's part of a round leaves: compute from now on where it leads."""
        if self.cure == "anticipate" and own.count:
            self._own, self._last_owns = own.count, (*self._last_owns[1:], own.count)
            self._node.look_ahead(own, self._scale_for(round(own.count * self._others)))

    def walk(self, part: Gradient) -> None:
        """Part of the next round is computed: go on from there, as far as this part of it leads."""
        if self.cure == "anticipate" and part.count and self._own:
            scale = self._scale_for(round(self._own * self._others))
            done = min(1.0, part.count / self._own)
            self._node.look_ahead(part, replace(scale, learning_rate=scale.learning_rate * done), further=True)

    def apply(self, total: Gradient) -> None:
        """A round has arrived."""
        node, options = self._node, self._options
        if total.count:
            self.scale = self._scale_for(total.count)
            self._others = total.count / self._own if self._own else self._others
        self._guard(total)
        if self.cure == "extrapolate" and node.steps.momentum and total.values is not None and total.count:
            self._apply_extrapolated(total)
        else:
            node.apply(total, self.scale)
        if options.micro_batches == "by-speed" and node.divisible and total.notes:
            whole, rank, speeds = node.micro_batch, node.rank, total.notes
            overhead, in_a_round = node.overhead_samples, min(self._last_owns)
            self.micro_batch = micro_batch_size(whole, rank, speeds, overhead, in_a_round)
            if self.cure == "anticipate":
                self.least_of_a_round = least_of_a_round(whole, rank, speeds, self.micro_batch)

    def _scale_for(self, batch: int) -> StepScale:
        return step_scale(self._rule, batch, self._reference, self._node.noise_scale, self._largest_scale)

    def _apply_extrapolated(self, total: Gradient) -> None:
        node = self._node
        before = node.parameters.clone()
        node.apply(total, self.scale)
        step, rate = before.sub_(node.parameters), node.steps.learning_rate * self.scale.learning_rate
        if node.state.get("learning_rate"):  # a step at rate zero (a warm-up) shows no direction
            extrapolate_(node.parameters, step, node.state["last_step"], rate / node.state["learning_rate"])
        node.state["last_step"], node.state["learning_rate"] = step, rate

    def _guard(self, total: Gradient) -> None:
        """Warn when learning rate, momentum and delay are in the unstable region."""
        node = self._node
        self._steps += 1
        place = self._steps % PROBE_EVERY
        if not self._guards or node.rank or node.steps.adaptive or total.values is None or not total.count:
            return  # the other ranks would find the same
        if place < PROBE_ROUNDS:
            self._probe.see(node.parameters, total.values.tensor() / total.count)
        else:
            self._probe.forget()
        reached = node.steps.learning_rate * self.scale.learning_rate * self._probe.curvature
        limit = largest_stable(node.steps.momentum, self.cure, node.steps.nesterov)
        if reached > limit:
            self._guards = False
            synchronous = largest_stable(node.steps.momentum, "synchronous", node.steps.nesterov)
            node.warn(
                f"The steps are in the unstable region: the learning rate {node.steps.learning_rate:g} (times "
                f"{self.scale.learning_rate:.2g} for the batch) and the curvature {self._probe.curvature:.3g} measured "
                f"along the path give {reached:.2g}; one round late, with momentum {node.steps.momentum:g} and "
                f"delay_cure={self.cure}, at most {limit:.2g} is stable (synchronous: {synchronous:.2g}). Take "
                f"delay_cure=anticipate, or a learning rate below {node.steps.learning_rate * limit / reached:.2g}."
            )
