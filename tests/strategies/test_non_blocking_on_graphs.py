"""Non-blocking SGD among neighbours: its equation, and what it gains (ALGORITHMS, section 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.backends.simulated import simulate
from paceline.rules.graphs import Matrix, complete, ring
from paceline.rules.matcha import matcha
from paceline.rules.mixing import mixing_weights
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import Exponential, Jitter, LogNormal, SlowRounds
from paceline.simulator.network import Network
from paceline.strategies import create

Play = Callable[..., Any]
AsByHand = Callable[..., None]
RATE, MICRO_BATCH = 0.05, 8
MIXED = Cluster.from_speeds(
    [1, 0.7, 0.25, 0.12], micro_batch_seconds=1.0, jitter=LogNormal(0.3), network=Network(latency=0.05), seed=4
)


def matrix_of(text: str) -> Callable[[int], Matrix]:
    graph = complete(4) if "complete" in text else ring(4)
    if "topology=matcha" in text:
        known = matcha(graph, 0.5)
        return lambda number: known.weights(known.active(0, number))
    return lambda number: mixing_weights(graph)


# ---- the equation


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    ("text", "mini_batches"),
    [
        ("non-blocking:topology=d-psgd", 8),
        ("non-blocking:topology=d-psgd:mini_batches=3:graph=complete", 3),
        ("non-blocking:topology=d-psgd:mini_batches=4:unfinished=finish", 4),
        ("non-blocking:topology=matcha:mini_batches=4:carry", 4),
    ],
)
def test_a_step_is_of_what_is_finished_over_the_whole_batch(
    play: Play, as_by_hand: AsByHand, text: str, mini_batches: int, momentum: float
) -> None:
    """x_i ← Σ_j W_ij x_j − γ·A_i/m; with nothing finished it only mixes, and leaves the optimizer alone."""
    velocities: dict[int, Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))
    finished: set[int] = set()

    def step(rank: int, model: Tensor, pull: Tensor, total: Tensor, count: int) -> Tensor:
        finished.add(count)
        if not count:
            return model + pull
        velocities[rank] = momentum * velocities[rank] + total / (mini_batches * MICRO_BATCH)
        return model + pull - RATE * velocities[rank]

    optimizer = partial(torch.optim.SGD, lr=RATE, momentum=momentum)
    played = play(create(text), MIXED, optimizer=optimizer, samples=400, epochs=5)
    as_by_hand(played, matrix_of(text), step, but_before_empty_steps=True)
    assert {0, mini_batches * MICRO_BATCH} <= finished, "some had finished nothing, and some all of it"
    assert len(finished) > 3, "and some a part"


def test_a_round_is_told_where_it_ended_also_when_the_next_is_over_at_once(play: Play, as_by_hand: AsByHand) -> None:
    """A rank that is late finds the next round signalled and the models of its neighbours there."""

    def step(rank: int, model: Tensor, pull: Tensor, total: Tensor, count: int) -> Tensor:
        return model + pull - RATE * total / (4 * MICRO_BATCH)

    text = "non-blocking:topology=d-psgd:mini_batches=4:unfinished=finish"
    played = play(create(text), MIXED, optimizer=partial(torch.optim.SGD, lr=RATE), samples=400, epochs=5)
    as_by_hand(played, matrix_of(text), step)


def test_quasi_global_momentum_follows_also_what_only_mixing_moves(play: Play, as_by_hand: AsByHand) -> None:
    beta, momenta = 0.8, defaultdict[int, Tensor](lambda: torch.zeros(4, dtype=torch.float64))

    def step(rank: int, model: Tensor, pull: Tensor, total: Tensor, count: int) -> Tensor:
        new = model + pull - (RATE * (total / (8 * MICRO_BATCH) + beta * momenta[rank]) if count else 0.0)
        momenta[rank] = beta * momenta[rank] + (1 - beta) * (model - new) / RATE
        return new

    text = "non-blocking:topology=d-psgd:momentum=quasi-global"
    optimizer = partial(torch.optim.SGD, lr=RATE, momentum=beta)
    played = play(create(text), MIXED, optimizer=optimizer, samples=400, epochs=5)
    as_by_hand(played, matrix_of(text), step)


def test_the_first_to_finish_its_batch_ends_the_round_for_all(play: Play) -> None:
    """Speeds 1, ½ and 0.3: three mini-batches of the first take 3 s, of the others one is done and none."""
    speeds, samples = (1.0, 0.5, 0.3), 3 * 8 * 20
    played = play(create("non-blocking:topology=d-psgd:mini_batches=3"), speeds, samples=400, epochs=samples // 240)
    for rank, (first, t) in enumerate([(24, 3.0), (8, 3.0), (0, 3.0)]):
        event = played.of_kind("step", rank)[0]
        assert (event["samples"], event["t"]) == (first, t)
    given_up = [(event["rank"], event["t"]) for event in played.of_kind("discard")]
    assert given_up[:2] == [(1, 3.0), (2, 3.0)], "what is under way is run again at the new model"


# ---- what it gains


def throughput(text: str, cluster: Cluster, seconds: float) -> float:
    run = simulate(create(text), cluster, micro_batch=4, seconds=seconds)
    return run.samples_applied / run.seconds


@pytest.mark.parametrize("topology", ["d-psgd", "matcha"])
@pytest.mark.parametrize(
    ("speeds", "gain"),
    [((0.5, *[1.0] * 7), 1.88), ((0.25, *[1.0] * 7), 3.62), ((*[0.5] * 4, *[1.0] * 4), 1.50)],
    ids=["one 2x", "one 4x", "half 2x"],
)
def test_the_gain_over_blocking_at_constant_speeds(speeds: tuple[float, ...], gain: float, topology: str) -> None:
    """Over the strategy on the same graph whose workers wait for their neighbours: in the long run for the slowest."""
    cluster = Cluster.from_speeds(speeds, micro_batch_seconds=1.0)
    blocking = throughput(f"{topology}:micro_batches=8", cluster, 5000.0)
    found = throughput(f"non-blocking:topology={topology}", cluster, 1600.0)
    assert found / blocking == pytest.approx(gain, rel=0.03)


@pytest.mark.parametrize(
    ("jitter", "abort", "finish"),
    [(SlowRounds(factor=6.0, probability=1 / 8), 3.85, 2.97), (Exponential(), 1.55, 1.18)],
    ids=["random 6x", "exponential"],
)
def test_the_gain_over_blocking_of_all_where_speeds_change(jitter: Jitter, abort: float, finish: float) -> None:
    """The oracle is over a blocking round of all ranks. Who waits for neighbours only gains by that already, and who
    finishes what is under way holds up only those."""
    cluster = Cluster.from_speeds([1.0] * 8, micro_batch_seconds=1.0, jitter=jitter, seed=3)
    blocking = throughput("all-reduce:micro_batches=8", cluster, 20_000.0)
    aborting = throughput("non-blocking:topology=d-psgd", cluster, 5000.0)
    assert aborting / blocking == pytest.approx(abort, rel=0.03)
    finishing = throughput("non-blocking:topology=d-psgd:unfinished=finish", cluster, 2000.0)
    assert 0.97 * finish < finishing / blocking < 1.03 * aborting / blocking
    assert throughput("d-psgd:micro_batches=8", cluster, 2000.0) > 1.1 * blocking


def test_who_mixes_with_whom_does_not_change_the_rounds() -> None:
    """The signal ends them; in a network that costs nothing the topologies compute the same."""
    cluster = Cluster.from_speeds([1, 0.7, 0.3, 0.9], micro_batch_seconds=1.0, jitter=LogNormal(0.2), seed=1)
    topologies = ("d-psgd", "matcha", "d-psgd:graph=star", "matcha:graph=complete:budget=0.1")
    found = {topology: throughput(f"non-blocking:topology={topology}", cluster, 400.0) for topology in topologies}
    assert len(set(found.values())) == 1, found


def test_a_slow_worker_costs_the_others_nothing() -> None:
    """In the limit: as many samples as all speeds together, but for what is given up (t_max · mean(1/t))."""
    speeds = np.array([1.0, 1.0, 0.5, 0.25])
    cluster = Cluster.from_speeds(speeds.tolist(), micro_batch_seconds=1.0)
    run = simulate(create("non-blocking:topology=d-psgd"), cluster, micro_batch=4, seconds=800.0)
    assert run.samples_applied / run.seconds == pytest.approx(4 * speeds.sum(), rel=0.01)
