"""D-PSGD and MATCHA against their equations, written down by hand: every model of every rank after every round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from math import exp
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.rules.acid import acid
from paceline.rules.graphs import Edge, Matrix, complete, erdos_renyi, exponential, from_edges, ring, star
from paceline.rules.matcha import matcha
from paceline.rules.mixing import best_alpha
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import AllReduce, create

Play = Callable[..., Any]
AsByHand = Callable[..., None]
Step = Callable[[int, Tensor, Tensor, Tensor, int], Tensor]
RATE = 0.05
EQUAL = Cluster.from_speeds([1.0] * 5, micro_batch_seconds=1.0)
MIXED = Cluster.from_speeds(
    [1, 0.7, 0.25, 1, 0.5], micro_batch_seconds=1.0, jitter=LogNormal(0.3), network=Network(latency=0.1), seed=4
)
GRAPHS = {
    "ring": ring(5),
    "star": star(5),
    "complete": complete(5),
    "exponential": exponential(5),
    "0-1+1-2+2-3+3-4+1-3": from_edges(5, [(0, 1), (1, 2), (2, 3), (3, 4), (1, 3)]),
    "erdos-renyi:probability=0.6:seed=2": erdos_renyi(5, 0.6, 2),
}


def metropolis(workers: int, edges: Iterable[Edge]) -> Matrix:
    """W_ij = 1/(1 + max(d_i, d_j)), and on the diagonal what is left of one."""
    weights, edges = np.zeros((workers, workers)), list(edges)
    degrees = [sum(rank in edge for edge in edges) for rank in range(workers)]
    for one, other in edges:
        weights[one, other] = weights[other, one] = 1 / (1 + max(degrees[one], degrees[other]))
    return weights + np.diag(1 - weights.sum(axis=1))


def sgd(momentum: float = 0.0) -> Step:
    """x ← Σ W x − γ v, where v ← βv + g is a rank's own."""
    velocities: dict[int, Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))

    def step(rank: int, model: Tensor, pull: Tensor, total: Tensor, count: int) -> Tensor:
        velocities[rank] = momentum * velocities[rank] + total / count
        return model + pull - RATE * velocities[rank]

    return step


def optimizer(momentum: float = 0.0) -> Any:
    return partial(torch.optim.SGD, lr=RATE, momentum=momentum)


# ---- D-PSGD


