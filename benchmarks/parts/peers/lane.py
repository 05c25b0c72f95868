"""One rank of a peer's race: its device, its data, the clock, and copies of the model to be judged afterwards."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.race.snapshots import Snapshots
from paceline.rules.order import order
from paceline.workloads.workload import Batch, Workload
from parts.peers.course import OPTIMIZER, WORKERS, PacedDevice, Race, cluster_of, paces

LAUNCHED = "PEERS_LAUNCHED"
TRACES = "PEERS_TRACES"
APART = "PEERS_APART"


def bytes_on_loopback() -> int:
    """Sent so far over this network namespace's loopback, which nobody else uses."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def race_on() -> None:
    """The race begins: whoever of its processes wakes up shall run, whatever else the machine does. So all that the
    session consists of gets a real-time priority where that is allowed. Workers sleep most of the time, and starting
    up, which does not, is over. Without it, sleeps of 10 ms ended 1.1 ms late on a busy machine, with it 0.1."""
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*" if os.environ[APART] else "self/task/[0-9]*"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))


def race_off() -> None:
    """This process's race is over; to judge it and to begin the next one gives way to the races of others."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(int(task.name), os.SCHED_OTHER, os.sched_param(0))


class Blocks:
    """Each rank's samples, as a batch sampler: a run's order of all samples of all epochs, the same as Paceline's, cut
    into blocks; of each block a rank takes as many as its share. With orders of their own, methods would differ by the
    luck of a seed more than by what they do."""

    def __init__(self, samples: int, shares: Sequence[int], rank: int, seed: int) -> None:
        self._samples, self._shares, self._rank, self._seed = samples, shares, rank, seed

    def __iter__(self) -> Iterator[list[int]]:
        block, first = sum(self._shares), sum(self._shares[: self._rank])
        left: list[int] = []
        for epoch in count():
            left += order(self._seed, epoch, self._samples).tolist()
            while len(left) >= block:
                yield left[first : first + self._shares[self._rank]]
                del left[:block]


class Lane:
    """See above. A peer's loop calls `begin` before a micro-batch, `rest` after its computing and before anything is
    sent, `stepped` after a step, and ends when `over`.

    Args:
        race: that is run.
        rank: of this process.
        workload: loaded before: loading is not part of a race.
        folder: where the outcome goes; it holds a file `stop` of eight zero bytes.
    """

    def __init__(self, race: Race, rank: int, workload: Workload, folder: Path) -> None:
        self.race, self.rank, self.workload, self.folder = race, rank, workload, folder
        traces = Path(os.environ[TRACES])
        pace = paces(race.cluster, race.seed, race.seconds, traces)[rank]
        cluster = cluster_of(race.cluster, race.seed, traces)
        self.speeds = [device.speed for device in cluster.devices]
        self.device = PacedDevice(pace, cluster.mean_seconds(rank), self._first)
        self.model = workload.build_model(race.seed)
        self.snapshots = Snapshots(workload, race.seed, race.seconds)
        self._file = (folder / "stop").open("r+b")
        self._stop = mmap.mmap(self._file.fileno(), 8)
        self._pending: AbstractContextManager[None] | None = None
        self._bytes, self._start_up = 0, 0.0
        self.steps = self.own = 0
        self.ended = 0.0

    def _first(self) -> None:
        race_on()
        self._bytes = bytes_on_loopback()
        self._start_up = time.time() - float(os.environ[LAUNCHED])

    def optimizer(self, parameters: Any = None) -> torch.optim.Optimizer:
        """The race's, over the lane's model or the given parameters."""
        if parameters is None:
            return self.workload.build_optimizer(self.model, optimizer=OPTIMIZER, lr=self.race.lr)
        return torch.optim.SGD(parameters, lr=self.race.lr, momentum=self.workload.momentum, nesterov=True)

    @property
    def batch(self) -> int:
        """Samples of a step, of all ranks together."""
        return self.race.micro_batch * WORKERS

    def batches(self, shares: Sequence[int] | None = None) -> Iterator[Batch]:
        """This rank's, without end; by default as many samples as everybody else's."""
        shares = [self.race.micro_batch] * WORKERS if shares is None else shares
        blocks = Blocks(len(self.workload.train), shares, self.rank, self.race.seed)
        return iter(DataLoader(self.workload.train, batch_sampler=blocks))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.workload.loss(model, batch)

    @property
    def computed_by_all(self) -> int:
        """Samples, if all ranks were as busy as this one."""
        return round(self.own * sum(self.speeds) / self.speeds[self.rank])

    @property
    def seconds(self) -> float:
        """Since the first micro-batch."""
        return 0.0 if self.device.began is None else time.perf_counter() - self.device.began

    @property
    def time_is_up(self) -> bool:
        return self.seconds >= self.race.seconds

    def begin(self, samples: int) -> None:
        self._pending = self.device.micro_batch(samples)
        self._pending.__enter__()
        self.own += samples

    def rest(self) -> None:
        """Sleep for what the device still needs, once a micro-batch."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.__exit__(None, None, None)

    def rest_before_sending(self) -> None:
        """For methods that send inside the backward pass: rest when the last gradient is there, before it is sent. The
        last is that of the first layer."""

        def rest(gradient: Tensor) -> None:
            self.rest()

        next(self.model.parameters()).register_hook(rest)

    def stepped(self, samples: int, model: nn.Module | None = None) -> None:
        """A step was made, after which all ranks together have used so many samples. With `model`, it is the model of
        the run now."""
        self.steps += 1
        self.ended = self.seconds
        if self.rank == 0 and model is not None:
            self.snapshots.look(self.ended, samples, lambda: flat(model))

    def over(self, ahead: int = 1) -> bool:
        """Whether this was the last step: the same on all ranks, of which none is more than `ahead` steps ahead of
        rank 0, and after a multiple of it."""
        (last,) = struct.unpack("q", self._stop[:])
        if self.rank == 0 and not last and self.time_is_up:
            last = -(-(self.steps + ahead) // ahead) * ahead
            self._stop[:] = struct.pack("q", last)
        return bool(last) and self.steps >= last

    def finish(self, samples: int | None, model: nn.Module) -> None:
        """Off the clock: judge the copies, and write what came of the race. `samples`: used by all ranks together; None
        for all that they have computed."""
        race_off()
        found: dict[str, Any] = {"own": self.own, "ended": self.ended, "steps": self.steps}
        if self.rank == 0:
            found |= {"bytes": bytes_on_loopback() - self._bytes, "start_up": self._start_up, "samples": samples}
            self.snapshots.take(self.ended, samples or self.computed_by_all, flat(model))
            torch.set_num_threads(os.cpu_count() or 1)
            found["curve"] = list(self.snapshots.evaluate())
            torch.set_num_threads(1)
        (self.folder / f"rank-{self.rank}.json").write_text(json.dumps(found))
        self._stop.close()
        self._file.close()

    def say_over(self) -> None:
        say_over(self.folder, self.rank, self.device)


def say_over(folder: Path, rank: int, device: PacedDevice) -> None:
    """All that a rank does in a race is done and written."""
    race_off()
    made = folder / f".over-{rank}"
    made.write_text(json.dumps({"overslept": device.overslept}))
    made.rename(folder / f"over-{rank}")  # whoever sees it sees all of it


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def meet(told: dist.Store, key: str) -> None:
    """Wait until all ranks are here."""
    if told.add(f"{key}-count", 1) == WORKERS:
        told.set(key, "all")
    told.wait([key])
