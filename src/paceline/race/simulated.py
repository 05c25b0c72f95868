"""A strategy's turn in the simulator: real gradients, virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import simulate
from paceline.backends.sources import Data
from paceline.race.snapshots import Snapshots
from paceline.race.spec import RaceSpec
from paceline.record import Event, MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.strategies import Strategy, create
from paceline.workloads.workload import Workload


def race_simulated(spec: RaceSpec, workload: Workload, cluster: Cluster, strategy: str) -> list[Event]:
    """What happened when the strategy trained the workload in virtual time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order: the same bits on every machine with any number of cores
    try:
        return _race(spec, workload, cluster, strategy)
    finally:
        torch.set_num_threads(threads)


def _race(spec: RaceSpec, workload: Workload, cluster: Cluster, strategy: str) -> list[Event]:
    learners = [_learner(spec, workload, rank) for rank in range(cluster.ranks)]
    recorder = MemoryRecorder()
    snapshots = Snapshots(workload, spec.seed, spec.seconds)
    chosen = create(strategy)

    def model() -> Tensor:
        if not chosen.steps_alone:
            return learners[0].parameters
        return mean_model(chosen, cluster, [learner.parameters for learner in learners], learners[0].sizes)

    def look(rank: int, t: float, samples: int) -> None:
        if rank == 0 or rank >= cluster.workers:
            snapshots.look(t, samples, model)

    outcome = simulate(
        chosen,
        cluster,
        micro_batch=workload.micro_batch,
        seconds=spec.seconds,
        data=Data(len(workload.train)),
        learners=learners,
        recorder=recorder,
        on_applied=look,
    )
    snapshots.take(outcome.seconds, outcome.samples_applied, learners[0].parameters)
    for t, samples, metric, loss in snapshots.evaluate():
        recorder.write("metric", 0, t, samples=samples, metric=metric, loss=loss)
    return recorder.events


def mean_model(strategy: Strategy, cluster: Cluster, models: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The model of the run, from the parameters of all ranks."""
    places = (cluster.workers, cluster.servers, sizes)
    shares = [strategy.share_of_model(rank, *places) for rank in range(cluster.ranks)]
    total = torch.zeros_like(models[0])
    for parameters, share in zip(models, shares, strict=True):
        total[share.part] += parameters[share.part]
    return total.div_(sum(share.models for share in shares))


def _learner(spec: RaceSpec, workload: Workload, rank: int) -> ReplicaLearner:
    model = workload.build_model(spec.seed)

    def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
        workload.loss(model, workload.train[torch.from_numpy(indices)]).backward()

    replica = Replica(model, spec.build_optimizer(workload, model))
    return ReplicaLearner(replica, backward, samples=len(workload.train), rank=rank, seed=spec.seed)
