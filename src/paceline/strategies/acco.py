"""ACCO: accumulate while you communicate, with no delay left (arXiv 2406.02613). `abs-sgd:delay_cure=acco` trains so.

Half of a round's samples are computed at the committed point x, half at an estimate x̃ of it; each half travels while
the other is computed:

    x_{t+1} = x_t − Opt((G_a(x̃_t) + G_b(x_t)) / n)        the step
    x̃_{t+1} = x_t − Opt_trial(G_a(x̃_t) / n_a)             the estimate; the optimizer forgets it

[paper]  as above: two collectives an update.
[ours]   the halves have no fixed size; the clock decides, as in ABS-SGD.
"""

from __future__ import annotations

from math import ceil

from paceline.node import Gradient, Node, Work
from paceline.strategies.delayed_steps import DelayedSteps


async def train_in_halves(node: Node, steps: DelayedSteps) -> None:
    first_half = None
    while not node.finished:
        if not first_half:  # at x_0, which is x̃_0
            first_half = node.all_reduce(await _half(node, steps, None), note=node.seconds_per_sample)
        if node.saving:  # a checkpoint holds no gradients: nothing may be in flight
            steps.apply(await first_half)
            steps.begin_anew()
            first_half = None
            continue
        batch = await _half(node, steps, first_half)
        total = await first_half
        second_half = node.all_reduce(batch, note=node.seconds_per_sample)  # at x_t
        node.look_ahead(total, steps.scale)
        batch = await _half(node, steps, second_half)
        total += await second_half
        steps.apply(total)
        first_half = node.all_reduce(batch, note=node.seconds_per_sample)  # at x̃_{t+1}
    if first_half:
        steps.apply(await first_half)


async def _half(node: Node, steps: DelayedSteps, in_flight: Work[Gradient] | None) -> Gradient:
    """Half a micro-batch, and more for as long as the network is busy."""
    batch = await node.gradient(ceil(steps.micro_batch / 2))
    while in_flight and not in_flight.done:
        batch += await node.gradient(ceil(steps.micro_batch / 2))
    return batch
