"""How models of several workers become one: weights of a merge, its momentum, and the centre of elastic averaging.

Adaptive SGD (arXiv 2110.07029)     w' = Σ α_i w_i + γ (w − w_before)
                                    α_i = b_i/Σb if all have made as many updates, else u_i/Σu
EASGD (Zhang et al. 2015)           w_i ← w_i − ρ (w_i − z),   z ← z + ρ Σ (w_i − z)
CROSSBOW (Koliousis et al. 2019)    the same, and z has momentum: + μ (z − z_before)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def merge_weights(updates: Sequence[float], batches: Sequence[float]) -> list[float]:
    """Weights of the models in a merge; they add up to one.

    Args:
        updates: u_i, steps that each worker has made since the last merge.
        batches: b_i, samples of each worker's steps.

    >>> merge_weights((29, 26, 24, 21), (1024, 1024, 1024, 1024))
    [0.29, 0.26, 0.24, 0.21]
    >>> merge_weights((25, 25), (1000, 600))
    [0.625, 0.375]
    """
    parts = batches if len(set(updates)) == 1 else updates
    return [part / sum(parts) for part in parts]


def perturbed(weights: Sequence[float], updates: Sequence[float], by: float) -> list[float]:
    """More weight on who has made the most updates and less on who has made the fewest, of several the first:
    α·(1+δ) and α·(1−δ). They no longer add up to one. If all have made as many, nothing changes.

    >>> [round(each, 3) for each in perturbed([0.29, 0.26, 0.24, 0.21], (29, 26, 24, 21), by=0.1)]
    [0.319, 0.26, 0.24, 0.189]
    """
    changed = list(weights)
    if len(set(updates)) > 1:
        changed[updates.index(max(updates))] *= 1 + by
        changed[updates.index(min(updates))] *= 1 - by
    return changed


def may_perturb(norms: Sequence[float], size: int, gate: float) -> bool:
    """Whether every model is small enough: max_i ‖w_i‖/d below the gate, d numbers in each. What is perturbed grows,
    and with momentum it grows more at each merge: to be asked at every one.

    >>> may_perturb((3.0, 4.0), size=100, gate=0.1), may_perturb((3.0, 40.0), size=100, gate=0.1)
    (True, False)
    """
    return max(norms) / size < gate


def push_on_(merged: Tensor, last: Tensor, before: Tensor, momentum: float) -> None:
    """w' = merged + γ (w − w_before), in place; then w_before ← w and w ← w'.

    >>> import torch
    >>> merged, last, before = torch.tensor([5.0]), torch.tensor([4.0]), torch.tensor([2.0])
    >>> push_on_(merged, last, before, momentum=0.5)
    >>> merged, last, before
    (tensor([6.]), tensor([6.]), tensor([4.]))
    """
    if momentum:
        merged.add_(last, alpha=momentum).sub_(before, alpha=momentum)
    before.copy_(last)
    last.copy_(merged)


def draw_(model: Tensor, centre: Tensor, by: float) -> None:
    """w_i ← w_i − ρ (w_i − z), in place.

    >>> import torch
    >>> model = torch.tensor([4.0])
    >>> draw_(model, torch.tensor([0.0]), by=0.25)
    >>> model
    tensor([3.])
    """
    model.mul_(1 - by).add_(centre, alpha=by)
