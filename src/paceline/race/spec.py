"""What a race is: everything that its result depends on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import workloads
from paceline.errors import PacelineError, no_such
from paceline.simulator.cluster import Cluster
from paceline.simulator.cluster_file import read_cluster
from paceline.simulator.network import Network
from paceline.strategies import Strategy, create

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from paceline.workloads.workload import Workload

BACKENDS = ("processes", "simulated")
# What gloo shows between four processes on two cores: 5.5 ms for ten thousand numbers, 12.6 ms for a million. It is
# the simulator's stand-in for the real thing.
ONE_MACHINE = Network(latency=0.9e-3, bandwidth=0.9e9)


def with_servers(cluster: Cluster, strategy: Strategy, servers: int | None) -> Cluster:
    """The cluster with servers for a strategy that has some: so many, or as many as the file says or it takes."""
    usual = strategy.servers_for(cluster.workers)
    chosen = (cluster.servers or usual if servers is None else servers) if usual else 0
    strategy.check_servers(cluster.workers, chosen)
    return replace(cluster, servers=chosen)


@dataclass(frozen=True, kw_only=True)
class RaceSpec:
    """Settings of a race.

    Args:
        strategies: names with options, raced in turn.
        speeds: one a worker; a worker of speed ½ needs twice as long for a micro-batch.
        workload: name of the data and of how they are judged.
        model: one of the workload's; None takes its usual one.
        optimizer: `sgd`, `nesterov`, `adamw` or `plain-sgd`.
        lr: learning rate; None takes the workload's for the optimizer.
        backend: `processes` or `simulated`.
        seconds: that every strategy may train for.
        target: of the held-out metric; None takes the workload's.
        cluster: a TOML file with devices, jitter, network and faults, instead of `speeds`.
        micro_batch_seconds: what a micro-batch takes at speed 1; None chooses by measuring. Not with `cluster`.
        data: folder of data for workloads that need one.
        seed: of data order, model and cluster.
        servers: of the strategies that have servers; None is as many as each takes by itself, or a file's.
    """

    strategies: tuple[str, ...]
    speeds: tuple[float, ...] = ()
    workload: str = "digits"
    model: str | None = None
    optimizer: str = "sgd"
    lr: float | None = None
    backend: str = "processes"
    seconds: float = 20.0
    target: float | None = None
    cluster: str | None = None
    micro_batch_seconds: float | None = None
    data: str | None = None
    seed: int = 0
    servers: int | None = None

    def __post_init__(self) -> None:
        for text in self.strategies:
            create(text)  # protests now, not after the first strategy's twenty seconds
        workloads.model_name(self.workload, self.model)  # protests when there is no such
        if self.optimizer not in workloads.OPTIMIZERS:
            raise no_such("optimizer", self.optimizer, workloads.OPTIMIZERS)
        if self.lr is not None and not 0 < self.lr < inf:
            raise PacelineError(f"A learning rate of {self.lr:g} is not possible.", remedy="Give more than zero.")
        if self.backend not in BACKENDS:
            raise no_such("backend", self.backend, BACKENDS)
        twice = [text for text in self.strategies if self.strategies.count(text) > 1]
        if twice:
            raise PacelineError(f"The strategy {twice[0]} is named twice.", remedy="Vary its options, or the seed.")
        if not 0 < self.seconds < inf:
            raise PacelineError(f"A race of {self.seconds:g} seconds is not possible.", remedy="Give more than zero.")
        if self.micro_batch_seconds is not None and not 0 < self.micro_batch_seconds < inf:
            raise PacelineError("A micro-batch must take more than zero seconds, and not for ever.")
        if self.cluster and self.micro_batch_seconds is not None:
            raise PacelineError("A cluster file says itself how long a micro-batch takes.", where=self.cluster)
        if not self.strategies:
            raise PacelineError("There is no strategy to race.", remedy="Name some with --strategies.")
        if bool(self.cluster) == bool(self.speeds):
            raise PacelineError("Give either speeds or a cluster file.", remedy="For example --speeds 1,1,0.5,0.25.")

    def build_cluster(self, micro_batch_seconds: float) -> Cluster:
        """The cluster to emulate; `micro_batch_seconds` is for speeds alone, a file has its own."""
        if self.cluster:
            return replace(read_cluster(self.cluster), seed=self.seed)
        return Cluster.from_speeds(
            self.speeds, micro_batch_seconds=micro_batch_seconds, network=ONE_MACHINE, seed=self.seed
        )

    def with_servers(self, cluster: Cluster, strategy: Strategy) -> Cluster:
        """The cluster as the strategy needs it."""
        return with_servers(cluster, strategy, self.servers)

    def load_workload(self) -> Workload:
        return workloads.load(self.workload, Path(self.data) if self.data else None, self.model)

    def build_optimizer(self, workload: Workload, model: nn.Module) -> Optimizer:
        return workload.build_optimizer(model, optimizer=self.optimizer, lr=self.lr)

    def learning(self, workload: Workload) -> dict[str, Any]:
        """How every strategy of the race learns, by name, with what was chosen where nothing was asked for."""
        return {
            "model": workloads.model_name(self.workload, self.model),
            "optimizer": self.optimizer,
            "lr": workload.learning_rate(self.optimizer) if self.lr is None else self.lr,
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RaceSpec:
        values = json.loads(text)
        for key in ("strategies", "speeds"):
            values[key] = tuple(values[key])
        return cls(**values)
