"""Matchings: each is one, together they are the graph, and there are not more than need be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.rules.graphs import NAMES, Graph, complete, named, ring
from paceline.rules.matchings import Matchings, given_matchings, matchings


@st.composite
def graphs(draw: st.DrawFn, most: int = 12) -> Graph:
    workers = draw(st.integers(1, most))
    pairs = [(one, other) for other in range(workers) for one in range(other)]
    return Graph(workers, tuple(pair for pair in pairs if draw(st.booleans())))


@given(graphs())
def test_at_most_one_more_than_the_largest_degree(graph: Graph) -> None:
    found = matchings(graph)
    for edges in found:
        ranks = [rank for edge in edges for rank in edge]
        assert len(set(ranks)) == len(ranks), "nobody has two partners"
    assert sorted(edge for edges in found for edge in edges) == list(graph.edges), "every edge once"
    assert graph.degree <= len(found) <= graph.degree + 1
    assert given_matchings(graph, found) == found


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_bipartite_graphs_need_no_more_than_the_largest_degree(left: int, right: int, data: st.DataObject) -> None:
    pairs = [(one, left + other) for one in range(left) for other in range(right)]
    graph = Graph(left + right, tuple(pair for pair in pairs if data.draw(st.booleans())))
    assert len(matchings(graph)) == graph.degree


@pytest.mark.parametrize("workers", [*range(2, 35, 2), 64])
def test_even_complete_graphs_are_tournaments(workers: int) -> None:
    assert [len(edges) for edges in matchings(complete(workers))] == [workers // 2] * (workers - 1)


@pytest.mark.parametrize("name", NAMES)
def test_sixteen_workers_are_never_idle_for_long(name: str) -> None:
    graph = named(name, 16)
    assert len(matchings(graph)) == graph.degree


def test_odd_rings_need_three() -> None:
    assert [len(matchings(ring(workers))) for workers in (1, 2, 3, 4, 5, 6, 7)] == [0, 1, 3, 2, 3, 2, 3]


def test_the_textbook_graph_without_room() -> None:
    """Petersen's graph: three neighbours each, and no three matchings."""
    outer = [(rank, (rank + 1) % 5) for rank in range(5)]
    inner = [(5 + rank, 5 + (rank + 2) % 5) for rank in range(5)]
    graph = Graph(10, (*outer, *inner, *((rank, 5 + rank) for rank in range(5))))
    assert len(matchings(graph)) == 4


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ((((0, 1), (1, 2)), ((2, 3),), ((0, 3),)), "Matching 1 has two edges at rank 1: 0-1 and 1-2"),
        ((((0, 1), (2, 3)), ((1, 2),)), "No matching holds the edge 0-3"),
        ((((0, 1), (2, 3)), ((1, 2), (0, 3)), ((0, 1),)), "0-1 of matching 3 is in two matchings"),
        ((((0, 2),), ((0, 1), (2, 3)), ((1, 2), (0, 3))), "0-2 of matching 1 is not an edge"),
        ((((0, 9),),), "leads to rank 9"),
    ],
)
def test_wrong_matchings_are_told_why(own: Matchings, said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        given_matchings(ring(4), own)