@pytest.mark.parametrize("cluster", [EQUAL, MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_d_psgd_is_its_equation(play: Play, as_by_hand: AsByHand, graph: str, cluster: Cluster) -> None:
    played = play(create(f"d-psgd:graph={graph}"), cluster, optimizer=optimizer(), samples=195)
    weights = metropolis(5, GRAPHS[graph].edges)
    as_by_hand(played, lambda number: weights, sgd())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_batch_of_several_micro_batches_is_one_step(
    play: Play, as_by_hand: AsByHand, micro_batches: int, momentum: float
) -> None:
    strategy = create(f"d-psgd:micro_batches={micro_batches}")
    played = play(strategy, MIXED, optimizer=optimizer(momentum), samples=195, epochs=3)
    weights = metropolis(5, ring(5).edges)
    as_by_hand(played, lambda number: weights, sgd(momentum))


def test_other_rules_of_mixing(play: Play, as_by_hand: AsByHand) -> None:
    alpha = best_alpha(ring(5))
    weights = np.eye(5) * (1 - 2 * alpha) + alpha * (np.roll(np.eye(5), 1, 0) + np.roll(np.eye(5), -1, 0))
    played = play(create("d-psgd:mixing=best-constant"), MIXED, optimizer=optimizer())
    as_by_hand(played, lambda number: weights, sgd())
    played = play(create("d-psgd:graph=complete:mixing=uniform"), MIXED, optimizer=optimizer())
    as_by_hand(played, lambda number: np.full((5, 5), 0.2), sgd())


def test_one_worker_is_sgd(play: Play) -> None:
    for text in ("d-psgd", "matcha", "ad-psgd", "d-psgd:graph=complete:mixing=uniform"):
        played = play(create(text), (1.0,), optimizer=optimizer(0.9))
        alone = play(AllReduce(), (1.0,), optimizer=optimizer(0.9))
        steps = len(played.micro_batches[0])
        pairs = zip(played.path[: steps + 1], alone.path[: steps + 1], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


# ---- what it has in common with all-reduce


TARGETS = torch.randn(320, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def to_the_targets(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
    """Of ½‖w − target‖²: the curvature is one everywhere, so that a mean of gradients is the gradient at the mean."""
    return w - TARGETS[indices].mean(0)


@pytest.mark.parametrize("text", ["d-psgd:graph=complete:mixing=uniform", "d-psgd", "matcha:budget=0.3"])
def test_where_the_curvature_is_one_the_mean_of_the_models_is_all_reduces(play: Play, text: str) -> None:
    options = {"gradient": to_the_targets, "start": (1.0, -2.0, 0.5), "samples": 320, "optimizer": optimizer()}
    mixed, together = (play(strategy, (1,) * 4, **options) for strategy in (create(text), AllReduce()))
    rounds = 2 * 320 // 32
    apart = 0.0
    for number in range(rounds):
        models = torch.stack([mixed.committed[rank][number] for rank in range(4)])
        apart = max(apart, float(models.std(0).norm()))
        torch.testing.assert_close(models.mean(0), together.committed[0][number], rtol=1e-12, atol=1e-14)
    assert apart > 0.01, "the models themselves are not the same"
    torch.testing.assert_close(mixed.path[-1], together.path[-1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("text", ["d-psgd", "d-psgd:graph=star", "matcha", "ad-psgd"])
def test_after_one_round_from_the_same_start_the_mean_is_all_reduces_on_any_loss(play: Play, text: str) -> None:
    for momentum in (0.0, 0.9):
        options = {"samples": 32, "epochs": 1, "optimizer": optimizer(momentum)}
        mixed, together = (play(strategy, (1,) * 4, **options) for strategy in (create(text), AllReduce()))
        assert [len(each) for each in mixed.micro_batches] == [1] * 4
        for rank in range(4):
            torch.testing.assert_close(mixed.committed[rank][-1], together.committed[0][0], rtol=1e-12, atol=1e-14)


# ---- MATCHA


@pytest.mark.parametrize("cluster", [EQUAL, MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize(("graph", "budget", "seed"), [("ring", 0.5, 0), ("star", 0.4, 3), ("complete", 0.2, 1)])
def test_matcha_is_its_equation(
    play: Play, as_by_hand: AsByHand, graph: str, budget: float, seed: int, cluster: Cluster
) -> None:
    played = play(create(f"matcha:graph={graph}:budget={budget}:seed={seed}"), cluster, optimizer=optimizer())
    known = matcha(GRAPHS[graph], budget)
    assert len({known.active(seed, number) for number in range(10)}) > 1, "rounds differ"
    as_by_hand(played, lambda number: known.weights(known.active(seed, number)), sgd())


def test_matchings_of_ones_own(play: Play, as_by_hand: AsByHand) -> None:
    own = (((0, 1), (2, 3)), ((1, 2), (3, 4)))
    played = play(create("matcha:graph=0-1+2-3/1-2+3-4:budget=0.6:seed=7"), MIXED, optimizer=optimizer(0.5))
    known = matcha(from_edges(5, [*own[0], *own[1]]), 0.6, own)
    as_by_hand(played, lambda number: known.weights(known.active(7, number)), sgd(0.5))


def test_matcha_with_the_whole_budget_is_d_psgd_with_the_best_constant(play: Play) -> None:
    texts = ("matcha:graph=star:budget=1", "d-psgd:graph=star:mixing=best-constant")
    one, other = (play(create(text), MIXED, optimizer=optimizer()) for text in texts)
    for pair in zip(one.path, other.path, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-8)  # α is kept to nine digits


# ---- momenta


@pytest.mark.parametrize("text", ["d-psgd", "d-psgd:graph=star", "matcha"])
def test_quasi_global_momentum_is_its_formula(play: Play, as_by_hand: AsByHand, text: str) -> None:
    """x ← Σ W x − γ (g + βm), then m ← βm + (1 − β)(x before − x after)/γ."""
    beta, momenta = 0.8, defaultdict[int, Tensor](lambda: torch.zeros(4, dtype=torch.float64))

    def step(rank: int, model: Tensor, pull: Tensor, total: Tensor, count: int) -> Tensor:
        new = model + pull - RATE * (total / count + beta * momenta[rank])
        momenta[rank] = beta * momenta[rank] + (1 - beta) * (model - new) / RATE
        return new

    played = play(create(f"{text}:momentum=quasi-global"), MIXED, optimizer=optimizer(beta), samples=195)
    as_by_hand(played, matrix_of(text), step)


@pytest.mark.parametrize("text", ["d-psgd", "d-psgd:graph=star", "matcha"])
def test_acid_is_its_formula(play: Play, as_by_hand: AsByHand, text: str) -> None:
    """x += d, x̃ += 2α̃·d; both drift for a unit of time; both step. d is what mixing adds: ½ of what lies between, as
    often as twice the weights say."""
    graph, matrix = (star(5) if "star" in text else ring(5)), matrix_of(text)
    half = 0.5 if text == "matcha" else 1.0  # all of its matchings at once would overshoot
    if text == "matcha":
        known = matcha(graph, 0.5)
        chance = {edge: p for edges, p in zip(known.matchings, known.probabilities, strict=True) for edge in edges}
        constants = acid(graph, tuple(2 * half * known.alpha * chance[edge] for edge in graph.edges))
    else:
        constants = acid(graph, tuple(2 * float(matrix(0)[edge]) for edge in graph.edges))
    part = (1 - exp(-2 * constants.eta)) / 2
    second: dict[int, Tensor] = {}

    def step(rank: int, model: Tensor, pull: Tensor, total: Tensor, count: int) -> Tensor:
        x, other = model + pull, second.get(rank, model) + 2 * constants.alpha_tilde * pull
        x, other = x + part * (other - x), other + part * (x - other)
        second[rank] = other - RATE * total / count
        return x - RATE * total / count

    played = play(create(f"{text}:momentum=acid"), MIXED, optimizer=optimizer(), samples=195)
    as_by_hand(played, lambda number: np.eye(5) + half * (matrix(number) - np.eye(5)), step)


def matrix_of(text: str) -> Callable[[int], Matrix]:
    if text == "matcha":
        known = matcha(ring(5), 0.5)
        return lambda number: known.weights(known.active(0, number))
    weights = metropolis(5, (star(5) if "star" in text else ring(5)).edges)
    return lambda number: weights


@pytest.mark.parametrize("workers", [12, 16])
def test_acid_draws_a_large_ring_together_sooner(play: Play, workers: int) -> None:
    spreads = {}
    for momentum in ("local", "acid"):
        played = play(
            create(f"d-psgd:momentum={momentum}"),
            (1.0,) * workers,
            start=np.random.default_rng(1).normal(size=(workers, 2)).tolist(),
            gradient=lambda w, _: torch.zeros_like(w),
            samples=workers * 8,
            epochs=40,
        )
        spreads[momentum] = float(torch.stack([each[-2] for each in played.committed]).std(0).norm())
        torch.testing.assert_close(played.path[-1], played.start, rtol=1e-12, atol=1e-13)
    assert spreads["acid"] < 0.1 * spreads["local"] < 1.0


OVERSHOOTS = "W has eigenvalues below zero, and the second copy makes what overshoots grow"


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("d-psgd:graph=torus", 16),
        ("d-psgd:graph=star", 8),
        ("d-psgd:mixing=best-constant", 12),
        ("matcha", 24),
    ],
)
def test_acid_never_drives_models_apart(play: Play, text: str, workers: int) -> None:
    options = {"gradient": lambda w, _: torch.zeros_like(w), "samples": workers * 8, "epochs": 60}
    start = np.random.default_rng(1).normal(size=(workers, 1))
    played = play(create(f"{text}:momentum=acid"), (1.0,) * workers, start=start.tolist(), **options)
    assert float(torch.stack([each[-2] for each in played.committed]).std()) < 0.1 * start.std()
