"""What a race is: everything that its result depends on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from math import inf

from paceline.errors import PacelineError, no_such
from paceline.simulator.cluster import Cluster
from paceline.simulator.cluster_file import read_cluster
from paceline.simulator.network import Network
from paceline.strategies import create

BACKENDS = ("processes", "simulated")
# What gloo shows between four processes on two cores: 5.5 ms for ten thousand numbers, 12.6 ms for a million. It is
# the simulator's stand-in for the real thing.
ONE_MACHINE = Network(latency=0.9e-3, bandwidth=0.9e9)


@dataclass(frozen=True, kw_only=True)
class RaceSpec:
    """Settings of a race.

    Args:
        strategies: names with options, raced in turn.
        speeds: one a worker; a worker of speed ½ needs twice as long for a micro-batch.
        workload: name of the model and data.
        backend: `processes` or `simulated`.
        seconds: that every strategy may train for.
        target: of the held-out metric; None takes the workload's.
        cluster: a TOML file with devices, jitter, network and faults, instead of `speeds`.
        micro_batch_seconds: what a micro-batch takes at speed 1; None chooses by measuring. Not with `cluster`.
        data: folder of data for workloads that need one.
        seed: of data order, model and cluster.
    """

    strategies: tuple[str, ...]
    speeds: tuple[float, ...] = ()
    workload: str = "digits"
    backend: str = "processes"
    seconds: float = 20.0
    target: float | None = None
    cluster: str | None = None
    micro_batch_seconds: float | None = None
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for text in self.strategies:
            create(text)  # protests now, not after the first strategy's twenty seconds
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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RaceSpec:
        values = json.loads(text)
        for key in ("strategies", "speeds"):
            values[key] = tuple(values[key])
        return cls(**values)
