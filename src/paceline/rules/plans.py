"""Who mixes with whom in which round, and with what weight: the W_k of D-PSGD and of MATCHA, row by row.

    x_i ← x_i + Σ_j W_ij (x_j − x_i)

Every plan is checked when it is made: W is symmetric, its rows sum to one, and it draws the models together (ρ < 1; of
MATCHA, whose W is drawn anew in each round, on average).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property, lru_cache

import numpy as np

from paceline.rules.graphs import Graph, laplacian
from paceline.rules.matcha import matcha
from paceline.rules.matchings import Matchings
from paceline.rules.mixing import check_mixing, mixing_weights


class Plan(ABC):
    """The weights of every round.

    Args:
        graph: who may exchange models at all.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @abstractmethod
    def weights(self, rank: int, round_number: int) -> Mapping[int, float]:
        """Of the neighbours with whom the rank exchanges models in the round."""

    @abstractmethod
    def mean_weights(self) -> tuple[float, ...]:
        """Of each edge of the graph, over all rounds."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest eigenvalue of I − W in any round."""


@lru_cache(maxsize=64)  # every rank of a simulation asks
def every_round(graph: Graph, mixing: str) -> EveryRound:
    """D-PSGD's plan with one of the rules of `mixing`."""
    return EveryRound(graph, mixing)


@lru_cache(maxsize=64)
def drawn(graph: Graph, budget: float, seed: int, given: Matchings | None = None) -> Drawn:
    """MATCHA's plan; see `matcha` for the arguments."""
    return Drawn(graph, budget, seed, given)


class EveryRound(Plan):
    """D-PSGD: all neighbours in every round.

    >>> from paceline.rules.graphs import ring
    >>> EveryRound(ring(4), "best-constant").weights(rank=0, round_number=7)
    {1: 0.3333333333333333, 3: 0.3333333333333333}
    """

    def __init__(self, graph: Graph, mixing: str) -> None:
        super().__init__(graph)
        self._matrix = mixing_weights(graph, mixing)
        if graph.workers > 1:
            check_mixing(self._matrix)
        self._rows = [{j: float(self._matrix[i, j]) for j in graph.neighbours(i)} for i in range(graph.workers)]

    def weights(self, rank: int, round_number: int) -> Mapping[int, float]:
        return self._rows[rank]

    def mean_weights(self) -> tuple[float, ...]:
        return tuple(float(self._matrix[edge]) for edge in self.graph.edges)

    @cached_property
    def largest(self) -> float:
        return 1 - float(np.linalg.eigvalsh(self._matrix)[0])


class Drawn(Plan):
    """MATCHA: the neighbours in the matchings that are drawn for the round.

    >>> from paceline.rules.graphs import ring
    >>> plan = Drawn(ring(4), budget=0.5, seed=0)
    >>> [plan.weights(rank=0, round_number=number) for number in range(4)]
    [{1: 0.5}, {3: 0.5}, {1: 0.5, 3: 0.5}, {}]
    """

    def __init__(self, graph: Graph, budget: float, seed: int, given: Matchings | None = None) -> None:
        super().__init__(graph)
        self._matcha, self._seed = matcha(graph, budget, given), seed

    def weights(self, rank: int, round_number: int) -> Mapping[int, float]:
        partners = self._matcha.partners(rank, self._seed, round_number)
        return dict.fromkeys(partners, self._matcha.alpha)

    def mean_weights(self) -> tuple[float, ...]:
        chances = zip(self._matcha.matchings, self._matcha.probabilities, strict=True)
        of_edge = {edge: self._matcha.alpha * chance for matching, chance in chances for edge in matching}
        return tuple(of_edge[edge] for edge in self.graph.edges)

    @cached_property
    def largest(self) -> float:
        return self._matcha.alpha * float(np.linalg.eigvalsh(laplacian(self.graph.workers, self.graph.edges))[-1])
