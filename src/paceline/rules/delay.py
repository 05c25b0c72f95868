"""Cures for a gradient that arrives one round late."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def extrapolated(update: Tensor, last_update: Tensor, learning_rate_ratio: float = 1.0) -> Tensor:
    """The update to make instead of a delayed one: it, and its change since the last round once more.

        u_t + (u_t − (η_t/η_{t−1}) · u_{t−1})

    With momentum successive updates lie nearly on a line, so the change predicts what the missing round would have
    brought (arXiv 2606.30634). The ratio keeps a change of the learning rate from looking like a change of direction.

    >>> import torch
    >>> extrapolated(torch.tensor([3.0]), torch.tensor([2.0]))
    tensor([4.])
    >>> extrapolated(torch.tensor([1.0]), torch.tensor([2.0]), learning_rate_ratio=0.5)
    tensor([1.])
    """
    return update.mul(2).sub_(last_update, alpha=learning_rate_ratio)
