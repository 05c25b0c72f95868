"""The constants of A²CiD², which accelerates asynchronous averaging of pairs by a momentum between the models.

Every rank keeps a second copy x̃ of its model x. Between events the two drift towards each other, and when ranks i and
j average, both copies move [paper, with one gradient of each rank as the unit of time]:

    dx = η (x̃ − x) dt,   dx̃ = η (x − x̃) dt;      x_i −= α (x_i − x_j),   x̃_i −= α̃ (x_i − x_j)

With λ_ij the expected averagings of the edge (i, j) in a unit of time, and e_i the i-th unit vector,

    Λ  = Σ_(i,j) λ_ij (e_i − e_j)(e_i − e_j)ᵀ                    the Laplacian of the rates
    χ₁ = sup { 1 / (xᵀΛx) : ‖x‖ = 1, x ⊥ 1 } = 1 / λ₂(Λ)         how slowly the graph mixes as a whole
    χ₂ = ½ · max_(i,j) (e_i − e_j)ᵀ Λ⁺ (e_i − e_j)               the largest resistance of an edge, halved

    η = 1 / (2·√(χ₁χ₂)),      α = ½,      α̃ = ½·√(χ₁/χ₂)

χ₂ ≤ χ₁. Plain averaging draws the models together in a time of the order of χ₁, this one of √(χ₁χ₂): on a ring of n
ranks, with rates that stay the same, n instead of n². On a complete graph both are equal, and nothing is gained.

Nabli, Belilovsky and Oyallon (2023), arXiv 2306.08289.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf, sqrt
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import PacelineError
from paceline.rules.connectivity import second_eigenvalue
from paceline.rules.graphs import Graph, laplacian

if TYPE_CHECKING:
    from torch import Tensor


GRID = 64  # eigenvalues that are tried: growth has no narrow peaks
ROUNDING = 1e-9


@dataclass(frozen=True)
class Acid:
    """What a graph and its rates make of A²CiD²; time in gradients of a rank.

    Args:
        chi_1: 1/λ₂ of the Laplacian of the rates.
        chi_2: half the largest resistance of an edge.
    """

    chi_1: float
    chi_2: float

    @property
    def eta(self) -> float:
        """How fast the two copies drift towards each other: 1/(2·√(χ₁χ₂)). Zero for a rank that is alone."""
        return 1 / (2 * sqrt(self.chi_1 * self.chi_2)) if self.chi_1 else 0.0

    @property
    def alpha_tilde(self) -> float:
        """How far an averaging moves the second copy: ½·√(χ₁/χ₂), where the model itself moves by ½."""
        return sqrt(self.chi_1 / self.chi_2) / 2 if self.chi_1 else 0.5


def even_rates(graph: Graph, averagings: float = 1.0) -> tuple[float, ...]:
    """λ of each edge when every rank takes part in so many averagings in a unit of time and draws its partners evenly.

    λ_ij = averagings/2 · (1/d_i + 1/d_j): half of a rank's averagings are its own idea, half of its neighbours'. On a
    graph whose ranks all have d neighbours this is averagings/d [paper]; on others [ours] ranks with many
    neighbours take part more often.

    >>> from paceline.rules.graphs import ring, star
    >>> even_rates(ring(4)), even_rates(star(3))
    ((0.5, 0.5, 0.5, 0.5), (0.75, 0.75))
    """
    degrees = graph.degrees
    return tuple(averagings / 2 * (1 / degrees[one] + 1 / degrees[other]) for one, other in graph.edges)


@lru_cache(maxsize=64)
def acid(graph: Graph, rates: tuple[float, ...] | None = None) -> Acid:
    """χ₁ and χ₂ of a connected graph, and with them η and α̃.

    Args:
        graph: who averages with whom.
        rates: expected averagings of each edge in a unit of time, in the order of `graph.edges`; by default
            `even_rates(graph)`, one averaging of each rank in the time of one gradient.

    >>> from paceline.rules.graphs import complete, ring
    >>> found = acid(ring(8))
    >>> [round(each, 4) for each in (found.chi_1, found.chi_2, found.eta, found.alpha_tilde)]
    [3.4142, 0.875, 0.2893, 0.9877]
    >>> found = acid(complete(8))
    >>> [round(each, 4) for each in (found.chi_1, found.chi_2, found.eta, found.alpha_tilde)]
    [0.875, 0.875, 0.5714, 0.5]
    """
    rates = even_rates(graph.connected()) if rates is None else rates
    if len(rates) != len(graph.edges):
        raise PacelineError(
            f"There are {len(rates)} rates for {len(graph.edges)} edges.", remedy="Give one for each edge of the graph."
        )
    wrong = [rate for rate in rates if not 0 <= rate < inf]
    if wrong:
        raise PacelineError(f"An edge cannot have the rate {wrong[0]:g}.", remedy="Give zero or more for each.")
    if graph.workers == 1:
        return Acid(0.0, 0.0)
    used = Graph(graph.workers, tuple(edge for edge, rate in zip(graph.edges, rates, strict=True) if rate)).connected()
    matrix = laplacian(graph.workers, graph.edges, rates)
    # Λ⁺ + J, of which the J drops out of every difference. A pseudo-inverse would have to tell zero from rounding.
    inverse = np.linalg.inv(matrix + 1 / graph.workers)
    one, other = np.array(used.edges).T
    resistances = inverse[one, one] + inverse[other, other] - 2 * inverse[one, other]
    return Acid(1 / second_eigenvalue(matrix), float(resistances.max()) / 2)


@lru_cache(maxsize=64)
def in_rounds(graph: Graph, weights: tuple[float, ...], largest: float) -> tuple[Acid, float]:
    """The constants where all average at once, in rounds, and how much of the mixing is then stable [ours].

    An averaging that moves x by w of what lies between is 2w of the paper's, which move it by half. All at once they
    may overshoot, and the second copy makes what overshoots grow. In a round, the part of the models along an
    eigenvector of I − W with eigenvalue l becomes

        (x, x̃) ← [[1 − p, p], [p, 1 − p]] · [[1 − l, 0], [−2α̃l, 1]] · (x, x̃),      p = (1 − e^(−2η)) / 2

    If that grows for some l up to the largest, half of the mixing is done, or half of that.

    Args:
        graph: who averages with whom.
        weights: of each edge in a round, on average.
        largest: eigenvalue of I − W in any round.

    >>> from paceline.rules.graphs import ring
    >>> [in_rounds(ring(12), (weight,) * 12, 4 * weight)[1] for weight in (1 / 3, 0.48)]
    [1.0, 0.5]
    """
    part = 1.0
    while True:
        constants = acid(graph, tuple(2 * part * weight for weight in weights))
        if all(_growth(constants, part * largest * place / GRID) <= 1 for place in range(GRID + 1)):
            return constants, part
        part /= 2


def _growth(constants: Acid, eigenvalue: float) -> float:
    """The largest factor by which a round multiplies (x, x̃) along an eigenvector, in the long run."""
    p = (1 - exp(-2 * constants.eta)) / 2
    drift = np.array([[1 - p, p], [p, 1 - p]])
    averaging = np.array([[1 - eigenvalue, 0.0], [-2 * constants.alpha_tilde * eigenvalue, 1.0]])
    return float(np.abs(np.linalg.eigvals(drift @ averaging)).max()) - ROUNDING


def drift_(model: Tensor, second: Tensor, eta: float, time: float) -> None:
    """The two copies drift towards each other for so long, in place: their sum stays, their distance falls by e^(−2ηt).

    >>> import torch
    >>> model, second = torch.tensor([1.0]), torch.tensor([0.0])
    >>> drift_(model, second, eta=0.5, time=1.0)
    >>> model, second
    (tensor([0.6839]), tensor([0.3161]))
    """
    part = (1 - exp(-2 * eta * time)) / 2
    step = (second - model).mul_(part)
    model.add_(step)
    second.sub_(step)
