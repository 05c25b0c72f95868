"""Cures for gradients that arrive late."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def extrapolate_(parameters: Tensor, step: Tensor, last_step: Tensor, learning_rate_ratio: float = 1.0) -> None:
    """After the optimizer's step: add its change since the last one once more, in place.

        s_t = w_before − w;        w ← w − (s_t − (η_t/η_{t−1}) · s_{t−1})

    With momentum successive steps lie nearly on a line, so the change predicts what the missing round would have
    brought (arXiv 2606.30634). The ratio keeps a change of the learning rate from looking like a change of direction.

    Args:
        parameters: w, after the step; corrected in place.
        step: s_t, as the optimizer made it.
        last_step: s_{t−1}, as the optimizer made it.
        learning_rate_ratio: η_t/η_{t−1}.

    >>> import torch
    >>> parameters = torch.tensor([7.0])
    >>> extrapolate_(parameters, step=torch.tensor([3.0]), last_step=torch.tensor([2.0]))
    >>> parameters
    tensor([6.])
    """
    parameters.sub_(step).add_(last_step, alpha=learning_rate_ratio)


def lead_(velocity: Tensor, gradient: Tensor, momentum: float) -> None:
    """Momentum that lives with the worker, and looks ahead, in place.

        v ← β·v + x;        x ← x + β·v

    Where many push to one server, a momentum there forgets within a round of pushes, and points to where w was before
    all of them. One at each worker lasts as long as in synchronous training; and because it pushes what Nesterov's step
    would be, w runs ahead by what all workers' momenta still have to bring (DANA-Slim, arXiv 1907.11612).

    Args:
        velocity: v; brought up to date.
        gradient: x; becomes what is pushed.
        momentum: β.

    >>> import torch
    >>> velocity, gradient = torch.tensor([10.0]), torch.tensor([1.0])
    >>> lead_(velocity, gradient, momentum=0.5)
    >>> velocity, gradient
    (tensor([6.]), tensor([4.]))
    """
    velocity.mul_(momentum).add_(gradient)
    gradient.add_(velocity, alpha=momentum)
