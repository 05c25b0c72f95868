"""Who talks to whom: graphs of workers, by name or edge by edge.

    ring          i to i±1; two neighbours, however many workers
    torus         a grid of rows and columns, both closed to rings; the shape nearest to a square; four neighbours
    exponential   i to i±2^k; about 2·log₂ n neighbours, and no two workers further apart than log₂ n
    complete      everybody to everybody
    star          everybody to rank 0, as with a parameter server
    erdos-renyi   every pair with the same probability, independently

All are undirected and connected: whatever one worker learns must be able to reach every other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from math import isqrt, log

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError, no_such
from paceline.rules.chance import chance

Edge = tuple[int, int]
Matrix = NDArray[np.float64]

MOST_TRIES = 100
"""For a connected random graph. At the default probability the first or second is one; where a hundred are not, the
probability is too small, and the user should know."""


@dataclass(frozen=True)
class Graph:
    """Workers and the pairs of them that exchange models.

    Args:
        workers: how many; their ranks are 0 to workers − 1.
        edges: pairs of ranks, in any order and either way round; kept as (smaller, larger), sorted.

    >>> graph = Graph(4, ((1, 0), (1, 2), (3, 1)))
    >>> graph.edges, graph.neighbours(1), graph.degree
    (((0, 1), (1, 2), (1, 3)), (0, 2, 3), 3)
    """

    workers: int
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        _check_workers(self.workers)
        edges = sorted(_checked(edge, self.workers) for edge in self.edges)
        for edge, following in pairwise(edges):
            if edge == following:
                raise PacelineError(
                    f"The edge {edge[0]}-{edge[1]} is given twice.",
                    cause="An edge goes both ways.",
                    remedy="Leave one of them out.",
                )
        object.__setattr__(self, "edges", tuple(edges))  # the one moment at which a frozen value may still be set

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Whom a rank exchanges models with, in order."""
        return self._neighbours[rank]

    @cached_property
    def _neighbours(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.workers)]
        for one, other in self.edges:
            found[one].append(other)
            found[other].append(one)
        return tuple(tuple(sorted(each)) for each in found)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Of each rank: how many neighbours it has."""
        return tuple(map(len, self._neighbours))

    @property
    def degree(self) -> int:
        """The largest of all ranks', Δ."""
        return max(self.degrees)

    @property
    def is_complete(self) -> bool:
        return 2 * len(self.edges) == self.workers * (self.workers - 1)

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """The parts that hang together, each in order of rank.

        >>> Graph(5, ((0, 3), (1, 4))).components
        ((0, 3), (1, 4), (2,))
        """
        left, parts = set(range(self.workers)), []
        while left:
            part, border = set[int](), {min(left)}
            while border:
                part |= border
                border = {near for rank in border for near in self.neighbours(rank)} - part
            left -= part
            parts.append(tuple(sorted(part)))
        return tuple(parts)

    def among(self, here: Sequence[int]) -> Graph:
        """The graph over those who are here, each by its place among them. Where a rank is missing, its neighbours are
        joined to a ring in the order of their ranks: who could reach each other through it still can. The missing ones
        are taken out in order, so that all who know who is here know the same graph.

        Args:
            here: ranks of this graph, in order.

        >>> ring(5).among((0, 1, 3, 4)).edges  # a ring again
        ((0, 1), (0, 3), (1, 2), (2, 3))
        >>> star(5).among((1, 2, 3, 4)).edges  # without its centre, too
        ((0, 1), (0, 3), (1, 2), (2, 3))
        """
        if len(here) == self.workers:
            return self  # every rank of a simulation asks
        near = [set(each) for each in self._neighbours]
        for missing in sorted(set(range(self.workers)).difference(here)):
            around = sorted(near[missing])
            for one, other in zip(around, [*around[1:], *around[:1]], strict=True):
                near[one] = (near[one] | {other}) - {missing, one}
                near[other] = (near[other] | {one}) - {missing, other}
            near[missing] = set()
        places = {rank: place for place, rank in enumerate(here)}
        return _graph(len(here), ((places[one], places[other]) for one in here for other in near[one]))

    def widened(self, workers: int) -> Graph:
        """The graph with further ranks, each joined to the two that have the fewest neighbours by then. A complete one
        stays complete.

        >>> Graph(4, ((0, 1), (1, 2), (1, 3))).widened(5).edges  # a leaf more would have hung on one rank alone
        ((0, 1), (0, 4), (1, 2), (1, 3), (2, 4))
        """
        if self.is_complete:
            return complete(workers)
        edges, degrees = list(self.edges), list(self.degrees)
        for further in range(self.workers, workers):
            chosen = sorted(range(further), key=lambda rank: degrees[rank])[:2]
            edges += [(rank, further) for rank in chosen]
            degrees.append(len(chosen))
            for rank in chosen:
                degrees[rank] += 1
        return Graph(workers, tuple(edges))

    def connected(self) -> Graph:
        """Itself, or an error that names the parts which do not hang together."""
        if len(self.components) == 1:
            return self
        shown = " and ".join(_shown(part) for part in self.components[:4])
        more = f" and {len(self.components) - 4} more" if len(self.components) > 4 else ""
        raise PacelineError(
            f"The graph is not connected: its parts are {shown}{more}.",
            cause="What one part learns would never reach the others.",
            remedy="Add an edge from each part to another.",
        )


