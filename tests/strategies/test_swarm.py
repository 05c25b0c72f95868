"""A swarm of seeds: each makes a cluster, a graph and faults that end. No run may stand still, and none may lose a
sample. Only time is simulated, so that a seed takes milliseconds."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from paceline.backends.simulated import Data, simulate
from paceline.record import MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Fault, Hang, LateJoin, Partition, SlowDown
from paceline.simulator.jitter import Constant, Drift, Exponential, Jitter, LogNormal, Pareto, SlowDowns
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.summary import account

ONE_SEED = os.environ.get("PACELINE_SWARM_SEED")
MOST_WORKERS, SECONDS = 7, 12.0  # about as long as a run lasts: faults fall into it
JITTERS: Sequence[Jitter] = (Constant(), LogNormal(0.3), Exponential(), Pareto(1.5), SlowDowns(6, 0.2), Drift(0.7, 0.5))


def fault_of(draw: random.Random, workers: int) -> Fault:
    """One that ends."""
    at, duration, rank = draw.uniform(0, SECONDS), draw.uniform(0.1, SECONDS), draw.randrange(workers)
    kinds = ["hang", "slow-down", "late-join", *(["partition"] if workers > 1 else [])]
    match draw.choice(kinds):
        case "hang":
            return Hang(rank=rank, at=at, duration=duration)
        case "slow-down":
            return SlowDown(rank=rank, at=at, duration=duration, factor=draw.choice([0.2, 3.0, 20.0]))
        case "late-join":
            return LateJoin(rank=rank, at=at)
    ranks = draw.sample(range(workers), draw.randint(1, workers - 1))
    cut = draw.randint(1, len(ranks))
    return Partition(groups=tuple(tuple(each) for each in (ranks[:cut], ranks[cut:]) if each), at=at, duration=duration)


def cluster_of(draw: random.Random, seed: int) -> Cluster:
    workers = draw.randint(1, MOST_WORKERS)
    network = Network(
        latency=draw.choice([0.0, 0.001, 0.3, 4.0]),
        bandwidth=draw.choice([1e12, 4e7, 4e6]),
        shared=draw.random() < 0.2,
    )
    return Cluster.from_speeds(
        [draw.choice([1.0, 1.0, 0.5, 0.1]) for _ in range(workers)],
        micro_batch_seconds=0.5,
        jitter=draw.choice(JITTERS),
        network=network,
        faults=[fault_of(draw, workers) for _ in range(draw.randint(0, 4))],
        seed=seed,
    )


def graph_of(draw: random.Random, workers: int) -> str:
    """By name, or a tree of its own: where every edge counts."""
    tree = "+".join(f"{draw.randrange(rank)}-{rank}" for rank in range(1, workers))
    return draw.choice(["ring", "star", "complete", "exponential", "erdos-renyi", tree or "ring"])


def play(strategy: str, seed: int) -> None:
    draw = random.Random(f"{strategy} {seed}")
    cluster = cluster_of(draw, seed)
    text = f"{strategy}:graph={graph_of(draw, cluster.workers)}:seed={seed}"
    if strategy == "non-blocking":
        options = draw.choice(["", ":unfinished=finish", ":carry", ":mini_batches=2", ":unfinished=finish:carry"])
        text += f":topology={draw.choice(['d-psgd', 'matcha'])}{options}"
    if strategy == "matcha":
        text += f":budget={draw.choice([0.1, 0.5, 1.0])}"
    if draw.random() < 0.2:
        text += ":momentum=acid"
    samples, epochs, recorder = draw.randint(1, 60), draw.randint(1, 2), MemoryRecorder()
    run = simulate(create(text), cluster, micro_batch=4, data=Data(samples, epochs), recorder=recorder)
    books = account(recorder.events)
    assert books.errors == () and books.in_flight == 0, books
    assert books.applied == run.samples_applied == samples * epochs, (text, run.samples_applied, samples * epochs)
    assert {event["rank"] for event in recorder.events if event["kind"] == "end"} == set(range(cluster.workers))


@pytest.mark.parametrize(
    ("strategy", "seeds"), [("ad-psgd", 1200), ("d-psgd", 400), ("matcha", 400), ("non-blocking", 400)]
)
def test_no_seed_stands_still_or_loses_a_sample(strategy: str, seeds: int) -> None:
    for seed in range(seeds) if ONE_SEED is None else [int(ONE_SEED)]:
        try:
            play(strategy, seed)
        except Exception as error:
            replay = f"PACELINE_SWARM_SEED={seed} python -m pytest tests/strategies/test_swarm.py -k [{strategy}-"
            raise AssertionError(f"{strategy}, seed {seed}: {error}\nReplay it: {replay}") from error
