"""The clusters of the comparison: four workers, in units of what a micro-batch takes a device of speed 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import Drift, SlowDowns
from paceline.simulator.network import Network

WORKERS = 4
CLUSTERS = {
    "equal": "four equal workers",
    "a": "static speeds 1, 1, ½, ¼",
    "b": "drifting: AR(1), lag-1 correlation 0.7, spread 0.25",
    "c": "slow-downs ×6 with probability 1/8 a micro-batch",
    "d": "recorded jobs (Alibaba PAI), four workers of each; the seed chooses the job and the place in it",
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
