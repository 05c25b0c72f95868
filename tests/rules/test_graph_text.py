"""Graphs in one word: what is written is what is read, and what is wrong is named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.rules.graph_text import graph_of, matchings_in, written
from paceline.rules.graphs import NAMES, Graph, complete, erdos_renyi, named
from paceline.rules.matchings import given_matchings, matchings
from paceline.simulator.topology import Topology

graphs = st.builds(erdos_renyi, st.integers(2, 14), st.floats(0.3, 1.0), st.integers(0, 10_000))


@settings(deadline=None)
@given(graphs)
def test_edges_survive_being_written(graph: Graph) -> None:
    word = written([graph.edges])
    assert graph_of(word, graph.workers) == graph
    assert matchings_in(word) is None, "edges in one group are no matchings"
    assert not set(word) & set(":= "), "an option of a strategy holds no sign that ends it"


@settings(deadline=None)
@given(graphs)
def test_matchings_survive_being_written(graph: Graph) -> None:
    split = matchings(graph)
    word = written(split)
    assert graph_of(word, graph.workers) == graph
    if len(split) > 1:
        assert matchings_in(word) == split
        assert given_matchings(graph, matchings_in(word) or ()) == given_matchings(graph, split)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [1, 4, 9])
def test_a_name_is_the_graph_of_that_name(name: str, workers: int) -> None:
    assert graph_of(name, workers) == named(name, workers) and matchings_in(name) is None


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 12), st.floats(0.5, 1.0), st.integers(0, 100))
def test_a_random_graph_has_a_probability_and_a_seed(workers: int, probability: float, seed: int) -> None:
    found = graph_of("erdos-renyi", workers, probability, seed)
    assert found == erdos_renyi(workers, probability, seed)
    assert graph_of("erdos-renyi", workers, seed=seed) == erdos_renyi(workers, None, seed), "0 is the usual one"
    assert graph_of("erdos-renyi", workers, 1.0, seed) == complete(workers)


def test_other_seeds_are_other_random_graphs() -> None:
    assert len({graph_of("erdos-renyi", 10, 0.4, seed) for seed in range(20)}) > 15


def test_a_seed_changes_only_what_is_random() -> None:
    for name in NAMES[:-1]:
        assert graph_of(name, 4, seed=5) == graph_of(name, 4, seed=6)


@pytest.mark.parametrize("topology", [Topology("star"), Topology(edges=((2, 1), (0, 1), (3, 2)))])
def test_the_graph_of_a_cluster_file_fits_into_a_word(topology: Topology) -> None:
    assert graph_of(topology.in_a_word(4), 4) == topology.graph_of(4)
    assert matchings_in(topology.in_a_word(4)) is None


def test_the_matchings_of_a_cluster_file_fit_into_a_word() -> None:
    topology = Topology(edges=((0, 1), (1, 2), (2, 3)), matchings=(((1, 2),), ((0, 1), (3, 2))))
    word = topology.in_a_word(4)
    assert graph_of(word, 4) == topology.graph_of(4)
    assert matchings_in(word) == topology.matchings_of(4)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rnig", "no graph 'rnig'.*Did you mean 'ring'"),
        ("", "no graph ''"),
        ("complete-ish", "no graph 'complete-ish'.*'complete'"),
        ("0", "'0' is neither the name of a graph nor a list of edges.*0-1[+]1-2"),
        ("0-1+", "neither the name of a graph nor a list of edges"),
        ("0-1/", "neither the name of a graph nor a list of edges"),
        ("0-1,1-2", "neither the name of a graph nor a list of edges"),
        ("0-1-2", "neither the name of a graph nor a list of edges"),
        ("0-one", "neither the name of a graph nor a list of edges"),
        ("ring/star", "neither the name of a graph nor a list of edges.*0-1[+]2-3/1-2"),
        ("0-1+1-2+2-4", "The edge 2-4 leads to rank 4.*only ranks 0 to 3"),
        ("0-1+1-2+2-3+1-0", "The edge 0-1 is given twice"),
        ("0-1+1-1+1-2+2-3", "The edge 1-1 leads from a rank to itself"),
        ("0-1+2-3", r"not connected: its parts are \{0, 1\} and \{2, 3\}"),
        ("0-1+1-2", r"not connected: its parts are \{0, 1, 2\} and \{3\}"),
        ("0-1/2-3", r"not connected: its parts are \{0, 1\} and \{2, 3\}"),
    ],
)
def test_a_wrong_word_is_told_why(word: str, said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        graph_of(word, 4)


def test_a_random_graph_that_cannot_hang_together_is_told_why() -> None:
    with pytest.raises(PacelineError, match="None of 100 random graphs of 30 workers was connected"):
        graph_of("erdos-renyi", 30, probability=0.001)
    with pytest.raises(PacelineError, match=r"cannot have the probability 1\.5"):
        graph_of("erdos-renyi", 4, probability=1.5)
