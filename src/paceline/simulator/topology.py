"""Who exchanges models with whom in a described cluster: the `[graph]` of a cluster file.

It is a description, not yet a graph: one by name fits any number of workers. What graphs there are and what follows
from them is in `rules/graphs.py`; here the same protests get the key that they are about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError, no_such
from paceline.rules.graph_text import written
from paceline.rules.graphs import NAMES, RANDOM, Edge, Graph, from_edges, named
from paceline.rules.matchings import Matchings, given_matchings, matchings
from paceline.simulator.checks import WrongValueError, number, whole


@dataclass(frozen=True)
class Topology:
    """A graph by name or by its edges.

    Args:
        name: one of `paceline.rules.graphs.NAMES`.
        probability: of each edge of an `erdos-renyi`; by default 2·ln n / n.
        seed: of an `erdos-renyi`.
        edges: pairs of ranks, instead of a name.
        matchings: the edges in groups that share no rank; by default found by edge colouring.

    >>> Topology("ring").graph_of(workers=4).edges
    ((0, 1), (0, 3), (1, 2), (2, 3))
    >>> Topology(edges=((0, 1), (1, 2))).matchings_of(workers=3)
    (((0, 1),), ((1, 2),))
    """

    name: str | None = None
    probability: float | None = None
    seed: int = 0
    edges: tuple[Edge, ...] | None = None
    matchings: Matchings | None = None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.edges is None):
            raise WrongValueError(
                "name" if self.name is None else "edges",
                "A graph has either a name or edges.",
                f"Possible names: {', '.join(NAMES)}.",
            )
        if self.name is not None and self.name not in NAMES:
            with _about("name"):
                raise no_such("graph", str(self.name), NAMES)
        if self.probability is not None:
            number(self, "probability", least=0.0)
            if self.name != RANDOM:
                raise WrongValueError("probability", f"Only an {RANDOM} has a probability.", "Leave it out.")
        whole(self, "seed", 0)
        # A file gives lists; as a value it must be hashable. Whether the edges are edges is judged with the workers.
        for key in ("edges", "matchings"):
            object.__setattr__(self, key, _as_tuples(getattr(self, key)))
        if not isinstance(self.edges, tuple | None):
            raise WrongValueError("edges", "edges is not a list.", "For example edges = [[0, 1], [1, 2]].")
        given = () if self.matchings is None else self.matchings
        if not isinstance(given, tuple) or not all(isinstance(each, tuple) for each in given):
            raise WrongValueError(
                "matchings",
                "matchings is not a list of lists of edges.",
                "For example matchings = [[[0, 1], [2, 3]], [[1, 2]]].",
            )

    def graph_of(self, workers: int) -> Graph:
        """The graph, connected, of so many workers."""
        if self.name is not None:
            with _about("probability" if self.probability is not None else "name"):
                return named(self.name, workers, probability=self.probability, seed=self.seed)
        with _about("edges"):
            return from_edges(workers, self.edges or ())

    def matchings_of(self, workers: int) -> Matchings:
        """Its edges in matchings: the given ones, checked, or those that edge colouring finds."""
        graph = self.graph_of(workers)
        if self.matchings is None:
            return matchings(graph)
        with _about("matchings"):
            return given_matchings(graph, self.matchings)

    def in_a_word(self, workers: int) -> str:
        """As an option of a strategy: its edges, in matchings if it has some.

        >>> Topology("ring").in_a_word(workers=4)
        '0-1+0-3+1-2+2-3'
        """
        return written([self.graph_of(workers).edges] if self.matchings is None else self.matchings_of(workers))

    def check(self, workers: int) -> None:
        """Protest when it does not fit so many workers."""
        if self.matchings is not None:
            self.matchings_of(workers)
        self.graph_of(workers)


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Add the key to what goes wrong within."""
    try:
        yield
    except PacelineError as error:
        raise WrongValueError(key, error.what, f"{error.cause} {error.remedy}".strip()) from error


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(each) for each in value) if isinstance(value, (list, tuple)) else value
