"""What moves a model where ranks step alone: the pull of neighbours, quasi-global momentum, the drift of A²CiD²."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.rules.acid import acid, drift_
from paceline.rules.graphs import Graph, erdos_renyi, ring
from paceline.rules.mixing import mixing_weights, pull
from paceline.rules.quasi_global import remember_

numbers = st.floats(-100, 100)
vectors = st.lists(numbers, min_size=1, max_size=4)
graphs = st.builds(erdos_renyi, st.integers(2, 10), st.floats(0.3, 1.0), st.integers(0, 10_000))


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# ---- the pull of neighbours


@settings(deadline=None)
@given(graphs, st.sampled_from(["metropolis", "best-constant"]), st.integers(0, 1000))
def test_the_pull_is_a_row_of_the_matrix(graph: Graph, rule: str, seed: int) -> None:
    """x_i + Σ_j W_ij (x_j − x_i) = Σ_j W_ij x_j, because the row sums to one."""
    weights = mixing_weights(graph, rule)
    models = torch.from_numpy(np.random.default_rng(seed).normal(size=(graph.workers, 3)))
    for rank in range(graph.workers):
        others = [(models[other], float(weights[rank, other])) for other in graph.neighbours(rank)]
        difference = pull(models[rank], others)
        assert difference is not None
        close(models[rank] + difference, torch.tensor(weights[rank]) @ models)


def test_the_pull_leaves_the_models_as_they_are_and_is_nothing_without_others() -> None:
    one, other = double([1.0, 2.0]), double([3.0, 0.0])
    assert pull(one, []) is None
    pull(one, [(other, 0.5)])
    assert one.tolist() == [1.0, 2.0] and other.tolist() == [3.0, 0.0]


# ---- the drift of A²CiD²


@settings(deadline=None)
@given(vectors, st.floats(0.0, 3.0), st.floats(0.0, 5.0), st.integers(0, 1000))
def test_the_copies_drift_together_and_their_sum_stays(values: list[float], eta: float, time: float, seed: int) -> None:
    """d(x − x̃) = −2η (x − x̃) dt, and nothing is lost."""
    model, second = double(values), torch.from_numpy(np.random.default_rng(seed).normal(size=len(values)))
    total, between = model + second, model - second
    drift_(model, second, eta, time)
    close(model + second, total)
    close(model - second, between * exp(-2 * eta * time))


@settings(deadline=None)
@given(vectors, st.floats(0.0, 1.0), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_a_drift_in_two_parts_is_the_same_drift(values: list[float], eta: float, first: float, then: float) -> None:
    whole, in_parts = ((double(values), torch.zeros(len(values), dtype=torch.float64)) for _ in range(2))
    drift_(*whole, eta, first + then)
    drift_(*in_parts, eta, first)
    drift_(*in_parts, eta, then)
    close(whole[0], in_parts[0])
    close(whole[1], in_parts[1])


def test_copies_that_agree_or_have_no_time_stay_where_they_are() -> None:
    model, second = double([1.0, -2.0]), double([1.0, -2.0])
    drift_(model, second, 0.7, 1.0)
    assert torch.equal(model, second) and model.tolist() == [1.0, -2.0]
    second = double([5.0, 5.0])
    drift_(model, second, 0.7, 0.0)
    assert model.tolist() == [1.0, -2.0] and second.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("workers", [12, 24])
def test_with_a_second_copy_a_ring_draws_together_sooner(workers: int) -> None:
    """D-PSGD's mixing by hand, with and without: of the worst spread on a ring, a wave around it."""
    graph = ring(workers)
    weights = torch.from_numpy(mixing_weights(graph).copy())
    constants = acid(graph, tuple(2 * float(weights[edge]) for edge in graph.edges))
    plain = torch.cos(2 * torch.pi * torch.arange(workers, dtype=torch.float64) / workers)[:, None]
    fast, second, spread = plain.clone(), plain.clone(), float(plain.norm())
    for _ in range(8 * workers):
        plain = weights @ plain
        difference = weights @ fast - fast
        fast += difference
        second += 2 * constants.alpha_tilde * difference
        drift_(fast, second, constants.eta, 1.0)
    assert float((fast + second).sum()) == pytest.approx(0, abs=1e-9), "the mean stays"
    assert float(fast.norm()) < 0.2 * float(plain.norm()) < spread


# ---- quasi-global momentum


@settings(deadline=None)
@given(vectors, st.floats(0.01, 1.0), st.floats(0.0, 0.99), st.integers(0, 1000))
def test_the_momentum_is_of_where_the_model_went(values: list[float], rate: float, beta: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    momentum, before = (torch.from_numpy(generator.normal(size=len(values))) for _ in range(2))
    after = double(values)
    expected = beta * momentum + (1 - beta) * (before - after) / rate
    remember_(momentum, before, after, rate, beta)
    close(momentum, expected)
    assert after.tolist() == values, "only the model of before is used up"


@settings(deadline=None, max_examples=20)
@given(st.floats(0.05, 0.8), st.floats(0.01, 0.2))
def test_with_nobody_to_mix_with_it_goes_as_fast_as_gradient_descent(beta: float, rate: float) -> None:
    """A gradient that stays the same: x moves by η(g + βm), and m is a mean of such moves, so that m → g/(1 − β) as
    with an ordinary momentum."""
    model, momentum, gradient = double([0.0]), double([0.0]), double([1.0])
    for _ in range(400):
        before = model.clone()
        model = model - rate * (gradient + beta * momentum)
        remember_(momentum, before, model, rate, beta)
    assert float(momentum) == pytest.approx(1 / (1 - beta), rel=1e-3)
