"""A graph in one word, as an option of a strategy: a name, or edges, or edges in matchings.

ring                     one of `graphs.NAMES`
0-1+1-2+0-2              edges
0-1+2-3/1-2+0-3          edges in matchings, for MATCHA
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from paceline.errors import PacelineError
from paceline.rules.graphs import RANDOM, Edge, Graph, from_edges, named
from paceline.rules.matchings import Matchings


def written(matchings: Iterable[Iterable[Edge]]) -> str:
    """Edges, in matchings or all in one group, as a word.

    >>> written([[(0, 1), (2, 3)], [(1, 2)]])
    '0-1+2-3/1-2'
    """
    return "/".join("+".join(f"{one}-{other}" for one, other in group) for group in matchings)


@lru_cache(maxsize=64)  # every rank of a simulation asks
def graph_of(text: str, workers: int, probability: float = 0.0, seed: int = 0) -> Graph:
    """The connected graph that the word stands for.

    Args:
        text: see above.
        workers: how many.
        probability: of an edge of `erdos-renyi`; 0 for the default of that graph.
        seed: of `erdos-renyi`.

    >>> graph_of("0-1+2-3/1-2", workers=4).edges
    ((0, 1), (1, 2), (2, 3))
    """
    groups = _groups(text)
    if groups is not None:
        return from_edges(workers, [edge for group in groups for edge in group])
    given = {"probability": probability or None} if text == RANDOM else {}
    return named(text, workers, seed=seed, **given).connected()


def graph_among(text: str, workers: int, here: Sequence[int], probability: float = 0.0, seed: int = 0) -> Graph:
    """The graph over those who are here, each by its place among them.

    Args:
        text, probability, seed: see `graph_of`.
        workers: how many the run began with.
        here: ranks, in order. Those from `workers` on have come since. Where the word stands for no graph of so many,
            as edges do not, they are joined to the graph of those before them.

    >>> graph_among("ring", 4, here=(0, 1, 2, 3, 4)).edges
    ((0, 1), (0, 4), (1, 2), (2, 3), (3, 4))
    >>> graph_among("0-1+1-2", 3, here=(0, 1, 2, 3)).edges
    ((0, 1), (0, 3), (1, 2), (2, 3))
    """
    seats = max(workers, here[-1] + 1)
    try:
        graph = graph_of(text, seats, probability, seed)
    except PacelineError:
        if seats == workers:
            raise
        graph = graph_of(text, workers, probability, seed).widened(seats)
    return graph.among(here)


def matchings_in(text: str) -> Matchings | None:
    """The matchings that the word gives; None if it gives none.

    >>> matchings_in("0-1+2-3/1-2"), matchings_in("0-1+2-3"), matchings_in("ring")
    ((((0, 1), (2, 3)), ((1, 2),)), None, None)
    """
    groups = _groups(text)
    return groups if groups is not None and "/" in text else None


def _groups(text: str) -> Matchings | None:
    if not text or not (text[0].isdigit() or "/" in text):
        return None
    try:
        return tuple(tuple(_edge(each) for each in group.split("+")) for group in text.split("/"))
    except ValueError:
        raise PacelineError(
            f"{text!r} is neither the name of a graph nor a list of edges.",
            remedy="Write edges as in 0-1+1-2, and matchings as in 0-1+2-3/1-2.",
        ) from None


def _edge(text: str) -> Edge:
    one, other = text.split("-")
    return int(one), int(other)
