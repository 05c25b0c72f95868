"""AD-PSGD: averaging moves models and never their sum, nobody waits, and pairs that ask each other agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from paceline.backends.simulated import simulate
from paceline.backends.simulated_node import SimulatedNode
from paceline.rules.graph_text import graph_of
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import AdPsgd, create
from paceline.summary import account

Play = Callable[..., Any]
RATE = 0.05
SWAPPED = "two ranks that ask each other at the same time both answer: they change places instead of averaging"


def mixed(workers: int, seed: int = 4) -> Cluster:
    speeds = [(1, 0.7, 0.25, 0.5)[rank % 4] for rank in range(workers)]
    jitter, network = LogNormal(0.3), Network(latency=0.1)
    return Cluster.from_speeds(speeds, micro_batch_seconds=1.0, jitter=jitter, network=network, seed=seed)


def starts(workers: int, size: int = 4) -> list[list[float]]:
    return [list(row) for row in np.random.default_rng(1).normal(size=(workers, size))]


def no_gradient(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
    return torch.zeros_like(w)


def spread(models: Sequence[Tensor]) -> float:
    return float(torch.stack(list(models)).std(0, unbiased=False).norm())


# ---- the sum of all models


@pytest.mark.parametrize("text", ["ad-psgd", "ad-psgd:graph=ring", "ad-psgd:graph=star:seed=3"])
def test_without_steps_the_sum_stays_and_the_spread_shrinks(play: Play, text: str) -> None:
    given_starts = starts(6)
    played = play(create(text), mixed(6), gradient=no_gradient, start=given_starts, samples=400, epochs=2)
    for rank in range(6):
        torch.testing.assert_close(played.committed[rank][-1], played.start, rtol=1e-12, atol=1e-13)
    before, after = torch.tensor(given_starts), [each[-2] for each in played.committed]
    assert spread(after) < 0.2 * spread(list(before))


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("text", ["ad-psgd", "ad-psgd:graph=ring:seed=5"])
def test_only_gradients_move_the_sum_however_late_answers_come(play: Play, text: str, workers: int) -> None:
    """Σ x_i at the end = Σ x_i at the start − γ Σ g, each gradient where its rank computed it."""
    optimizer = partial(torch.optim.SGD, lr=RATE)
    played = play(create(text), mixed(workers), optimizer=optimizer, start=starts(workers), samples=195)
    steps = torch.zeros(4, dtype=torch.float64)
    for rank in range(workers):
        for part in played.own_steps(rank):
            total, count = played.sum_of(part)
            steps += RATE * total / count
    for rank in range(workers):
        assert torch.equal(played.committed[rank][-1], played.committed[0][-1])
    torch.testing.assert_close(played.path[-1], played.start - steps / workers, rtol=1e-10, atol=1e-12)


def test_a_gradient_is_of_the_model_as_it_was_before_averaging(play: Play) -> None:
    """A rank's step follows what came meanwhile; the gradient was computed before: x̂ and x of the paper."""
    played = play(AdPsgd(), mixed(3), optimizer=partial(torch.optim.SGD, lr=RATE), samples=195)
    averaged = 0
    for rank in range(3):
        steps = [part[0] for part in played.own_steps(rank)]
        models = played.committed[rank]
        for (_, point), model in zip(steps[1:], models, strict=False):
            assert torch.equal(point, model), "computed at the model that its last step has left"
        for (_, before), (indices, point), after in zip(steps, steps[1:], models[1:], strict=False):
            assert not torch.equal(before, point)
            averaged += not torch.allclose(after, point - RATE * played.gradient(point, indices))
    assert averaged > 10, "between the two the rank has averaged"


def test_each_step_counts_its_own_micro_batch_and_none_is_lost(play: Play) -> None:
    played = play(AdPsgd(), mixed(5), samples=195, epochs=3)
    books = account(played.events)
    assert books.errors == () and books.in_flight == 0 and books.applied == 3 * 195 and books.discarded == 0
    assert [len(part) for rank in range(5) for part in played.own_steps(rank)] == [1] * len(played.of_kind("step"))


# ---- pairs


def test_two_equal_workers_meet_in_the_middle(play: Play) -> None:
    played = play(AdPsgd(), (1.0, 1.0), gradient=no_gradient, start=[[0.0], [8.0]], samples=160, epochs=1)
    for number in range(2, 9):
        assert [float(models[number]) for models in played.committed] == [4.0, 4.0]


@pytest.mark.parametrize("workers", [4, 12])
def test_equal_workers_draw_together_also_with_a_second_copy(play: Play, workers: int) -> None:
    """Without any jitter all ask at the same moments, as on a cluster of equal machines."""
    strategy = create("ad-psgd:graph=ring:momentum=acid")
    options = {"gradient": no_gradient, "start": starts(workers), "samples": 8 * workers, "epochs": 60}
    played = play(strategy, (1.0,) * workers, **options)
    after = [each[-2] for each in played.committed]
    assert spread(after) < 0.05 * spread(list(torch.tensor(starts(workers))))


@pytest.mark.parametrize("workers", [12, 16])
def test_acid_draws_a_large_ring_together_sooner(play: Play, workers: int) -> None:
    cluster = Cluster.from_speeds([1.0] * workers, micro_batch_seconds=1.0, jitter=LogNormal(0.2), seed=1)
    options = {"gradient": no_gradient, "start": starts(workers), "samples": 8 * workers, "epochs": 60}
    spreads = {}
    for momentum in ("local", "acid"):
        played = play(create(f"ad-psgd:graph=ring:momentum={momentum}"), cluster, **options)
        spreads[momentum] = spread([each[-2] for each in played.committed])
    assert spreads["acid"] < 0.1 * spreads["local"] < 0.1


