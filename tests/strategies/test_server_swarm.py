"""A swarm of seeds for parameter servers: each makes a cluster, a strategy with options, and faults that end. No run
may stand still, lose a sample, let somebody run ahead of the bound, or leave ranks with different models."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.backends.simulated import Data, simulate
from paceline.record import Event, MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Fault, Hang, LateJoin, Partition, SlowDown
from paceline.simulator.jitter import Constant, Exponential, LogNormal, Pareto, SlowDowns
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.summary import account

Play = Callable[..., Any]
ONE_SEED = os.environ.get("PACELINE_SWARM_SEED")
SECONDS = 12.0  # about as long as a run lasts: faults fall into it
JITTERS = (Constant(), LogNormal(0.3), Exponential(), Pareto(1.5), SlowDowns(6, 0.2))
NAMES = ("bsp", "ssp", "dssp", "asp", "gssp")


def fault_of(draw: random.Random, ranks: int) -> Fault:
    """One that ends; of servers too."""
    at, duration, rank = draw.uniform(0, SECONDS), draw.uniform(0.1, SECONDS), draw.randrange(ranks)
    match draw.choice(["hang", "slow-down", "late-join", "partition"]):
        case "hang":
            return Hang(rank=rank, at=at, duration=duration)
        case "slow-down":
            return SlowDown(rank=rank, at=at, duration=duration, factor=draw.choice([0.2, 3.0, 20.0]))
        case "late-join":
            return LateJoin(rank=rank, at=at)
    some = draw.sample(range(ranks), draw.randint(1, ranks - 1))
    cut = draw.randint(1, len(some))
    return Partition(groups=tuple(tuple(each) for each in (some[:cut], some[cut:]) if each), at=at, duration=duration)


def cluster_of(draw: random.Random, seed: int, workers: int, servers: int) -> Cluster:
    network = Network(
        latency=draw.choice([0.0, 0.001, 0.3, 4.0]),
        bandwidth=draw.choice([1e12, 4e7, 4e6]),
        shared=draw.random() < 0.2,
    )
    alone = Cluster.from_speeds(
        [draw.choice([1.0, 1.0, 0.5, 0.1]) for _ in range(workers)],
        micro_batch_seconds=0.5,
        jitter=draw.choice(JITTERS),
        network=network,
        seed=seed,
    )
    faults = [fault_of(draw, workers + servers) for _ in range(draw.randint(0, 3))]
    return replace(alone, servers=servers, faults=tuple(faults))


def grouping_of(draw: random.Random, workers: int, groups: int) -> str:
    """Natural, equal, or any at all."""
    of = [draw.randrange(groups) for _ in range(workers)]
    given = "/".join("+".join(str(w) for w in range(workers) if of[w] == g) for g in range(groups) if g in of)
    return draw.choice(["natural", "equal", given])


def strategy_of(draw: random.Random, workers: int) -> tuple[str, int]:
    """A strategy's text, and how many servers it has."""
    name, parts = draw.choice(NAMES), draw.choice([1, 1, 2])
    text = f"{name}:overlap={draw.choice(['auto', 'always', 'never'])}"
    servers = parts
    if name in ("ssp", "gssp"):
        text += f":staleness={draw.choice([0, 1, 3])}"
    if name == "dssp":
        low = draw.choice([0, 2])
        text += f":low={low}:high={low + draw.choice([0, 3])}"
    if name == "gssp":
        groups, exchange = draw.randint(1, 4), draw.choice(["delta", "gradient", "global"])
        text += f":grouping={grouping_of(draw, workers, groups)}:exchange={exchange}:parts={parts}"
        text += f":warm_up={draw.choice([1, 2, 5])}" + draw.choice(["", ":regroup=false"])
        servers = parts * (groups + (exchange == "global"))
    return text + draw.choice(["", ":adapt_lr"]), servers


