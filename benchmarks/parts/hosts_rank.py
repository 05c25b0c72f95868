"""One rank of `scripts/bench hosts`: an ordinary Paceline loop, or PyTorch's DDP, on an emulated device.

paceline run … hosts_rank.py SPEC.json STRATEGY          the strategy, or `ddp`
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.backends.peers import ControlPeers
from paceline.race.emulation import EmulatedDevice
from paceline.race.spec import RaceSpec
from paceline.race.worker import emulated, train
from paceline.workloads.models import MLP
from paceline.workloads.synthetic import synthetic
from paceline.workloads.workload import Workload

FEATURES, WIDTH, CLASSES = 32, 600, 10
PARAMETERS = sum(wide * (narrow + 1) for narrow, wide in ((FEATURES, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES)))
DDP = "ddp"
FLAT = "HOSTS_FLAT"  # in the environment: hosts are not told apart, and gloo adds up in one ring of all ranks
WARM_UP = 5  # steps
SNAPSHOTS = 4  # where ranks step alone each is a mean over slow links, after the race


def workload() -> Workload:
    """Made-up classes, and a model that is large enough for a slow link to matter."""
    return dataclasses.replace(
        synthetic(features=FEATURES, classes=CLASSES), model=partial(MLP, (FEATURES, WIDTH, WIDTH, CLASSES))
    )


def train_with_ddp(spec: RaceSpec, task: Workload, out: Path) -> None:
    """As its tutorial; rank, world size and the first host's address are in the environment, as torchrun sets them.
    Rank 0 tells after a few steps how many fit into the time, and writes what they took."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = task.build_model(spec.seed)
    optimizer = spec.build_optimizer(task, model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    cluster = spec.build_cluster(spec.micro_batch_seconds or 0.0)
    device = EmulatedDevice(cluster.durations(rank), cluster.mean_seconds(rank), task.micro_batch)
    order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(spec.seed))[rank::world]
    batches = cycle(part for part in order.split(task.micro_batch) if len(part) == task.micro_batch)

    def take(steps: int) -> float:
        dist.barrier()
        began = time.monotonic()
        for indices in islice(batches, steps):
            batch = task.train[indices]
            with device.micro_batch(len(indices)):  # all its gradients are one bucket, which goes when all are there
                optimizer.zero_grad()
                loss = task.loss(wrapped, batch)
            loss.backward()
            optimizer.step()
        return time.monotonic() - began

    take(WARM_UP)
    steps = torch.tensor([max(1, round(spec.seconds / take(WARM_UP) * WARM_UP))])
    dist.broadcast(steps, 0)
    seconds = take(int(steps))
    if rank == 0:
        out.write_text(json.dumps({"seconds": seconds, "samples": int(steps) * world * task.micro_batch}))
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    spec, strategy, task = RaceSpec.from_json(Path(sys.argv[1]).read_text()), sys.argv[2], workload()
    if strategy == DDP:
        train_with_ddp(spec, task, Path(os.environ["DDP_RESULT"]))
    else:
        if FLAT in os.environ:
            ControlPeers.host_of = lambda self, rank: ""  # type: ignore[method-assign]
        train(spec, task, strategy, partial(emulated, spec, task, spec.micro_batch_seconds or 0.0), SNAPSHOTS)


if __name__ == "__main__":
    main()
