"""MATCHA: the known figures, the best probabilities, and draws on which all ranks agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.rules.connectivity import best_weights, second_eigenvalue
from paceline.rules.graphs import Graph, Matrix, complete, erdos_renyi, from_edges, laplacian, named, ring
from paceline.rules.matcha import Matcha, active, best_step, matcha
from paceline.rules.matchings import Matchings, matchings
from paceline.rules.mixing import best_alpha, check_mixing, contraction, mixing_weights

OWN: Matchings = (
    ((1, 5), (6, 7), (0, 4), (2, 3)),
    ((1, 7), (3, 6)),
    ((1, 0), (3, 7), (5, 6)),
    ((1, 2), (7, 0)),
    ((3, 1),),
)
EIGHT = from_edges(8, [edge for edges in OWN for edge in edges])

connected = st.builds(erdos_renyi, st.integers(2, 10), st.floats(0.3, 1.0), st.integers(0, 10_000))
budgets = st.one_of(st.floats(0.01, 1.0), st.sampled_from([0.5, 0.999999, 1.0]))


def laplacians(graph: Graph, split: Matchings) -> Matrix:
    return np.array([laplacian(graph.workers, edges) for edges in split])


@pytest.mark.parametrize(
    ("graph", "own", "probabilities", "alpha", "rho"),
    [
        (ring(8), None, (0.5, 0.5), 0.607369, 0.783905),
        (ring(4), None, (0.5, 0.5), 0.5, 0.5),
        (EIGHT, OWN, (0.983715, 0.0, 0.758142, 0.758142, 0.0), 0.396430, 0.643975),
        (ring(2), None, (0.5,), 0.5, 0.5),
        (ring(1), None, (), 0.0, 0.0),
        (complete(6), None, (0.5,) * 5, None, None),
    ],
)
def test_known_figures(
    graph: Graph, own: Matchings | None, probabilities: tuple[float, ...], alpha: float | None, rho: float | None
) -> None:
    plan = matcha(graph, 0.5, own)
    assert plan.probabilities == probabilities
    if alpha is not None:
        assert (plan.alpha, plan.rho) == pytest.approx((alpha, rho), abs=2e-6)


@settings(deadline=None, max_examples=60)
@given(connected, budgets, st.integers(0, 1000))
def test_the_probabilities_keep_to_the_budget_and_none_connect_better(graph: Graph, budget: float, seed: int) -> None:
    split = matchings(graph)
    plan = matcha(graph, budget)
    found, parts = np.array(plan.probabilities), laplacians(graph, split)
    assert (found >= 0).all() and (found <= 1).all() and found.sum() <= len(split) * (budget + 1e-6)
    assert 0 <= plan.rho < 1 and plan.alpha > 0
    others = np.random.default_rng(seed).dirichlet(np.ones(len(split)), size=4) * budget * len(split)
    reached = second_eigenvalue(np.tensordot(found, parts, 1))
    for other in [np.full(len(split), budget), *np.minimum(others, 1)]:
        assert second_eigenvalue(np.tensordot(other, parts, 1)) <= reached + 1e-5


@settings(deadline=None, max_examples=40)
@given(connected, budgets, st.floats(0.5, 1.5))
def test_no_other_alpha_is_better(graph: Graph, budget: float, factor: float) -> None:
    plan = matcha(graph, budget)
    assert plan.rho <= left_at_worst(plan, factor * plan.alpha) + 1e-9
    assert plan.rho == pytest.approx(left_at_worst(plan, plan.alpha), abs=1e-9)


def left_at_worst(plan: Matcha, alpha: float) -> float:
    """ρ from every set of matchings that can be active, weighed by its chance: the definition, and no formula."""
    parts = np.array([laplacian(plan.workers, edges) for edges in plan.matchings])
    total = np.zeros((plan.workers, plan.workers))
    for drawn in np.ndindex(*(2,) * len(parts)):
        z = np.array(drawn)
        p = np.array(plan.probabilities)
        weights = np.eye(plan.workers) - alpha * np.tensordot(z, parts, 1)
        total += np.prod(np.where(z, p, 1 - p)) * weights @ weights
    return float(np.linalg.eigvalsh(total - 1 / plan.workers)[-1])


@settings(deadline=None, max_examples=30)
@given(connected)
def test_with_the_whole_budget_it_is_the_best_constant(graph: Graph) -> None:
    plan = matcha(graph, 1.0)
    assert set(plan.probabilities) == {1.0}
    assert plan.alpha == pytest.approx(best_alpha(graph), abs=1e-8)
    assert plan.rho == pytest.approx(contraction(mixing_weights(graph, "best-constant")), abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(connected, st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_round_mixes_by_what_its_ranks_exchange(graph: Graph, seed: int, number: int) -> None:
    plan = matcha(graph, 0.5)
    weights = plan.weights(plan.active(seed, number))
    assert (weights == weights.T).all() and weights.sum(axis=1) == pytest.approx(1)
    for rank in range(graph.workers):
        row = np.eye(graph.workers)[rank]
        for partner in plan.partners(rank, seed, number):
            assert rank in plan.partners(partner, seed, number) and partner in graph.neighbours(rank)
            row = row + plan.alpha * (np.eye(graph.workers)[partner] - np.eye(graph.workers)[rank])
        assert row == pytest.approx(weights[rank])


def test_over_many_rounds_the_weights_are_what_is_expected() -> None:
    plan, rounds = matcha(EIGHT, 0.5, OWN), 4000
    mean, square = np.zeros((8, 8)), np.zeros((8, 8))
    for number in range(rounds):
        weights = plan.weights(plan.active(7, number))
        mean, square = mean + weights / rounds, square + weights @ weights / rounds
    expected = np.tensordot(plan.probabilities, laplacians(EIGHT, plan.matchings), 1)
    assert np.abs(mean - (np.eye(8) - plan.alpha * expected)).max() < 0.02
    assert np.linalg.eigvalsh(square - 1 / 8)[-1] == pytest.approx(plan.rho, abs=0.02)
    assert check_mixing(mean) < 1


def test_the_draws_are_independent_and_their_own() -> None:
    chances = (0.25, 0.5, 0.75)
    drawn = np.array([[place in active(chances, 3, number) for place in range(3)] for number in range(4000)], float)
    assert np.abs(drawn.mean(axis=0) - chances).max() < 0.03
    assert np.abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.06
    assert abs(np.corrcoef(drawn[1:, 1], drawn[:-1, 1])[0, 1]) < 0.06, "rounds are independent too"
    assert [active(chances, 3, number) for number in range(9)] != [active(chances, 4, number) for number in range(9)]
    # Written down: a run that is resumed elsewhere, or by a later version, must draw the same.
    assert [active((0.5, 0.5), 0, number) for number in range(6)] == [(0,), (1,), (0, 1), (), (), (0,)]


@pytest.mark.parametrize("name", ["ring", "torus", "exponential", "complete", "erdos-renyi"])
def test_who_is_called_what_does_not_matter(name: str) -> None:
    """Ranks in another order, and matchings too: the same probabilities, to more digits than are kept."""
    graph = named(name, 12)
    generator = np.random.default_rng(5)
    ranks, order = generator.permutation(12), generator.permutation(len(matchings(graph)))
    split = matchings(graph)
    moved = tuple(tuple((int(ranks[one]), int(ranks[other])) for one, other in split[place]) for place in order)
    first = best_weights(laplacians(graph, split), 0.4 * len(split))
    second = best_weights(laplacians(graph, moved), 0.4 * len(split))
    assert second == pytest.approx(first[order], abs=1e-8)


def test_best_weights_where_the_eigenvalue_is_manifold() -> None:
    """λ₂ of a ring is double, of a complete graph (n−1)-fold: there its gradient says nothing."""
    for graph in (ring(16), complete(16)):
        parts = laplacians(graph, matchings(graph))
        assert best_weights(parts, len(parts) / 4) == pytest.approx(np.full(len(parts), 0.25), abs=1e-7)


def test_one_matching_decides_when_it_is_the_only_way() -> None:
    """Two pairs and a bridge: the bridge is used whenever the budget allows."""
    graph = from_edges(4, [(0, 1), (2, 3), (1, 2)])
    plan = matcha(graph, 0.75, (((0, 1), (2, 3)), ((1, 2),)))
    # λ₂ of a path with weights p, q, p is p + q − √(p² + q²), greatest for p = q when p + q is given.
    assert plan.probabilities == pytest.approx((0.75, 0.75), abs=1e-5)
    assert best_step(laplacians(graph, plan.matchings), plan.probabilities) == (plan.alpha, plan.rho)


def test_plans_are_solved_once() -> None:
    assert matcha(ring(6), 0.3) is matcha(Graph(6, ring(6).edges), 0.3)


@pytest.mark.parametrize("budget", [0.0, -1.0, 1.1, float("nan")])
def test_a_wrong_budget_is_told_why(budget: float) -> None:
    with pytest.raises(PacelineError, match="budget of"):
        matcha(ring(4), budget)


def test_what_cannot_mix_is_told_why() -> None:
    with pytest.raises(PacelineError, match=r"too small for 2 matchings"):
        matcha(ring(4), 1e-7)
    with pytest.raises(PacelineError, match=r"parts are \{0, 1\} and \{2, 3\}"):
        matcha(Graph(4, ((0, 1), (2, 3))), 0.5)
    with pytest.raises(PacelineError, match="No matching holds"):
        matcha(EIGHT, 0.5, OWN[:4])
