"""One rank of a race on real processes: an ordinary Paceline loop on an emulated device.

python -m paceline.race.worker SPEC.json STRATEGY MICRO_BATCH_SECONDS
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from paceline.race.emulation import EmulatedDevice
from paceline.race.snapshots import PER_RACE, Snapshots
from paceline.race.spec import RaceSpec
from paceline.run.run import Run
from paceline.workloads.workload import Workload

LAYERS = 20
LEAST_SLEEP = 0.001  # below it the machine is busy with waking up


def train(
    spec: RaceSpec,
    workload: Workload,
    strategy: str,
    device_of: Callable[[Run], EmulatedDevice],
    snapshots_in_all: int = PER_RACE,
) -> None:
    """One rank of one strategy, on the device that `device_of` makes for it."""
    model = workload.build_model(spec.seed)
    with Run(strategy, seed=spec.seed) as run:
        device = None if run.serves else device_of(run)
        loader = run.loader(
            workload.train,
            micro_batch=workload.micro_batch,
            seconds=spec.seconds,
            collate_fn=workload.train.collate,
        )
        optimizer = run.optimizer(spec.build_optimizer(workload, model), model)
        snapshots = Snapshots(workload, spec.seed, spec.seconds, snapshots_in_all)
        alone, share = run.strategy.steps_alone, run.share_of_model
        if not share.empty if alone else run.rank == 0:
            run.after_round(
                lambda: snapshots.look(run.node.now(), run.node.samples_applied, lambda: run.node.parameters)
            )
        for batch in loader:
            assert device is not None
            with run.abortable(), device.micro_batch(len(batch[1])):
                optimizer.zero_grad()
                workload.loss(model, batch).backward()
            optimizer.step()
        snapshots.take(run.node.now(), run.node.samples_applied, run.node.parameters)
        if alone:  # the race is over: this is off the clock
            snapshots.average(run.rank, run.world_size, share, run.node.sum_now)
        if run.rank == 0:
            torch.set_num_threads(os.cpu_count() or 1)  # the race is over: the cores are free
            for t, samples, metric, loss in snapshots.evaluate():
                run.report(metric, loss, t=t, samples=samples)


def emulated(spec: RaceSpec, workload: Workload, micro_batch_seconds: float, run: Run) -> EmulatedDevice:
    cluster = spec.build_cluster(micro_batch_seconds)
    durations = cluster.durations(run.rank, lambda: run.node.rounds)
    mean = cluster.mean_seconds(run.rank)
    return EmulatedDevice(durations, mean, workload.micro_batch, sleep=lambda rest: heedful_sleep(run, rest))


def heedful_sleep(run: Run, seconds: float) -> None:
    """What a device would still need, which looks for signals as often as a model of many layers does."""
    until = time.perf_counter() + seconds
    step = seconds if run.node.until is None else max(seconds / LAYERS, LEAST_SLEEP)
    while (left := until - time.perf_counter()) > 0:
        run.heed()
        time.sleep(min(left, step))


def main() -> None:
    torch.set_num_threads(1)
    spec = RaceSpec.from_json(Path(sys.argv[1]).read_text())
    workload = spec.load_workload()
    train(spec, workload, sys.argv[2], partial(emulated, spec, workload, float(sys.argv[3])))


if __name__ == "__main__":
    main()