def laplacian(workers: int, edges: Iterable[Edge], weights: Iterable[float] | None = None) -> Matrix:
    """L = Σ w_e (e_i − e_j)(e_i − e_j)ᵀ over the edges e = (i, j): degrees on the diagonal, −w beside it.

    Args:
        workers: the matrix has so many rows.
        edges: pairs of ranks.
        weights: one for each edge; 1 by default.

    >>> laplacian(3, [(0, 1), (1, 2)]).tolist()
    [[1.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 1.0]]
    """
    matrix = np.zeros((workers, workers))
    edges = tuple(edges)
    for (one, other), weight in zip(edges, [1.0] * len(edges) if weights is None else weights, strict=True):
        matrix[one, other] -= weight
        matrix[other, one] -= weight
        matrix[one, one] += weight
        matrix[other, other] += weight
    return matrix


def ring(workers: int) -> Graph:
    """
    >>> ring(4).edges, ring(2).edges, ring(1).edges
    (((0, 1), (0, 3), (1, 2), (2, 3)), ((0, 1),), ())
    """
    return _graph(workers, ((rank, (rank + 1) % workers) for rank in range(workers)))


def torus(workers: int) -> Graph:
    """Rank r·columns + c at row r and column c, with rows ≤ columns as near to each other as divisors can be.

    >>> torus(6).edges  # two rows of three: each column is one edge
    ((0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 5), (3, 4), (3, 5), (4, 5))
    """
    _check_workers(workers)
    rows = next(rows for rows in range(isqrt(workers), 0, -1) if workers % rows == 0)
    if rows == 1 and workers > 1:
        raise PacelineError(
            f"{workers} workers do not make a torus.",
            cause="The number is prime, so that there is only one row.",
            remedy="Take ring, which that row is.",
        )
    columns = workers // rows
    places = [(row, column) for row in range(rows) for column in range(columns)]
    right = ((row * columns + column, row * columns + (column + 1) % columns) for row, column in places)
    down = ((row * columns + column, (row + 1) % rows * columns + column) for row, column in places)
    return _graph(workers, [*right, *down])


def complete(workers: int) -> Graph:
    """
    >>> complete(3).edges
    ((0, 1), (0, 2), (1, 2))
    """
    return _graph(workers, combinations(range(workers), 2))


def star(workers: int) -> Graph:
    """
    >>> star(4).edges
    ((0, 1), (0, 2), (0, 3))
    """
    return _graph(workers, ((0, rank) for rank in range(1, workers)))


def exponential(workers: int) -> Graph:
    """
    >>> exponential(6).neighbours(0)  # 1, 2 and 4 on, and as far back
    (1, 2, 4, 5)
    """
    steps = [1 << bit for bit in range(max(workers - 1, 0).bit_length())]
    return _graph(workers, ((rank, (rank + step) % workers) for rank in range(workers) for step in steps))


