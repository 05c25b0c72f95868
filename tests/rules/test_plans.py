"""Plans: who mixes with whom in a round, so that both know it, the mean stays, and models draw together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.rules.graphs import Graph, Matrix, complete, erdos_renyi, from_edges, ring, star
from paceline.rules.matcha import matcha
from paceline.rules.matchings import Matchings
from paceline.rules.mixing import mixing_weights, pull
from paceline.rules.plans import Drawn, EveryRound, Plan

OWN: Matchings = (((0, 1), (2, 3)), ((1, 2),))

graphs = st.builds(erdos_renyi, st.integers(1, 10), st.floats(0.3, 1.0), st.integers(0, 10_000))
rules = st.sampled_from(["metropolis", "best-constant"])
budgets = st.sampled_from([0.2, 0.5, 0.75, 1.0])
plans = st.one_of(
    st.builds(EveryRound, graphs, rules),
    st.builds(Drawn, graphs, budgets, st.integers(0, 1000)),
)
round_numbers = st.integers(0, 2**40)  # rounds go on behind every meeting at a number far away


def matrix_of(plan: Plan, round_number: int) -> Matrix:
    """W of a round, put together from what each rank knows by itself."""
    workers = plan.graph.workers
    rows = np.zeros((workers, workers))
    for rank in range(workers):
        for other, weight in plan.weights(rank, round_number).items():
            rows[rank, other] = weight
        rows[rank, rank] = 1 - rows[rank].sum()
    return rows


@settings(deadline=None)
@given(plans, round_numbers)
def test_both_ends_of_an_edge_know_the_same_of_a_round(plan: Plan, round_number: int) -> None:
    for rank in range(plan.graph.workers):
        for other, weight in plan.weights(rank, round_number).items():
            assert other in plan.graph.neighbours(rank), "only neighbours exchange models"
            assert plan.weights(other, round_number)[rank] == weight, "to the bit: it is taken here and added there"


@settings(deadline=None)
@given(plans, round_numbers, st.integers(0, 1000))
def test_mixing_keeps_the_mean_of_all_models(plan: Plan, round_number: int, seed: int) -> None:
    workers = plan.graph.workers
    models = torch.from_numpy(np.random.default_rng(seed).normal(size=(workers, 3)))
    mixed = models.clone()
    for rank in range(workers):
        weights = plan.weights(rank, round_number)
        difference = pull(models[rank], [(models[other], weight) for other, weight in weights.items()])
        assert (difference is None) == (not weights)
        if difference is not None:
            mixed[rank] += difference
    torch.testing.assert_close(mixed.mean(0), models.mean(0), rtol=1e-12, atol=1e-12)
    expected = torch.from_numpy(matrix_of(plan, round_number)) @ models
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(graphs, rules, round_numbers)
def test_every_round_is_the_matrix_of_its_rule(graph: Graph, rule: str, round_number: int) -> None:
    plan = EveryRound(graph, rule)
    assert matrix_of(plan, round_number) == pytest.approx(mixing_weights(graph, rule), abs=1e-12)
    assert {rank: set(plan.weights(rank, round_number)) for rank in range(graph.workers)} == {
        rank: set(graph.neighbours(rank)) for rank in range(graph.workers)
    }, "all neighbours, always"


@settings(deadline=None)
@given(graphs, budgets, st.integers(0, 1000), round_numbers)
def test_a_drawn_round_is_the_matrix_of_its_matchings(
    graph: Graph, budget: float, seed: int, round_number: int
) -> None:
    known = matcha(graph, budget)
    active = known.active(seed, round_number)
    assert matrix_of(Drawn(graph, budget, seed), round_number) == pytest.approx(known.weights(active), abs=1e-12)


def test_matchings_of_ones_own_are_drawn_as_they_are_given() -> None:
    graph = from_edges(4, [edge for matching in OWN for edge in matching])
    plan, known = Drawn(graph, 0.75, 5, OWN), matcha(graph, 0.75, OWN)
    seen = set()
    for number in range(50):
        active = known.active(5, number)
        seen.add(active)
        together = {edge for place in active for edge in OWN[place]}
        assert {(i, j) for i in range(4) for j in plan.weights(i, number) if i < j} == together
    assert seen == {(), (0,), (1,), (0, 1)}, "each by itself"


def test_the_mean_weights_are_those_of_many_rounds() -> None:
    graph, rounds = star(5), 4000
    every, drawn = EveryRound(graph, "metropolis"), Drawn(graph, 0.5, seed=2)
    assert every.mean_weights() == tuple(every.weights(0, 7)[other] for _, other in graph.edges)
    sums = np.zeros(len(graph.edges))
    for number in range(rounds):
        sums += [drawn.weights(one, number).get(other, 0.0) for one, other in graph.edges]
    assert drawn.mean_weights() == pytest.approx(sums / rounds, abs=0.03)


@settings(deadline=None, max_examples=20)
@given(graphs, budgets)
def test_a_plan_draws_models_together_whatever_the_budget(graph: Graph, budget: float) -> None:
    """Not in every round, but over rounds: the product of the matrices comes near to the mean."""
    product = np.eye(graph.workers)
    plan = Drawn(graph, budget, seed=1)
    rho = matcha(graph, budget).rho
    rounds = 20 + int(30 / max(1 - rho, 1e-3))
    for number in range(min(rounds, 3000)):
        product = matrix_of(plan, number) @ product
    assert product == pytest.approx(np.full_like(product, 1 / graph.workers), abs=0.05)


def test_one_worker_mixes_with_nobody() -> None:
    for plan in (EveryRound(ring(1), "metropolis"), Drawn(ring(1), 0.5, 0), EveryRound(complete(1), "uniform")):
        assert plan.weights(0, 3) == {} and plan.mean_weights() == ()


@pytest.mark.parametrize(
    ("graph", "rule", "said"),
    [
        (ring(5), "uniform", "needs a complete graph"),
        (ring(5), "metropolos", "Did you mean 'metropolis'"),
        (Graph(4, ((0, 1), (2, 3))), "metropolis", r"parts are \{0, 1\} and \{2, 3\}"),
    ],
)
def test_a_plan_that_cannot_mix_is_refused_when_it_is_made(graph: Graph, rule: str, said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        EveryRound(graph, rule)


def test_matchings_that_are_none_are_refused_when_the_plan_is_made() -> None:
    graph = from_edges(4, [(0, 1), (1, 2), (2, 3)])
    with pytest.raises(PacelineError, match="No matching holds"):
        Drawn(graph, 0.5, 0, (((0, 1), (2, 3)),))
    with pytest.raises(PacelineError, match="budget of 0"):
        Drawn(graph, 0.0, 0)
