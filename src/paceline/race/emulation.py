"""A slower device on this machine: compute for real, then sleep for what the slower device would still need.

Sleeping leaves the cores to the others, so a few workers of different speed fit on two cores, and the emulated cluster
is as repeatable as the scheduler's wake-ups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.data import DataLoader

from paceline.workloads.workload import Workload

SOLO_SECONDS = 1.0
LEAST_MICRO_BATCH_SECONDS = 0.02
# Computing may take this part of a micro-batch at speed 1, so that four workers together fit on two cores.
COMPUTE_SHARE = 0.25


class EmulatedDevice:
    """Stretches the computing inside `micro_batch()` to what the emulated device would need.

    Args:
        next_duration: seconds of the next micro-batch on that device.
    """

    def __init__(self, next_duration: Callable[[], float]) -> None:
        self._next_duration = next_duration

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        until = time.perf_counter() + self._next_duration()
        yield
        rest = until - time.perf_counter()
        if rest > 0:
            time.sleep(rest)


def compute_seconds(workload: Workload, seed: int) -> float:
    """What one micro-batch takes to compute on this machine, on one thread: the median of a few."""
    timed = sorted(1 / rate for rate in _solo_rates(workload, seed, EmulatedDevice(lambda: 0.0), repeats=15))
    return timed[len(timed) // 2]


def solo_speed(workload: Workload, seed: int, seconds_per_micro_batch: float) -> float:
    """Samples a second of one worker with nobody beside it: the yardstick of *share of ideal*."""
    device = EmulatedDevice(lambda: seconds_per_micro_batch)
    repeats = max(5, round(SOLO_SECONDS / seconds_per_micro_batch))
    rates = list(_solo_rates(workload, seed, device, repeats))
    return workload.micro_batch * len(rates) / sum(1 / rate for rate in rates)


def _solo_rates(workload: Workload, seed: int, device: EmulatedDevice, repeats: int) -> Iterator[float]:
    """Micro-batches a second, one value for each, of an ordinary training loop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = workload.build_model(seed)
        optimizer = workload.build_optimizer(model)
        done, warm_up = 0, 3
        while done < repeats + warm_up:
            began = time.perf_counter()
            for batch in DataLoader(workload.train, batch_size=workload.micro_batch, shuffle=True, drop_last=True):
                with device.micro_batch():
                    optimizer.zero_grad()
                    workload.loss(model, batch).backward()
                optimizer.step()
                ended = time.perf_counter()
                done += 1
                if done > warm_up:
                    yield 1 / (ended - began)
                if done == repeats + warm_up:
                    return
                began = time.perf_counter()
    finally:
        torch.set_num_threads(threads)