def test_acid_ends_at_the_mean_of_the_starts(play: Play) -> None:
    """Of both copies the sum stays; when they agree, that is the sum of the models."""
    options = {"gradient": no_gradient, "start": starts(6), "samples": 400, "epochs": 6}
    played = play(create("ad-psgd:graph=ring:momentum=acid"), mixed(6), **options)
    torch.testing.assert_close(played.path[-1], played.start, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 4])
def test_quasi_global_momentum_is_of_where_a_rank_went(play: Play, workers: int) -> None:
    """Σ x_i moves by the steps alone, −γ (g + βm); m follows what a rank's model has moved by, averaging included."""
    beta = 0.8
    optimizer = partial(torch.optim.SGD, lr=RATE, momentum=beta)
    played = play(create("ad-psgd:momentum=quasi-global"), mixed(workers), optimizer=optimizer, samples=195)
    steps = torch.zeros(4, dtype=torch.float64)
    for rank in range(workers):
        momentum = torch.zeros(4, dtype=torch.float64)
        for [(indices, point)], after in zip(played.own_steps(rank), played.committed[rank], strict=False):
            steps += RATE * (played.gradient(point, indices) + beta * momentum)
            momentum = beta * momentum + (1 - beta) * (point - after) / RATE
    torch.testing.assert_close(played.path[-1], played.start - steps / workers, rtol=1e-10, atol=1e-12)


# ---- who talks to whom


@settings(deadline=None, max_examples=25)
@given(
    graph=st.sampled_from(["ring", "star", "complete", "exponential", "erdos-renyi"]),
    workers=st.integers(2, 8),
    seed=st.integers(0, 1000),
    latency=st.sampled_from([0.0, 0.3, 2.5]),
)
def test_only_neighbours_are_asked_one_at_a_time_and_every_question_is_answered(
    graph: str, workers: int, seed: int, latency: float
) -> None:
    sent: list[tuple[int, int, str]] = []
    send = SimulatedNode.send

    def spy(node: SimulatedNode, to: int, kind: str, *tensors: Tensor) -> None:
        sent.append((node.rank, to, kind))
        send(node, to, kind, *tensors)

    cluster = Cluster.from_speeds(
        [(1, 0.4)[rank % 2] for rank in range(workers)],
        micro_batch_seconds=1.0,
        network=Network(latency=latency),
        seed=seed,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedNode, "send", spy)
        run = simulate(create(f"ad-psgd:graph={graph}:seed={seed}"), cluster, micro_batch=4, seconds=20.0)
    edges = set(graph_of(graph, workers, seed=seed).edges)
    assert {(min(one, other), max(one, other)) for one, other, _ in sent} <= edges
    asked, answered = (Counter((o, t) for o, t, kind in sent if kind == which) for which in ("average", "half"))
    for one, other in edges:  # two who have asked each other may be content with one answer for both
        questions = asked[one, other], asked[other, one]
        assert max(questions) <= answered[one, other] + answered[other, one] <= sum(questions)
    for rank, totals in enumerate(run.workers):
        own = sum(times for (one, _), times in asked.items() if one == rank)
        assert own <= totals.micro_batches + 1, "at most one for each micro-batch, and one that found no data"
    assert Counter((one, other) for one, other, kind in sent if kind == "leaves") == Counter(
        {pair: 1 for edge in edges for pair in (edge, edge[::-1])}
    )


def test_partners_are_drawn_evenly_and_by_the_seed() -> None:
    def partners(seed: int) -> list[int]:
        asked: list[int] = []
        send = SimulatedNode.send

        def spy(node: SimulatedNode, to: int, kind: str, *tensors: Tensor) -> None:
            if node.rank == 0 and kind == "average":
                asked.append(to)
            send(node, to, kind, *tensors)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SimulatedNode, "send", spy)
            simulate(create(f"ad-psgd:seed={seed}"), Cluster.from_speeds([1.0] * 5), micro_batch=4, seconds=24.0)
        return asked

    drawn = partners(0)
    assert drawn == partners(0) != partners(1)
    shares = Counter(drawn)
    assert set(shares) == {1, 2, 3, 4} and max(shares.values()) < 1.4 * min(shares.values()), shares
    assert any(one == other for one, other in pairwise(drawn)), "each draw by itself"


# ---- speed


@pytest.mark.parametrize("text", ["ad-psgd", "ad-psgd:graph=ring", "ad-psgd:momentum=acid", "ad-psgd:graph=star"])
def test_nobody_waits_on_unequal_speeds(text: str) -> None:
    cluster = Cluster.from_speeds([1, 1, 0.5, 0.25], jitter=LogNormal(0.2), network=Network(0.001, 1e9), seed=2)
    run = simulate(create(text), cluster, seconds=60.0)
    assert run.share_of_ideal > 0.99
    fast, slow = run.workers[0].applied, run.workers[3].applied
    assert fast / slow == pytest.approx(4, rel=0.1), "each at its own speed"


def test_a_slow_network_makes_averaging_rarer_and_nobody_slower() -> None:
    def run(latency: float) -> Any:
        cluster = Cluster.from_speeds([1, 0.5, 0.25], network=Network(latency=latency))
        return simulate(AdPsgd(), cluster, seconds=60.0)

    quick, slow = run(0.0), run(0.5)
    assert slow.share_of_ideal > 0.98
    assert slow.bytes_sent < 0.2 * quick.bytes_sent
