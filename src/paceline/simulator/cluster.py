"""A described cluster: devices, network, faults and graph. `cluster_file` reads one from TOML.

A device of speed 1 needs `micro_batch_seconds` for a micro-batch on average; one of speed ½ twice as long. Every rank
draws its jitter from a stream of its own, made from (seed, rank): what happens to the others cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from paceline.simulator.checks import WrongValueError, number, whole
from paceline.simulator.faults import Fault, check_ranks, further_ranks
from paceline.simulator.jitter import Constant, Jitter, SlowRounds, Trace, read_trace
from paceline.simulator.network import Network
from paceline.simulator.topology import Topology


@dataclass(frozen=True)
class Device:
    """One worker's machine.

    Args:
        speed: relative to a device that needs `micro_batch_seconds`.
        jitter: how its micro-batch times vary around their mean.
    """

    speed: float = 1.0
    jitter: Jitter = field(default_factory=Constant)

    def __post_init__(self) -> None:
        number(self, "speed", above=0.0, finite=True)
        if self.speed == float("inf"):
            raise WrongValueError("speed", "speed = inf is not possible: a micro-batch must take some time.")


class WorkTimes:
    """What a rank's micro-batches take, of whatever size.

    The rank's n-th piece of work, of `micro_batch` samples, takes the n-th duration; a smaller micro-batch is a part of
    such a piece. So a device that is slow for a while is so for the same samples, however they are cut.

    >>> times = WorkTimes(iter([1.0, 6.0, 1.0]), micro_batch=4)
    >>> [times.seconds(count) for count in (4, 1, 1, 3)]
    [1.0, 1.5, 1.5, 3.25]
    """

    __slots__ = ("_durations", "_left", "_seconds", "micro_batch")

    def __init__(self, durations: Iterator[float], micro_batch: int) -> None:
        self._durations, self.micro_batch = durations, micro_batch
        self._left = 0
        self._seconds = 0.0

    def seconds(self, count: int) -> float:
        """Of the next micro-batch, of so many samples."""
        whole = self.micro_batch
        if count == whole and not self._left:
            return next(self._durations)
        total = 0.0
        while count:
            if not self._left:
                self._left, self._seconds = whole, next(self._durations)
            part = min(count, self._left)
            total += self._seconds * part / whole
            self._left -= part
            count -= part
        return total


@dataclass(frozen=True)
class Cluster:
    """Devices, what joins them, and what goes wrong.

    Args:
        devices: rank i's device at place i.
        micro_batch_seconds: what a device of speed 1 needs for one micro-batch, on average.
        network: what communication costs; free by default.
        faults: see `faults`.
        seed: of all chance in it.
        graph: who exchanges models with whom in decentralised training; None leaves it to the strategy.
        servers: ranks behind the devices that hold parameters and compute no gradient.

    >>> cluster = Cluster.from_speeds([1, 1, 0.5, 0.25], micro_batch_seconds=0.02)
    >>> [cluster.mean_seconds(rank) for rank in range(cluster.workers)]
    [0.02, 0.02, 0.04, 0.08]
    >>> next(cluster.durations(3))
    0.08
    """

    devices: tuple[Device, ...]
    micro_batch_seconds: float = 0.02
    network: Network = field(default_factory=Network)
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    graph: Topology | None = None
    servers: int = 0

    def __post_init__(self) -> None:
        number(self, "micro_batch_seconds", above=0.0, finite=True)
        whole(self, "seed", 0)
        whole(self, "servers", 0)
        if not self.devices:
            raise WrongValueError("devices", "The cluster has no devices.", "Give at least one.")
        for fault in self.faults:
            check_ranks(fault, self.ranks)
        if self.graph is not None:
            self.graph.check(self.workers)
        further = further_ranks(self.faults)
        if further and (further != [*range(self.begins_with, self.ranks)] or self.begins_with <= self.servers):
            raise WrongValueError(
                "faults",
                f"Rank {further[0]} joins before it was ever lost, so that the run begins without it.",
                "Such ranks are the last ones, behind the servers, with the last devices; not all of those.",
            )

    @classmethod
    def from_speeds(
        cls,
        speeds: Sequence[float],
        *,
        micro_batch_seconds: float = 0.02,
        jitter: Jitter | None = None,
        network: Network | None = None,
        faults: Sequence[Fault] = (),
        seed: int = 0,
    ) -> Cluster:
        """One device for each speed, all with the same jitter."""
        devices = tuple(Device(speed, jitter or Constant()) for speed in speeds)
        return cls(devices, micro_batch_seconds, network or Network(), tuple(faults), seed)

    @classmethod
    def from_trace(
        cls, file: str, *, micro_batch_seconds: float = 0.02, network: Network | None = None, seed: int = 0
    ) -> Cluster:
        """A recorded job again: one device for each of its workers, with the worker's speed (relative to the job's
        mean micro-batch) and its times."""
        means = [sum(times) / len(times) for times in read_trace(file)]
        speeds = [sum(means) / len(means) / mean for mean in means]
        return cls.from_speeds(
            speeds, micro_batch_seconds=micro_batch_seconds, jitter=Trace(file), network=network, seed=seed
        )

    @property
    def workers(self) -> int:
        return len(self.devices)

    @property
    def ranks(self) -> int:
        """Workers and servers."""
        return self.workers + self.servers

    @cached_property
    def begins_with(self) -> int:
        """Ranks that are there from the beginning; the others join, see `faults`."""
        return self.ranks - len(further_ranks(self.faults))

    def mean_seconds(self, rank: int) -> float:
        """What a micro-batch takes this rank on average, alone and without faults."""
        return self.micro_batch_seconds / self._device(rank).speed

    def _device(self, rank: int) -> Device:
        """Of a worker: those of ranks that join while the run runs come behind the others, and servers have none."""
        return self.devices[rank if rank < self.begins_with else rank - self.servers]

    def micro_batches_per_second(self) -> float:
        """What all devices together compute when nobody waits: the physical limit."""
        return sum(device.speed for device in self.devices) / self.micro_batch_seconds

    def durations(self, rank: int, round_of: Callable[[], int] = lambda: 0) -> Iterator[float]:
        """Seconds of the rank's first, second, … micro-batch, without faults.

        Args:
            rank: whose.
            round_of: tells the round that the rank is in when its next micro-batch begins.
        """
        mean, jitter = self.mean_seconds(rank), self._device(rank).jitter
        for factors in jitter.blocks(self.seed, rank):
            seconds: list[float] = (mean * factors).tolist()
            if isinstance(jitter, SlowRounds):
                yield from (each * jitter.in_round(self.seed, rank, round_of()) for each in seconds)
            else:
                yield from seconds
