"""What Paceline costs on equal workers: side by side with PyTorch DDP, and the driver alone.

    scripts/bench overhead [--rounds 7]

Two ranks on two cores, real compute, no sleeping, an MLP of a million parameters. DDP and the strategies take turns in
the same processes, so that a change of the machine's load hits all of them; the figure is the median of the ratios of
neighbouring turns. Beside it stands what it takes to be ready for the loss of a rank while nobody is lost: on the
rank's own thread to look around, to number collectives, to keep what was brought and what came of it, to tell how far
the run has come, with what the stopwatch itself takes; the two threads of a rank's line to the control plane
(heartbeats, leases); and the control plane's process, whose time all ranks share. The second part gives a loop of 5 ms
micro-batches to one rank: plain, with an all-reduce written by hand, and with Paceline; and it times the strategy and
its driver alone, without what the node does for them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from parts.fault_blows import control_planes
from parts.ranks import launch, own_control_plane
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.backends.collectives import CollectiveWork
from paceline.backends.driver import Driver
from paceline.backends.flat import Brought
from paceline.backends.lane import Flight, Lane
from paceline.backends.processes import ProcessNode
from paceline.control.client import ControlClient

MICRO_BATCH = 128
STEPS = 400  # long enough that the end of the data, where leases are short, weighs little
CONTENDERS = ("ddp", "all-reduce", "abs-sgd")


def million_parameters() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 784), nn.ReLU(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


def dataset(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 784, generator=generator)
    return TensorDataset(x, torch.randint(10, (samples,), generator=generator))


def train_ddp(data: TensorDataset) -> float:
    """Samples a second of this rank under DDP, as its documentation advises."""
    model = DistributedDataParallel(million_parameters(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data, batch_size=MICRO_BATCH, sampler=DistributedSampler(data, seed=0))
    dist.barrier()
    began = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return len(data) / (time.perf_counter() - began)


@dataclass
class Beside:
    """Processor seconds, so far, of what works beside the training for its safety."""

    threads: float
    control_plane: float

    @classmethod
    def now(cls) -> Beside:
        """Of this rank's line to the control plane; and of the control plane, if it is this rank's child."""
        lines = [each for each in threading.enumerate() if each.name.startswith("paceline-control")]
        threads = sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident or 0)) for each in lines)
        return cls(threads, sum(map(processor_seconds, control_planes(os.getpid()))) if dist.get_rank() == 0 else 0.0)

    def shares(self, before: Beside, seconds: float) -> tuple[float, float]:
        """Of the time of a rank."""
        ranks = dist.get_world_size()
        return (self.threads - before.threads) / seconds, (self.control_plane - before.control_plane) / seconds / ranks


def processor_seconds(pid: int) -> float:
    """Of another process: the kernel's clock of it, as clock_getcpuclockid(3) names it."""
    return time.clock_gettime((~pid << 3) | 2)


def train_paceline(strategy: str, data: TensorDataset, folder: Path) -> tuple[float, tuple[float, float]]:
    """Samples a second of all ranks together under Paceline, and what share of the time safety takes beside."""
    model = million_parameters()
    began, before = 0.0, Beside(0.0, 0.0)
    with paceline.Run(strategy, out=folder) as run:
        loader = run.loader(data, micro_batch=MICRO_BATCH, epochs=1)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)
        for x, y in loader:
            if not began:
                dist.barrier()
                began, before = time.perf_counter(), Beside.now()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        seconds = time.perf_counter() - began
        return len(data) / seconds, Beside.now().shares(before, seconds)


def readiness() -> tuple[Stopwatch, Stopwatch]:
    """Around all that a rank does to be ready for a loss; and around what is the collectives' own in it."""
    whole, inside = Stopwatch(), Stopwatch()
    for owner, name in (
        (ProcessNode, "look_around"),
        (ProcessNode, "tell_progress"),
        (Lane, "start"),
        (Lane, "arrived"),
        (Brought, "is_there"),
        (Brought, "let_go"),
        (ControlClient, "report_progress"),
    ):
        whole.around(owner, name)
    for name in ("launch", "wait", "poll"):
        inside.around(Flight, name)
    return whole, inside


