"""Graphs of workers: what each name means, that small ones make sense, and that wrong ones are told why."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.rules.chance import chance
from paceline.rules.graphs import NAMES, Graph, complete, erdos_renyi, exponential, from_edges, laplacian, named, torus

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", range(1, 25))
def test_every_graph_is_connected_and_has_its_workers(name: str, workers: int) -> None:
    if name == "torus" and workers in PRIMES:
        with pytest.raises(PacelineError, match=rf"^{workers} workers do not make a torus.*prime.*ring"):
            named(name, workers)
        return
    graph = named(name, workers)
    assert graph.workers == workers and len(graph.components) == 1
    assert all(0 <= one < other < workers for one, other in graph.edges)
    assert graph == named(name, workers), "the same again"


def test_what_the_names_mean() -> None:
    assert named("ring", 8).degrees == (2,) * 8
    assert named("torus", 16).degrees == (4,) * 16
    assert named("complete", 8).degrees == (7,) * 8
    assert named("star", 8).degrees == (7, *(1,) * 7)
    assert exponential(8).neighbours(0) == (1, 2, 4, 6, 7), "4 on is 4 back"
    assert exponential(64).degree == 2 * log2(64) - 1


def test_small_graphs_are_sensible() -> None:
    for name in NAMES:
        assert named(name, 1).edges == () and named(name, 1).degree == 0
        if name != "torus":
            assert named(name, 2).edges == ((0, 1),)
    assert named("ring", 3) == named("exponential", 3) == complete(3)
    assert torus(4) == Graph(4, ((0, 1), (2, 3), (0, 2), (1, 3)))


@pytest.mark.parametrize(("workers", "columns"), [(6, 3), (12, 4), (16, 4), (32, 8), (36, 6)])
def test_a_torus_is_as_square_as_can_be(workers: int, columns: int) -> None:
    assert (0, columns) in torus(workers).edges and columns - 1 in torus(workers).neighbours(0)


def test_random_graphs_follow_seed_and_probability() -> None:
    assert erdos_renyi(20, 0.3, 1) == erdos_renyi(20, 0.3, 1) != erdos_renyi(20, 0.3, 2)
    assert erdos_renyi(10, 1.0) == complete(10)
    edges = sum(len(erdos_renyi(20, 0.5, seed).edges) for seed in range(40))
    assert abs(edges / (40 * 190) - 0.5) < 0.02
    assert len({erdos_renyi(16, None, seed) for seed in range(10)}) == 10


def test_chance_is_the_same_everywhere_and_even() -> None:
    assert chance("matching", 0, 17, 2) == 0.6908308511083125, "not of this platform, version or process"
    assert chance("a", np.int64(3)) == chance("a", 3), "a number is a number"
    drawn = np.array([chance("x", 0, place) for place in range(4000)])
    assert drawn.min() >= 0 and drawn.max() < 1
    assert np.abs(np.histogram(drawn, 10, (0, 1))[0] - 400).max() < 5 * 400**0.5


@given(st.integers(2, 12), st.data())
def test_edges_are_kept_in_order(workers: int, data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, workers - 1), st.integers(0, workers - 1)).filter(lambda pair: pair[0] != pair[1])
    edges = data.draw(st.lists(pairs, unique_by=lambda pair: (min(pair), max(pair))))
    graph = Graph(workers, tuple(edges))
    assert list(graph.edges) == sorted((min(pair), max(pair)) for pair in edges)
    assert hash(graph) == hash(Graph(workers, tuple((other, one) for one, other in reversed(edges))))
    for rank in range(workers):
        assert graph.degrees[rank] == len(graph.neighbours(rank))
        assert all(rank in graph.neighbours(near) for near in graph.neighbours(rank))
    matrix = laplacian(workers, graph.edges)
    assert (matrix.sum(axis=0) == 0).all() and (np.diag(matrix) == graph.degrees).all()
    zeros = int((np.linalg.eigvalsh(matrix) < 1e-9).sum())
    assert sorted(rank for part in graph.components for rank in part) == list(range(workers))
    assert len(graph.components) == zeros, "one part for each eigenvalue that is zero"


@given(st.sampled_from([name for name in NAMES if name != "torus"]), st.integers(1, 12), st.data())
def test_no_loss_parts_those_who_are_left(name: str, workers: int, data: st.DataObject) -> None:
    graph = named(name, workers)
    here = sorted(data.draw(st.sets(st.integers(0, workers - 1), min_size=1)))
    left = graph.among(here)
    assert left.workers == len(here) and len(left.components) == 1
    kept = {(here.index(one), here.index(other)) for one, other in graph.edges if one in here and other in here}
    assert kept <= set(left.edges), "whoever had an edge keeps it"
    if name == "complete":
        assert left.is_complete
    if name == "ring" and len(here) > 2:
        assert set(left.degrees) == {2} and len(left.edges) == len(here), "a ring again"


def test_a_graph_among_all_is_itself() -> None:
    assert torus(12).among(range(12)) == torus(12)


def test_neighbours_of_two_that_are_missing_are_joined() -> None:
    """0-1-2-3-4 without 1 and 2, which stood in a row; and a centre of four without whom they are a ring."""
    assert from_edges(5, [(0, 1), (1, 2), (2, 3), (3, 4)]).among((0, 3, 4)).edges == ((0, 1), (1, 2))
    assert from_edges(5, [(0, 2), (1, 2), (3, 2), (4, 2)]).among((0, 1, 3, 4)).edges == ((0, 1), (0, 3), (1, 2), (2, 3))


@pytest.mark.parametrize(
    ("workers", "edges", "said"),
    [
        (0, [], "0 workers"),
        (True, [], "True workers"),
        (3, [(0, 3)], r"leads to rank 3.*only ranks 0 to 2"),
        (3, [(-1, 0)], "leads to rank -1"),
        (3, [(1, 1)], "from a rank to itself"),
        (3, [(0, 1), (1, 0)], "0-1 is given twice"),
        (3, [(0, 1, 2)], "not an edge"),
        (3, [(0, 1.0)], "not an edge"),
        (3, ["01"], "not an edge"),
        (5, [(0, 3), (1, 4)], r"its parts are \{0, 3\} and \{1, 4\} and \{2\}"),
        (99, [], r"\{0\} and \{1\} and \{2\} and \{3\} and 95 more"),
    ],
)
def test_wrong_edges_are_told_why(workers: int, edges: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        from_edges(workers, edges)


def test_wrong_names_and_numbers_are_told_why() -> None:
    with pytest.raises(PacelineError, match=r"no graph 'rng'.*Did you mean 'ring'.*torus"):
        named("rng", 4)
    with pytest.raises(PacelineError, match="ring has no probability"):
        named("ring", 4, probability=0.5)
    with pytest.raises(PacelineError, match="0 workers"):
        named("complete", 0)
    with pytest.raises(PacelineError, match=r"probability 1\.5"):
        named("erdos-renyi", 4, probability=1.5)
    with pytest.raises(PacelineError, match=r"None of 100 random graphs of 30 workers.*0\.01 only.*0\.11"):
        named("erdos-renyi", 30, probability=0.01)
