"""How a worker weighs its neighbours' models against its own: x_i ← Σ_j W_ij x_j.

W is symmetric and its rows sum to one, so that mixing never moves the mean of all models; it only draws them together.
How well is told by

    ρ = ‖E[WᵀW] − J‖ = max_x E‖Wx − mean‖² / ‖x − mean‖²,        J = 1/n everywhere

the part of the squared distance to the mean that one round leaves at worst: 0 is a complete average, 1 none at all. For
a W that is always the same, ρ is the square of the largest |eigenvalue| but the one that is 1.

    metropolis      W_ij = 1 / (1 + max(d_i, d_j))                 needs only the neighbours' degrees
    best-constant   W = I − αL,  α = 2 / (λ₂ + λ_n)                the best of all with one weight for every edge
    uniform         W = J                                          complete graphs only: an average over all

Xiao and Boyd (2004), "Fast linear iterations for distributed averaging".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import PacelineError, no_such
from paceline.rules.graphs import Graph, Matrix, laplacian

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = 1e-9
"""What floats may lose in a row's sum, and less than any weight that was meant."""


@lru_cache(maxsize=64)
def mixing_weights(graph: Graph, rule: str = "metropolis") -> Matrix:
    """W of a connected graph by one of the rules above; the same array for all who ask, so it cannot be written to.

    Args:
        graph: who has a weight at all, besides oneself.
        rule: one of `RULES`.

    >>> from paceline.rules.graphs import ring, star
    >>> mixing_weights(star(3)).round(3).tolist()
    [[0.333, 0.333, 0.333], [0.333, 0.667, 0.0], [0.333, 0.0, 0.667]]
    >>> mixing_weights(ring(4), "best-constant")[0].round(3).tolist()
    [0.333, 0.333, 0.0, 0.333]
    """
    if rule not in RULES:
        raise no_such("rule of mixing", rule, RULES)
    weights = RULES[rule](graph.connected())
    weights.setflags(write=False)
    return weights


def best_alpha(graph: Graph) -> float:
    """α = 2 / (λ₂ + λ_n) of the Laplacian: what every edge weighs in `best-constant`.

    >>> from paceline.rules.graphs import ring
    >>> round(best_alpha(ring(8)), 6), best_alpha(ring(1))
    (0.43613, 0.0)
    """
    if graph.workers == 1:
        return 0.0
    values = np.linalg.eigvalsh(laplacian(graph.workers, graph.connected().edges))
    return float(2 / (values[1] + values[-1]))


def contraction(weights: Matrix) -> float:
    """ρ of a W that is the same in every round.

    >>> from paceline.rules.graphs import ring
    >>> round(contraction(mixing_weights(ring(8), "best-constant")), 6)
    0.554311
    """
    return float(np.linalg.norm(weights - 1 / len(weights), 2) ** 2)


def check_mixing(weights: Matrix) -> float:
    """ρ of a W that draws all models together to their mean, or an error that says why it does not.

    >>> check_mixing(np.array([[0.5, 0.5], [0.5, 0.5]]))
    0.0
    """
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1]:
        raise PacelineError(
            f"A mixing matrix of shape {weights.shape} is not square.",
            remedy="Give one row and column for each worker.",
        )
    if not np.isfinite(weights).all():
        raise PacelineError("The mixing matrix holds numbers that are not finite.")
    skew = np.abs(weights - weights.T)
    if skew.max() > ROUNDING:
        one, other = (int(place) for place in np.unravel_index(skew.argmax(), skew.shape))
        raise PacelineError(
            f"The mixing matrix is not symmetric: rank {one} gives rank {other} the weight {weights[one, other]:g} and "
            f"gets {weights[other, one]:g}.",
            cause="The mean of all models would drift.",
            remedy="Give both the same weight.",
        )
    off = np.abs(weights.sum(axis=1) - 1)
    if off.max() > ROUNDING:
        rank = int(off.argmax())
        raise PacelineError(
            f"Row {rank} of the mixing matrix sums to {weights[rank].sum():.9g}, not to 1.",
            cause="Models would shrink or grow with every round.",
            remedy="Put what is missing on the diagonal.",
        )
    rho = contraction(weights)
    if rho >= 1 - ROUNDING:
        raise PacelineError(
            f"The mixing matrix does not draw models together: ρ = {rho:.6g}, and it must be below 1.",
            cause="The graph is not connected, or weights are so large that models overshoot each other.",
            remedy="Add edges, or give neighbours smaller weights.",
        )
    return rho


def pull(model: Tensor, others: Sequence[tuple[Tensor, float]]) -> Tensor | None:
    """Σ_j w_j (x_j − x): what mixing adds to a model; None if there is nobody to mix with.

    Args:
        model: x.
        others: each x_j and w_j.

    >>> import torch
    >>> pull(torch.tensor([1.0, 2.0]), [(torch.tensor([2.0, 2.0]), 0.25), (torch.tensor([5.0, 0.0]), 0.5)])
    tensor([ 2.2500, -1.0000])
    """
    if not others:
        return None
    difference = model * -sum(weight for _, weight in others)
    for other, weight in others:
        difference.add_(other, alpha=weight)
    return difference


def _metropolis(graph: Graph) -> Matrix:
    degrees = graph.degrees
    weights = [1 / (1 + max(degrees[one], degrees[other])) for one, other in graph.edges]
    return np.eye(graph.workers) - laplacian(graph.workers, graph.edges, weights)


def _best_constant(graph: Graph) -> Matrix:
    return np.eye(graph.workers) - best_alpha(graph) * laplacian(graph.workers, graph.edges)


def _uniform(graph: Graph) -> Matrix:
    if not graph.is_complete:
        raise PacelineError(
            "Uniform mixing needs a complete graph.",
            cause="Everybody averages with everybody.",
            remedy="Take metropolis or best-constant, or the graph complete.",
        )
    return np.full((graph.workers, graph.workers), 1 / graph.workers)


RULES = {"metropolis": _metropolis, "best-constant": _best_constant, "uniform": _uniform}