def erdos_renyi(workers: int, probability: float | None = None, seed: int = 0) -> Graph:
    """Every pair with the same probability; drawn again until the graph is connected.

    Args:
        workers: how many.
        probability: of each edge. By default 2·ln n / n, twice the threshold above which a large graph is almost
            surely connected (Erdős and Rényi 1960).
        seed: the same one gives the same graph, on every platform.

    >>> erdos_renyi(5, 0.4, seed=1).edges
    ((0, 1), (0, 4), (1, 3), (2, 3), (2, 4), (3, 4))
    """
    _check_workers(workers)
    if probability is None:
        probability = min(1.0, 2 * log(workers) / workers)
    if not 0 <= probability <= 1:
        raise PacelineError(
            f"An edge cannot have the probability {probability:g}.", remedy="Give a number from 0 to 1."
        )
    pairs = tuple(combinations(range(workers), 2))
    for attempt in range(MOST_TRIES):
        drawn = _graph(workers, (pair for pair in pairs if chance("edge", seed, attempt, *pair) < probability))
        if len(drawn.components) == 1:
            return drawn
    raise PacelineError(
        f"None of {MOST_TRIES} random graphs of {workers} workers was connected.",
        cause=f"Each pair has an edge with probability {probability:g} only.",
        remedy=f"Give more than ln n / n = {log(workers) / workers:.2g}, better twice that.",
    )


def from_edges(workers: int, edges: Iterable[Edge]) -> Graph:
    """A connected graph of one's own.

    >>> from_edges(3, [(0, 1), (2, 1)]).edges
    ((0, 1), (1, 2))
    """
    return Graph(workers, tuple(edges)).connected()


BUILDERS: dict[str, Callable[[int], Graph]] = {
    "ring": ring,
    "torus": torus,
    "exponential": exponential,
    "complete": complete,
    "star": star,
}
RANDOM = "erdos-renyi"
NAMES = (*BUILDERS, RANDOM)


@lru_cache(maxsize=64)
def named(name: str, workers: int, *, probability: float | None = None, seed: int = 0) -> Graph:
    """The graph of that name.

    Args:
        name: one of `NAMES`.
        workers: how many.
        probability, seed: of `erdos-renyi`; the others have no chance in them.

    >>> named("ring", 3) == named("complete", 3)
    True
    """
    if name not in NAMES:
        raise no_such("graph", name, NAMES)
    _check_workers(workers)
    if name == RANDOM:
        return erdos_renyi(workers, probability, seed)
    if probability is not None:
        raise PacelineError(f"A {name} has no probability.", remedy=f"Leave it out, or take {RANDOM}.")
    return BUILDERS[name](workers)


def _graph(workers: int, edges: Iterable[Edge]) -> Graph:
    """Small graphs repeat themselves (in a ring of two the way on is the way back), and one worker meets itself."""
    _check_workers(workers)
    return Graph(workers, tuple({(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]}))


def _check_workers(workers: int) -> None:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise PacelineError(f"A graph of {workers!r} workers is not possible.", remedy="Give one or more.")


def _checked(edge: Edge, workers: int) -> Edge:
    """The edge, smaller rank first."""
    pair = tuple(edge) if isinstance(edge, (tuple, list)) else ()
    if len(pair) != 2 or any(isinstance(rank, bool) or not isinstance(rank, int) for rank in pair):
        raise PacelineError(f"{edge!r} is not an edge.", remedy="Give a pair of ranks, for example (0, 1).")
    for rank in pair:
        if not 0 <= rank < workers:
            raise PacelineError(
                f"The edge {pair[0]}-{pair[1]} leads to rank {rank}.",
                cause=f"With {workers} workers there are only ranks 0 to {workers - 1}.",
                remedy="Count ranks from 0.",
            )
    if pair[0] == pair[1]:
        raise PacelineError(
            f"The edge {pair[0]}-{pair[1]} leads from a rank to itself.",
            cause="A rank always keeps a share of its own model.",
            remedy="Leave it out.",
        )
    return min(pair), max(pair)


def _shown(part: tuple[int, ...]) -> str:
    more = f", … ({len(part)} ranks)" if len(part) > 8 else ""
    return "{" + ", ".join(map(str, part[:8])) + more + "}"
