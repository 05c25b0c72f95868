"""What every method of the comparison has in common: data, model, cluster, and how fast each device is at which time.

A device's speed depends on the time since the race began, not on how a method cuts its work: so every method meets the
same cluster, and what all devices together could have computed is known exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline import workloads
from paceline.race.emulation import EmulatedDevice
from paceline.race.spec import RaceSpec
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import Drift, stream
from paceline.workloads.workload import Workload

WORKERS = 4
WORKLOAD = "digits"
PIECE = 4  # samples
PIECE_SECONDS = 0.08  # that they take a device of speed 1; computing takes 0.3 ms of it
OPTIMIZER = "nesterov"
UNEQUAL = (1.0, 1.0, 0.5, 0.25)
CLUSTERS = {
    "equal": "four equal workers",
    "static": "speeds 1, 1, ½, ¼",
    "drifting": "the same speeds on average, each drifting: AR(1), lag-1 correlation 0.98 from four samples to the "
    "next, spread 0.5",
    "straggler": "four equal workers; in every second with probability ½ one of them, drawn anew, is ×8 slower",
    "traces": "recorded jobs (Alibaba PAI), four workers of each; the seed chooses the job and the place in it",
}
DRIFT = Drift(0.98, 0.5)
SLOWER, SLOW_PROBABILITY = 8.0, 0.5
TICK = 0.01  # seconds
TRACES = Path("../shared/data/traces")


@dataclass(frozen=True)
class Race:
    """One method once round the course. `method`: a peer's name, or a strategy of Paceline with its options."""

    method: str
    cluster: str
    micro_batch: int
    lr: float
    seed: int
    seconds: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def spec(self) -> RaceSpec:
        return RaceSpec(
            strategies=(self.method,),
            speeds=UNEQUAL,
            workload=WORKLOAD,
            optimizer=OPTIMIZER,
            lr=self.lr,
            seconds=self.seconds,
            seed=self.seed,
        )


def load_workload() -> Workload:
    return workloads.load(WORKLOAD)


def cluster_of(name: str, seed: int, traces: Path = TRACES) -> Cluster:
    """Mean speeds and jitter; stragglers come on top (see `paces`)."""
    if name == "traces":
        job = Cluster.from_trace(
            str(traces / f"pai_job_{seed % 3 + 1}.csv"), micro_batch_seconds=PIECE_SECONDS, seed=seed
        )
        return replace(job, devices=job.devices[:WORKERS])
    speeds = UNEQUAL if name in ("static", "drifting") else (1.0,) * WORKERS
    jitter = DRIFT if name == "drifting" else None
    return Cluster.from_speeds(speeds, micro_batch_seconds=PIECE_SECONDS, jitter=jitter, seed=seed)


def shares_of(speeds: list[float], batch: int) -> list[int]:
    """The batch in proportion to the speeds, in whole samples.

    >>> shares_of([1.0, 1.0, 0.5, 0.25], 128)
    [47, 46, 23, 12]
    """
    exact = [batch * speed / sum(speeds) for speed in speeds]
    shares = [int(each) for each in exact]
    for rank in sorted(range(len(exact)), key=lambda rank: shares[rank] - exact[rank])[: batch - sum(shares)]:
        shares[rank] += 1
    return shares


class Pace:
    """What a device computes by when.

    Args:
        samples: computed by the end of each tick.

    >>> pace = Pace(np.array([1.0, 2.0, 2.5, 3.0]))  # slower by half after two ticks
    >>> round(pace.due(0.0, 2.0), 4), round(pace.due(0.01, 2.0), 4), round(pace.due(0.04, 1.0), 4)
    (0.02, 0.04, 0.06)
    >>> pace.by(0.03)
    2.5
    """

    def __init__(self, samples: NDArray[np.float64]) -> None:
        self._samples = np.concatenate([[0.0], samples])
        self._times = np.arange(len(self._samples)) * TICK
        self._last_speed = (self._samples[-1] - self._samples[-2]) / TICK

    def by(self, t: float) -> float:
        """Samples from the beginning until `t`."""
        beyond = max(t - float(self._times[-1]), 0.0)
        return float(np.interp(t, self._times, self._samples)) + beyond * self._last_speed

    def due(self, began: float, samples: float) -> float:
        """When so many samples are computed, if the device begins at `began`."""
        until = self.by(began) + samples
        beyond = max(until - float(self._samples[-1]), 0.0)
        return float(np.interp(until, self._samples, self._times)) + beyond / self._last_speed


def paces(name: str, seed: int, seconds: float, traces: Path = TRACES) -> list[Pace]:
    """Of every worker, for a race of so many seconds (and for the time that its last rounds may take)."""
    cluster = cluster_of(name, seed, traces)
    ticks = (np.arange(int((2 * seconds + 10) / TICK)) + 0.5) * TICK
    slow = np.ones((cluster.workers, len(ticks)))
    if name == "straggler":
        random = stream(seed, 0)
        for second in range(int(ticks[-1]) + 1):
            drawn, rank = random.random(), int(random.integers(cluster.workers))
            if drawn < SLOW_PROBABILITY:
                slow[rank, (ticks >= second) & (ticks < second + 1)] = SLOWER
    return [Pace(np.cumsum(_speeds(cluster, rank, ticks) / slow[rank] * TICK)) for rank in range(cluster.workers)]


def _speeds(cluster: Cluster, rank: int, ticks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Samples a second at each of these times."""
    seconds: list[float] = []
    durations, ends = cluster.durations(rank), 0.0
    while ends <= ticks[-1]:
        seconds.append(next(durations))
        ends += seconds[-1]
    pieces = np.array(seconds)
    speeds: NDArray[np.float64] = PIECE / pieces[np.searchsorted(np.cumsum(pieces), ticks)]
    return speeds


class PacedDevice(EmulatedDevice):
    """A device whose speed depends on the time since its first micro-batch.

    Args:
        pace: of this device.
        mean_seconds: of a piece, on average.
        at_first: called when its first micro-batch begins.
        sleep: of this machine.
    """

    def __init__(
        self,
        pace: Pace,
        mean_seconds: float,
        at_first: Callable[[], None],
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(repeat(0.0), mean_seconds, PIECE, sleep=self._watched_sleep)
        self._pace, self._at_first, self._real_sleep = pace, at_first, sleep
        self._overslept: list[float] = []
        self.began: float | None = None

    @property
    def overslept(self) -> float:
        """Seconds that sleeps ended late, on average: how much the machine was disturbed by others."""
        return sum(self._overslept) / len(self._overslept) if self._overslept else 0.0

    def _watched_sleep(self, seconds: float) -> None:
        until = self._clock() + seconds
        try:
            self._real_sleep(seconds)
        finally:  # a micro-batch may be given up
            self._overslept.append(max(self._clock() - until, 0.0))

    def due(self, began: float, samples: int) -> float:
        if self.began is None:
            self._at_first()
            self.began = began
        return self.began + self._pace.due(max(began - self.began, 0.0), samples)
