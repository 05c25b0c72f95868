"""Quasi-global momentum: a momentum of where the models go together, in place of each worker's own.

    x_i ← Σ_j W_ij x_j − η (g_i + β m_i)
    m_i ← β m_i + (1 − β) (x_i before − x_i after) / η

A worker's own momentum follows its own gradients, and where data is unequal those lead apart. What its model has moved
by in a whole round, mixing included, is nearer to where all models go.

Lin, Karimireddy, Stich and Jaggi (2021), arXiv 2102.04761 (there the step comes before the mixing).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def remember_(momentum: Tensor, before: Tensor, after: Tensor, learning_rate: float, beta: float) -> None:
    """m ← β m + (1 − β) (before − after) / η, in place; `before` is used up.

    >>> import torch
    >>> momentum = torch.tensor([1.0])
    >>> remember_(momentum, torch.tensor([5.0]), torch.tensor([4.0]), learning_rate=0.5, beta=0.75)
    >>> momentum
    tensor([1.2500])
    """
    moved = before.sub_(after)
    momentum.mul_(beta).add_(moved, alpha=(1 - beta) / learning_rate)