def check(text: str, cluster: Cluster, events: list[Event], samples: int) -> None:
    books = account(events)
    assert books.errors == () and books.in_flight == 0, books
    assert books.applied + books.discarded == samples, books
    assert {event["rank"] for event in events if event["kind"] == "end"} == set(range(cluster.ranks))
    if "gssp" not in text and not books.discarded:  # of a gradient that was discarded no step tells
        check_lead(cluster.workers, create(text).bound.high, events)  # type: ignore[attr-defined]  # all here have one


def check_lead(workers: int, bound: float, events: list[Event]) -> None:
    """Nobody has finished more than bound + 1 iterations more than one who is still to finish some."""
    steps = [event["of"] for event in events if event["kind"] == "step"]
    totals, done = Counter(steps), Counter[int]()
    for worker in steps:
        done[worker] += 1
        going_on = [done[other] for other in range(workers) if done[other] < totals[other]]
        assert not going_on or done[worker] - min(going_on) <= bound + 1, (worker, done)


def in_time_alone(seed: int) -> None:
    draw = random.Random(f"time {seed}")
    workers = draw.randint(1, 6)
    text, servers = strategy_of(draw, workers)
    cluster = cluster_of(draw, seed, workers, servers)
    data, recorder = Data(draw.randint(1, 60), draw.randint(1, 3)), MemoryRecorder()
    run = simulate(create(text), cluster, micro_batch=4, data=data, recorder=recorder)
    assert run.samples_applied == data.samples * (data.epochs or 0), text
    check(text, cluster, recorder.events, run.samples_applied)


def with_gradients(play: Play, seed: int) -> None:
    """The same with a model: compressed now and then, and with gradients that are no numbers."""
    draw = random.Random(f"gradients {seed}")
    workers = draw.randint(1, 5)
    text, servers = strategy_of(draw, workers)
    text += draw.choice(["", ":compress=top-k:ratio=0.3", ":compress=gdtopk", ":compress=dgc:ratio=0.5"])
    cluster = cluster_of(draw, seed, workers, servers)
    bad, optimizer = draw.choice([0, 0, 10]), partial(torch.optim.SGD, lr=0.01)
    if "dgc" not in text and draw.random() < 0.5:
        optimizer = draw.choice([partial(torch.optim.Adam, lr=0.01), partial(torch.optim.SGD, lr=0.01, momentum=0.5)])

    def gradient(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
        return torch.full_like(w, torch.nan) if int(indices.min()) < bad else w - float(indices[0]) / 30

    samples, epochs = draw.randint(30, 60), draw.randint(1, 3)
    options = {"samples": samples, "epochs": epochs, "micro_batch": 4, "pieces": 2, "optimizer": optimizer}
    played = play(create(text), cluster, gradient=gradient, **options)
    check(text, cluster, played.events, samples * epochs)
    assert played.ledger.complete and played.ledger.leased == 0, text
    assert played.ledger.discarded == account(played.events).discarded
    seen = Counter(int(index) for own in played.micro_batches for indices, _ in own for index in indices)
    assert set(seen.values()) == {epochs} and len(seen) == samples, text
    ends = [learner.parameters for learner in played.learners]
    assert all(torch.equal(end, ends[0]) for end in ends) and bool(ends[0].isfinite().all()), text


@pytest.mark.parametrize(("what", "seeds"), [("time", 500), ("gradients", 100)])
def test_no_seed_stands_still_or_loses_a_sample(play: Play, what: str, seeds: int) -> None:
    for seed in range(seeds) if ONE_SEED is None else [int(ONE_SEED)]:
        try:
            in_time_alone(seed) if what == "time" else with_gradients(play, seed)
        except Exception as error:
            replay = f"PACELINE_SWARM_SEED={seed} python -m pytest tests/strategies/test_server_swarm.py -k [{what}-"
            raise AssertionError(f"{what}, seed {seed}: {error}\nReplay it: {replay}") from error
