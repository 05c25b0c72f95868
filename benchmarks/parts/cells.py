"""The clusters of the comparisons, in units of what a micro-batch takes a device of speed 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import Drift, LogNormal, SlowDowns, SlowRounds
from paceline.simulator.network import Network

WORKERS = 4
CLUSTERS = {
    "equal": "four equal workers",
    "a": "static speeds 1, 1, ½, ¼",
    "b": "drifting: AR(1), lag-1 correlation 0.7, spread 0.25",
    "c": "slow-downs ×6 with probability 1/8 a micro-batch",
    "d": "recorded jobs (Alibaba PAI), four workers of each; the seed chooses the job and the place in it",
}


LEARNERS = 8
STRAGGLERS = {
    "equal": "eight equal learners",
    "one-2x": "one 2× slow",
    "one-4x": "one 4× slow",
    "half-2x": "half 2× slow",
    "random-6x": "each 6× slow with probability 1/8 a round",
}


def cluster_of(name: str, comm: float, seed: int, traces: Path, part: float = 1.0) -> Cluster:
    """A cluster whose all-reduce takes `comm` micro-batches, for work that comes in a part of a micro-batch."""
    network = Network(latency=comm / (2 * (WORKERS - 1)))
    settings = {"micro_batch_seconds": part, "network": network, "seed": seed}
    match name:
        case "equal":
            return Cluster.from_speeds([1.0] * WORKERS, **settings)  # type: ignore[arg-type]  # of mixed kinds
        case "a":
            return Cluster.from_speeds([1.0, 1.0, 0.5, 0.25], **settings)  # type: ignore[arg-type]
        case "b":
            return Cluster.from_speeds([1.0] * WORKERS, jitter=Drift(0.7, 0.25), **settings)  # type: ignore[arg-type]
        case "c":
            return Cluster.from_speeds([1.0] * WORKERS, jitter=SlowDowns(6.0, 0.125), **settings)  # type: ignore[arg-type]
        case _:
            job = Cluster.from_trace(str(traces / f"pai_job_{seed % 3 + 1}.csv"), **settings)  # type: ignore[arg-type]
            return replace(job, devices=job.devices[:WORKERS])


CLASSES = (1.0, 1 / 1.5, 1 / 2, 1 / 3)
CLASS_SIZE = 4


def four_classes(comm: float, seed: int) -> Cluster:
    """Sixteen workers in four classes of times 1 : 1.5 : 2 : 3, in no order; a push and a pull together take `comm`
    micro-batches."""
    speeds = [CLASSES[(5 * place) % len(CLASSES)] for place in range(CLASS_SIZE * len(CLASSES))]
    return Cluster.from_speeds(
        speeds, micro_batch_seconds=1.0, jitter=LogNormal(0.05), network=Network(latency=comm / 3), seed=seed
    )


def stragglers(name: str, comm: float, seed: int) -> Cluster:
    """Eight learners, some of them slow, whose all-reduce takes `comm` mini-batches. A message to a neighbour is one
    step of its ring."""
    slow = {"equal": (0, 1.0), "one-2x": (1, 0.5), "one-4x": (1, 0.25), "half-2x": (4, 0.5), "random-6x": (0, 1.0)}
    count, speed = slow[name]
    return Cluster.from_speeds(
        [1.0] * (LEARNERS - count) + [speed] * count,
        micro_batch_seconds=1.0,
        jitter=SlowRounds(6.0, 1 / 8) if name == "random-6x" else None,
        network=Network(latency=comm / (2 * (LEARNERS - 1))),
        seed=seed,
    )
