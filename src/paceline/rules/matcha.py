"""MATCHA: a few matchings of the graph in each round, the more important ones more often.

[paper] The edges are split into M matchings. In round k matching s is active with probability p_s, independently of the
others, and all workers mix by

    W_k = I − α Σ_s z_sk L_s,      z_sk ~ Bernoulli(p_s)

    p   maximises  λ₂(Σ p_s L_s)   subject to   Σ p_s ≤ M·budget,  0 ≤ p ≤ 1
    α   minimises  ρ = λ_max(I − 2αL̄ + α²(L̄² + 2L̃) − J),      L̄ = Σ p_s L_s,   L̃ = Σ p_s(1 − p_s) L_s

On average a round exchanges the budget's part of all matchings. ρ < 1 is E‖W_k x − mean‖² / ‖x − mean‖² at worst, the
ρ of `mixing`; with budget 1 all matchings are always active, and it is D-PSGD with the best constant.

[ours] Which matchings are active is a hash of (seed, round, matching): no rank has to tell another. Probabilities are
kept to six digits and α to nine, so that ranks whose processors round differently still hold the same ones.

Wang, Sahu, Yang, Joshi and Kar (2019), arXiv 1905.09435.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import floor

import numpy as np

from paceline.errors import PacelineError
from paceline.rules.chance import chance
from paceline.rules.connectivity import best_weights, second_eigenvalue
from paceline.rules.graphs import Graph, Matrix, laplacian
from paceline.rules.matchings import Matchings, given_matchings, matchings

STEPS = 1_000_000
"""Probabilities are whole millionths: hundreds of times coarser than the solver is exact."""
HALVINGS, DIGITS = 40, 9
"""For α: as exact as a minimum can be found in floats, and fewer digits kept, on which all processors agree."""


@dataclass(frozen=True)
class Matcha:
    """A graph's matchings, how often each is used, and how far a round then mixes.

    Args:
        workers: how many.
        matchings: M of them, each edges that share no rank.
        probabilities: of each matching in each round.
        alpha: what an active edge weighs.
        rho: what a round leaves of the squared distance to the mean, at worst and on average.

    >>> from paceline.rules.graphs import ring
    >>> plan = matcha(ring(4), budget=0.5)
    >>> plan.probabilities, round(plan.alpha, 6), round(plan.rho, 6)
    ((0.5, 0.5), 0.5, 0.5)
    >>> [plan.active(seed=0, round=number) for number in range(6)]
    [(0,), (1,), (0, 1), (), (), (0,)]
    >>> [plan.partners(0, seed=0, round=number) for number in range(6)]
    [(1,), (3,), (1, 3), (), (), (1,)]
    """

    workers: int
    matchings: Matchings
    probabilities: tuple[float, ...]
    alpha: float
    rho: float

    def active(self, seed: int, round: int) -> tuple[int, ...]:
        """Which matchings are used in a round, by their places: the same on every rank, whoever asks and when."""
        return active(self.probabilities, seed, round)

    def partners(self, rank: int, seed: int, round: int) -> tuple[int, ...]:
        """Whom a rank exchanges models with in a round, in the order of the matchings; mostly few, often nobody:

        x_i ← x_i + α Σ_j (x_j − x_i)      over these j
        """
        return tuple(self._partner[s][rank] for s in self.active(seed, round) if rank in self._partner[s])

    def weights(self, active: Iterable[int]) -> Matrix:
        """W of a round in which these matchings are used."""
        edges = [edge for place in active for edge in self.matchings[place]]
        return np.eye(self.workers) - self.alpha * laplacian(self.workers, edges)

    @cached_property
    def _partner(self) -> list[dict[int, int]]:
        return [dict([*edges, *((other, one) for one, other in edges)]) for edges in self.matchings]


def active(probabilities: Sequence[float], seed: int, round: int) -> tuple[int, ...]:
    """The places of what is used in a round, each drawn by itself.

    >>> [active((1.0, 0.5, 0.0), seed=0, round=number) for number in range(4)]
    [(0,), (0, 1), (0, 1), (0,)]
    """
    drawn = enumerate(probabilities)
    return tuple(place for place, probability in drawn if chance("matching", seed, round, place) < probability)


@lru_cache(maxsize=64)
def matcha(graph: Graph, budget: float, given: Matchings | None = None) -> Matcha:
    """The best probabilities and α for a budget.

    Args:
        graph: connected.
        budget: the part of the matchings that a round uses on average, above 0 and at most 1.
        given: matchings of one's own instead of those that `matchings` finds.

    >>> from paceline.rules.graphs import ring
    >>> plan = matcha(ring(8), budget=0.5)
    >>> plan.probabilities, round(plan.alpha, 6), round(plan.rho, 6)
    ((0.5, 0.5), 0.607369, 0.783905)
    """
    if not 0 < budget <= 1:
        raise PacelineError(
            f"A budget of {budget:g} is not possible.",
            cause="It is the part of the matchings that a round uses.",
            remedy="Give more than 0 and at most 1.",
        )
    split = matchings(graph.connected()) if given is None else given_matchings(graph.connected(), given)
    if not split:  # a single worker
        return Matcha(graph.workers, (), (), 0.0, 0.0)
    laplacians = np.array([laplacian(graph.workers, edges) for edges in split])
    exact = best_weights(laplacians, total=budget * len(split))
    probabilities = _whole_steps(exact)
    if second_eigenvalue(np.tensordot(probabilities, laplacians, 1)) <= 0:
        raise PacelineError(
            f"A budget of {budget:g} is too small for {len(split)} matchings.",
            cause="Probabilities below a millionth are never drawn.",
            remedy="Give a larger one.",
        )
    alpha, rho = best_step(laplacians, probabilities)
    return Matcha(graph.workers, split, probabilities, alpha, rho)


def best_step(laplacians: Matrix, probabilities: Sequence[float]) -> tuple[float, float]:
    """α and ρ for given probabilities.

    Args:
        laplacians: of the matchings, of shape (M, workers, workers).
        probabilities: one for each.

    ρ is convex in α, as the largest of xᵀ(I − 2αL̄ + α²(L̄² + 2L̃))x over unit vectors x that sum to zero, each a parabola
    with its minimum at or before 1/λ₂(L̄). The parabola of the largest eigenvector says on which side the minimum is,
    whether or not it is the only one.

    >>> halves = np.array([laplacian(4, [(0, 1), (2, 3)]), laplacian(4, [(1, 2), (0, 3)])])
    >>> alpha, rho = best_step(halves, (1.0, 1.0))  # both in every round: α = 2/(λ₂ + λ_n)
    >>> round(alpha, 6), round(rho, 6)
    (0.333333, 0.111111)
    """
    chances = np.asarray(probabilities)
    mean, spread = (np.tensordot(each, laplacians, 1) for each in (chances, chances * (1 - chances)))
    square = mean @ mean + 2 * spread
    rest = np.eye(len(mean)) - 1 / len(mean)
    low, high = 0.0, 1 / second_eigenvalue(mean)
    for _ in range(HALVINGS):
        alpha = (low + high) / 2
        worst = np.linalg.eigh(rest - 2 * alpha * mean + alpha**2 * square)[1][:, -1]
        if worst @ (alpha * square - mean) @ worst > 0:
            high = alpha
        else:
            low = alpha
    alpha = round(high, DIGITS)
    rho = np.linalg.eigvalsh(rest - 2 * alpha * mean + alpha**2 * square)[-1]
    return alpha, max(0.0, float(rho))


def _whole_steps(exact: Iterable[float]) -> tuple[float, ...]:
    """Rounded down, so that the budget holds; but by no more than the solver is exact where a step is just missed."""
    return tuple(min(1.0, floor(each * STEPS + 0.1) / STEPS) for each in exact)