def rank_main(rounds: int, out: Path) -> None:
    """One rank of two: all contenders in turn, several times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = dataset(MICRO_BATCH * STEPS * 2)
    lines = []
    whole, inside = readiness()
    for turn in range(rounds + 1):
        speeds = {}
        shares: dict[str, tuple[float, ...]] = dict.fromkeys(CONTENDERS, (0.0, 0.0, 0.0))
        for contender in CONTENDERS:
            dist.barrier()
            if contender == "ddp":
                speeds[contender] = train_ddp(data)
            else:
                own_control_plane(f"{turn}-{contender}")
                whole.seconds = inside.seconds = 0.0
                speeds[contender], beside = train_paceline(contender, data, out / "runs")
                shares[contender] = ((whole.seconds - inside.seconds) * speeds[contender] / len(data), *beside)
        if turn:  # the first is the warm-up
            lines.append(json.dumps({"speeds": list(speeds.values()), "shares": shares}))
    if dist.get_rank() == 0:
        (out / "turns.jsonl").write_text("\n".join(lines))
    dist.destroy_process_group()


def against_ddp(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as out:
        launch(__file__, ["--rank-of", out, "--rounds", str(rounds)], world_size=2)
        rows = [json.loads(line) for line in (Path(out) / "turns.jsonl").read_text().splitlines()]
    print(
        f"Two equal ranks, MLP of {sum(p.numel() for p in million_parameters().parameters()):,} parameters, "
        f"micro-batch {MICRO_BATCH}, {len(rows)} alternating turns"
    )
    for place, contender in enumerate(CONTENDERS):
        speeds = [row["speeds"][place] for row in rows]
        ratios = sorted(row["speeds"][place] / row["speeds"][0] for row in rows)
        print(
            f"  {contender:12} {statistics.median(speeds):9.0f} samples/s   of DDP: median "
            f"{statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}"
        )
    for contender in CONTENDERS[1:]:
        own, threads, service = (statistics.median(row["shares"][contender][part] for row in rows) for part in range(3))
        whole = statistics.median(sum(row["shares"][contender]) for row in rows)
        parts = f"{own:.2%} on its own thread, {threads:.2%} on others, {service:.2%} for the control plane"
        print(f"  {contender:12} ready for a loss: {whole:.2%} of a rank's time: {parts}")


class Stopwatch:
    """Adds up the time inside some methods, outermost calls only."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def around(self, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: object, **kwargs: object) -> object:
            self._depth += 1
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def micro_batch(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Five milliseconds of computing, then the step."""
    filler, until = torch.ones(64, 64), time.perf_counter() + 0.005
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    while time.perf_counter() < until:
        filler @ filler
    optimizer.step()


class ByHand(torch.optim.SGD):
    """What a synchronous loop has to do anyway, with torch alone: sum, all-reduce, mean, step."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        flat = torch.cat([p.grad.flatten() for p in parameters]) * 64
        dist.all_reduce(flat)
        flat /= 64 * dist.get_world_size()
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        super().step()


def driver_alone(rounds: int) -> None:
    """A 5 ms micro-batch on one rank: a plain loop, a loop with a hand-written all-reduce, and Paceline, in turns."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    data = TensorDataset(torch.randn(64 * 400, 256), torch.randint(10, (64 * 400,)))
    inside, whole = Stopwatch(), Stopwatch()
    for name in ("all_reduce", "apply", "look_ahead", "suspended", "spent", "waited", "now"):
        inside.around(ProcessNode, name)
    inside.around(CollectiveWork, "result")
    inside.around(CollectiveWork, "wait")
    whole.around(Driver, "give")
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", "by hand", "all-reduce", "abs-sgd")}
    driver: dict[str, list[float]] = {"all-reduce": [], "abs-sgd": []}
    with tempfile.TemporaryDirectory() as out:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _ in range(rounds):
            for name, kind in (("plain", torch.optim.SGD), ("by hand", ByHand)):
                optimizer = kind(model.parameters(), lr=0.01)
                began = time.perf_counter()
                for batch in DataLoader(data, batch_size=64, shuffle=True):
                    micro_batch(model, optimizer, *batch)
                seconds[name].append((time.perf_counter() - began) / 400)
            for name in driver:
                inside.seconds = whole.seconds = began = 0.0
                with paceline.Run(name, out=out) as run:
                    loader = run.loader(data, micro_batch=64, epochs=1)
                    wrapped = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
                    for batch in loader:
                        began = began or time.perf_counter()
                        micro_batch(model, wrapped, *batch)
                    seconds[name].append((time.perf_counter() - began) / 399.5)
                driver[name].append((whole.seconds - inside.seconds) / 400)
        dist.destroy_process_group()
    print("One rank, micro-batches of 5 ms and a step after each, MLP of 68,362 parameters")
    for name, each in seconds.items():
        added = statistics.median(mine / hand - 1 for mine, hand in zip(each, seconds["by hand"], strict=True))
        print(f"  {name:12} {statistics.median(each) * 1e3:.3f} ms a micro-batch, {added:+.1%} of the loop by hand")
    for name, each in driver.items():
        alone = statistics.median(each)
        print(f"  {name:12} strategy and driver alone: {alone * 1e6:.0f} µs, {alone / 0.005:.2%} of 5 ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank-of", type=Path)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rounds, arguments.rank_of)
        return
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
    against_ddp(arguments.rounds)
    driver_alone(max(3, arguments.rounds // 2))


if __name__ == "__main__":
    main()
