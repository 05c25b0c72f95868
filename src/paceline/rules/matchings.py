"""Edges in matchings: sets of edges of which no two share a worker, so that a whole matching is exchanged at once.

A graph whose largest degree is Δ needs at least Δ matchings, and Δ + 1 always suffice (Vizing 1964). To find them is to
colour the edges so that no two at a worker are alike. Here with Δ colours wherever swapping two of them along a path
makes room, which on bipartite graphs (every even ring, torus and star) it always does (Kőnig 1916); else with one more
by turning a fan of edges (Misra and Gries 1992). Nothing is left to chance: all ranks come to the same matchings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise, product

from paceline.errors import PacelineError
from paceline.rules.graphs import Edge, Graph

Matching = tuple[Edge, ...]
Matchings = tuple[Matching, ...]


@lru_cache(maxsize=64)
def matchings(graph: Graph) -> Matchings:
    """The edges in at most Δ + 1 matchings, each in order, the largest first.

    >>> from paceline.rules.graphs import complete, ring
    >>> matchings(ring(4))
    (((0, 1), (2, 3)), ((0, 3), (1, 2)))
    >>> [len(matchings(complete(workers))) for workers in (2, 3, 4, 5, 6)]
    [1, 3, 3, 5, 5]
    """
    found = (tuple(sorted(edges)) for edges in _Colouring(graph).classes())
    return tuple(sorted(found, key=lambda edges: (-len(edges), edges)))


def given_matchings(graph: Graph, given: Iterable[Iterable[Edge]]) -> Matchings:
    """Matchings of one's own, checked: each is one, and together they hold every edge of the graph once.

    >>> from paceline.rules.graphs import ring
    >>> given_matchings(ring(4), [[(1, 0), (2, 3)], [(1, 2)], [(3, 0)]])
    (((0, 1), (2, 3)), ((1, 2),), ((0, 3),))
    """
    checked = tuple(Graph(graph.workers, tuple(edges)).edges for edges in given)
    missing = dict.fromkeys(graph.edges)
    for number, edges in enumerate(checked, 1):
        _check_matching(number, edges)
        for edge in edges:
            if edge not in missing:
                where = "in two matchings" if edge in graph.edges else "not an edge of the graph"
                raise PacelineError(
                    f"The edge {_shown(edge)} of matching {number} is {where}.",
                    remedy="Give every edge of the graph once.",
                )
            del missing[edge]
    if missing:
        raise PacelineError(
            f"No matching holds the edge {_shown(next(iter(missing)))}.", remedy="Give every edge of the graph once."
        )
    return checked


def _check_matching(number: int, edges: Matching) -> None:
    seen: dict[int, Edge] = {}
    for edge in edges:
        for rank in edge:
            if rank in seen:
                raise PacelineError(
                    f"Matching {number} has two edges at rank {rank}: {_shown(seen[rank])} and {_shown(edge)}.",
                    cause="In a matching every rank has one partner at most.",
                    remedy="Move one of them to another matching.",
                )
            seen[rank] = edge


def _shown(edge: Edge) -> str:
    return f"{edge[0]}-{edge[1]}"


class _Colouring:
    """Colours of edges while they are being found; at every moment no two edges at a worker are alike."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._at: list[dict[int, int]] = [{} for _ in range(graph.workers)]  # at a rank: whom each colour leads to
        self._of: dict[Edge, int] = {}
        for one, other in graph.edges:
            if not self._swap(one, other):
                self._turn_fan(one, other)

    def classes(self) -> Iterator[list[Edge]]:
        """The edges of each colour."""
        for colour in sorted(set(self._of.values())):
            yield [edge for edge, its in self._of.items() if its == colour]

    def _free(self, rank: int, colours: int) -> list[int]:
        return [colour for colour in range(colours) if colour not in self._at[rank]]

    def _paint(self, one: int, other: int, colour: int) -> None:
        self._of[min(one, other), max(one, other)] = colour
        self._at[one][colour], self._at[other][colour] = other, one

    def _clear(self, one: int, other: int) -> int:
        """Take the colour away from an edge; which it was."""
        colour = self._of.pop((min(one, other), max(one, other)))
        del self._at[one][colour], self._at[other][colour]
        return colour

    def _path(self, rank: int, first: int, second: int) -> list[int]:
        """The ranks along edges of the two colours in turn, from a rank at which the second is free."""
        path, colour = [rank], first
        while colour in self._at[path[-1]]:
            path.append(self._at[path[-1]][colour])
            colour = first + second - colour
        return path

    def _flip(self, rank: int, first: int, second: int) -> None:
        """Exchange the two colours along the path, after which the first is free at the rank."""
        path = self._path(rank, first, second)
        edges = list(pairwise(path))
        colours = [self._clear(*edge) for edge in edges]
        for edge, colour in zip(edges, colours, strict=True):
            self._paint(*edge, first + second - colour)

    def _swap(self, one: int, other: int) -> bool:
        """Colour the edge with one of Δ colours that is free at both ends, or that a flip from one end makes so; false
        where every such path leads to the other end."""
        free, theirs = self._free(one, self._graph.degree), self._free(other, self._graph.degree)
        for colour in free:
            if colour in theirs:
                self._paint(one, other, colour)
                return True
        for colour, instead in product(free, theirs):
            if self._path(other, colour, instead)[-1] != one:
                self._flip(other, colour, instead)
                self._paint(one, other, colour)
                return True
        return False

    def _turn_fan(self, centre: int, tip: int) -> None:
        """Colour the edge with Δ + 1 colours, of which every rank has one free.

        A fan is a row of the centre's neighbours, each joined to the centre in a colour that is free at the one before:
        so the colours can move down by one, and its first edge gets one. Its last is then without, and a flip has made
        room for it.
        """
        colours = self._graph.degree + 1
        fan = [tip]
        while True:
            near = (rank for colour, rank in sorted(self._at[centre].items()) if colour not in self._at[fan[-1]])
            following = next((rank for rank in near if rank not in fan), None)
            if following is None:
                break
            fan.append(following)
        colour = self._free(fan[-1], colours)[0]
        self._flip(centre, colour, self._free(centre, colours)[0])
        last = next(place for place, rank in enumerate(fan) if colour not in self._at[rank])
        for rank, following in pairwise(fan[: last + 1]):
            self._paint(centre, rank, self._clear(centre, following))
        self._paint(centre, fan[last], colour)
