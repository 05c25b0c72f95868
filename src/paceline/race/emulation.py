"""A slower device on this machine: compute for real, then sleep for what the slower device would still need.

Sleeping leaves the cores to the others, so a few workers of different speed fit on two cores, and the emulated cluster
is as repeatable as the scheduler's wake-ups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, repeat
from statistics import mean, median

from paceline.race.solo import TrainingLoop, one_thread
from paceline.race.spec import RaceSpec
from paceline.workloads.workload import Workload

SOLO_SECONDS = 1.0
LEAST_MICRO_BATCH_SECONDS = 0.02
# Computing may take this part of a micro-batch at speed 1, so that four workers together fit on two cores.
COMPUTE_SHARE = 0.25
# Enough to make up for a row of small micro-batches, each of which really took longer than its part of a whole one;
# so little that after a machine's standstill nobody sees a device run at the speed of the machine for long.
MOST_MICRO_BATCHES_LATE = 3


class EmulatedDevice:
    """Stretches the computing inside `micro_batch(...)` to what the emulated device would need.

    Time is in proportion to samples, as in the simulator. A real computation is not: that of a few samples may take
    longer than their part of a whole micro-batch, and a sleep may end late. Such delay is taken off the next
    micro-batches, so that the device keeps its speed on average, whatever the sizes.

    Args:
        durations: seconds of the first, second, … micro-batch on that device, if it is a whole one.
        mean_seconds: of a whole one on average; no more than `MOST_MICRO_BATCHES_LATE` times it is carried over.
        micro_batch: samples in a whole one.
        clock, sleep: of this machine, in seconds.
    """

    def __init__(
        self,
        durations: Iterator[float],
        mean_seconds: float,
        micro_batch: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._durations, self._micro_batch = durations, micro_batch
        self._clock, self._sleep = clock, sleep
        self._late, self._most_late = 0.0, MOST_MICRO_BATCHES_LATE * mean_seconds

    def due(self, began: float, samples: int) -> float:
        """When the device will have computed so many samples, if it begins at this time."""
        return began + next(self._durations) * samples / self._micro_batch

    @contextmanager
    def micro_batch(self, samples: int) -> Iterator[None]:
        """Around the computing of a micro-batch of so many samples."""
        until = self.due(self._clock() - self._late, samples)
        yield
        rest = until - self._clock()
        if rest > 0:
            self._sleep(rest)
        self._late = min(max(self._clock() - until, 0.0), self._most_late)


def compute_seconds(workload: Workload, spec: RaceSpec) -> float:
    """What one micro-batch takes to compute on this machine, on one thread: the median of a few."""
    at_once = EmulatedDevice(repeat(0.0), 0.0, workload.micro_batch)
    return median(_solo_seconds(workload, spec, at_once, repeats=15))


def solo_speed(workload: Workload, spec: RaceSpec, seconds_per_micro_batch: float) -> float:
    """Samples a second of one worker with nobody beside it: the yardstick of *share of ideal*."""
    device = EmulatedDevice(repeat(seconds_per_micro_batch), seconds_per_micro_batch, workload.micro_batch)
    repeats = max(5, round(SOLO_SECONDS / seconds_per_micro_batch))
    return workload.micro_batch / mean(_solo_seconds(workload, spec, device, repeats))


def _solo_seconds(workload: Workload, spec: RaceSpec, device: EmulatedDevice, repeats: int) -> list[float]:
    model = workload.build_model(spec.seed)
    loop = TrainingLoop(workload, model, spec.build_optimizer(workload, model), around=device.micro_batch)
    with one_thread():
        return list(islice(loop.seconds(), repeats))
