"""Mixing: matrices that keep the mean and draw models together, and the figures that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.rules.acid import Acid, acid, even_rates
from paceline.rules.graphs import NAMES, Graph, complete, erdos_renyi, from_edges, laplacian, named, ring, star
from paceline.rules.mixing import RULES, best_alpha, check_mixing, contraction, mixing_weights

EIGHT = ((1, 5), (6, 7), (0, 4), (2, 3), (1, 7), (3, 6), (1, 0), (3, 7), (5, 6), (1, 2), (7, 0), (3, 1))

connected = st.builds(erdos_renyi, st.integers(1, 12), st.floats(0.3, 1.0), st.integers(0, 10_000))


@pytest.mark.parametrize(
    ("graph", "alpha", "rho"),
    [
        (ring(8), 0.436130, 0.554311),
        (ring(4), 1 / 3, 1 / 9),
        (from_edges(8, EIGHT), 0.285714, 0.653777),
        (ring(2), 0.5, 0.0),
        (ring(1), 0.0, 0.0),
        (complete(9), 1 / 9, 0.0),
    ],
)
def test_known_figures_of_the_best_constant(graph: Graph, alpha: float, rho: float) -> None:
    assert best_alpha(graph) == pytest.approx(alpha, abs=1e-6)
    assert contraction(mixing_weights(graph, "best-constant")) == pytest.approx(rho, abs=1e-6)


@given(connected, st.sampled_from(["metropolis", "best-constant"]))
def test_every_rule_keeps_the_mean_and_draws_together(graph: Graph, rule: str) -> None:
    weights = mixing_weights(graph, rule)
    assert (weights == weights.T).all() and weights.sum(axis=1) == pytest.approx(1, abs=1e-12)
    for one in range(graph.workers):
        assert {other for other in range(graph.workers) if weights[one, other] and other != one} == set(
            graph.neighbours(one)
        ), "only neighbours have a weight"
    assert check_mixing(weights) == contraction(weights) < 1


@given(connected, st.floats(0.01, 0.99))
def test_no_other_constant_is_better(graph: Graph, part: float) -> None:
    other = np.eye(graph.workers) - 2 * part * best_alpha(graph) * laplacian(graph.workers, graph.edges)
    assert contraction(mixing_weights(graph, "best-constant")) <= contraction(other) + 1e-12


@given(connected, st.integers(0, 1000))
def test_rho_is_what_a_round_leaves_at_worst(graph: Graph, seed: int) -> None:
    weights = mixing_weights(graph)
    models = np.random.default_rng(seed).normal(size=graph.workers)
    mixed = weights @ models
    assert mixed.mean() == pytest.approx(models.mean(), abs=1e-12)
    assert mixed.var() <= contraction(weights) * models.var() + 1e-12


def test_a_complete_graph_is_averaged_at_once() -> None:
    for rule in RULES:
        assert mixing_weights(complete(6), rule) == pytest.approx(np.full((6, 6), 1 / 6))


def test_the_weights_are_shared_and_so_cannot_be_changed() -> None:
    assert mixing_weights(ring(5)) is mixing_weights(ring(5))
    with pytest.raises(ValueError, match="read-only"):
        mixing_weights(ring(5))[0, 0] = 1


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1.0, 0.0]], "not square"),
        ([[float("nan")]], "not finite"),
        ([[0.5, 0.5], [0.4, 0.6]], r"rank 0 gives rank 1 the weight 0\.5 and gets 0\.4"),
        ([[0.5, 0.4], [0.4, 0.6]], r"Row 0 .* sums to 0\.9, not to 1"),
        ([[1.0, 0.0], [0.0, 1.0]], r"ρ = 1, .*below 1.*not connected"),
        ([[0.0, 1.0], [1.0, 0.0]], "ρ = 1"),
        ([[-1.0, 2.0], [2.0, -1.0]], "ρ = 9"),
    ],
)
def test_what_does_not_mix_is_told_why(rows: list[list[float]], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        check_mixing(np.array(rows))


def test_wrong_rules_are_told_why() -> None:
    with pytest.raises(PacelineError, match="Did you mean 'metropolis'"):
        mixing_weights(ring(4), "metropolos")
    with pytest.raises(PacelineError, match="needs a complete graph"):
        mixing_weights(ring(4), "uniform")
    with pytest.raises(PacelineError, match="not connected"):
        mixing_weights(Graph(3, ((0, 1),)))


def test_the_constants_of_acid_by_hand() -> None:
    # A ring of n with rate ½ on each edge: λ₂ = 1 − cos(2π/n); an edge of resistance 2 beside n − 1 of them in a row.
    for workers in (4, 8, 16):
        found = acid(ring(workers))
        assert found.chi_1 == pytest.approx(1 / (1 - np.cos(2 * np.pi / workers)))
        assert found.chi_2 == pytest.approx(1 - 1 / workers)
        assert found.eta == pytest.approx(1 / (2 * np.sqrt(found.chi_1 * found.chi_2)))
        assert found.alpha_tilde == pytest.approx(np.sqrt(found.chi_1 / found.chi_2) / 2)
    # Where every edge is a bridge, its resistance is 1/rate: a star of n has rates ½(1 + 1/(n − 1)) and λ₂ = rate.
    rate = (1 + 1 / 7) / 2
    assert (acid(star(8)).chi_1, acid(star(8)).chi_2) == pytest.approx((1 / rate, 1 / (2 * rate)))
    # In a complete graph of n with rates 1/(n − 1) all resistances are alike, and so are both constants.
    for workers in (2, 8, 32, 64):
        found = acid(complete(workers))
        assert (found.chi_1, found.chi_2) == pytest.approx((1 - 1 / workers, 1 - 1 / workers))
    assert (acid(ring(1)).eta, acid(ring(1)).alpha_tilde) == (0.0, 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_the_resistance_is_never_above_the_slowness(name: str) -> None:
    for workers in (4, 6, 8, 9, 12, 16, 32, 64):
        found = acid(named(name, workers))
        assert 0 < found.chi_2 <= found.chi_1 * (1 + 1e-12) and found.alpha_tilde >= 0.5 - 1e-12


@given(connected, st.floats(0.1, 10.0))
def test_quicker_averaging_only_changes_the_unit_of_time(graph: Graph, factor: float) -> None:
    slow, quick = acid(graph), acid(graph, even_rates(graph, factor))
    assert quick.eta == pytest.approx(factor * slow.eta) and quick.alpha_tilde == pytest.approx(slow.alpha_tilde)


def test_wrong_rates_are_told_why() -> None:
    with pytest.raises(PacelineError, match="2 rates for 4 edges"):
        acid(ring(4), (1.0, 1.0))
    with pytest.raises(PacelineError, match="rate -1"):
        acid(ring(4), (1.0, 1.0, 1.0, -1.0))
    with pytest.raises(PacelineError, match=r"not connected.*\{3\}"):
        acid(ring(4), (1.0, 0.0, 1.0, 0.0))
    assert acid(ring(4), (1.0, 0.0, 1.0, 1.0)) == Acid(pytest.approx(1 / (2 - np.sqrt(2))), pytest.approx(0.5))
