"""What Paceline costs on equal workers: side by side with PyTorch DDP, and the driver alone.

    scripts/bench overhead [--rounds 7]

Two ranks on two cores, real compute, no sleeping, an MLP of a million parameters. DDP and the strategies take turns in
the same processes, so that a change of the machine's load hits all of them; the figure is the median of the ratios of
neighbouring turns. Beside it stands what it takes to be ready for the loss of a rank while nobody is lost: to look
around, to number collectives, to keep what was brought and what came of it, to tell how far the run has come; with what
the stopwatch itself takes. The second part gives a loop of 5 ms micro-batches to one rank: plain, with an all-reduce
written by hand, and with Paceline; and it times the strategy and its driver alone, without what the node does for them.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
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
STEPS = 150
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


def train_paceline(strategy: str, data: TensorDataset, folder: Path) -> float:
    """Samples a second of all ranks together under Paceline."""
    model = million_parameters()
    began = 0.0
    with paceline.Run(strategy, out=folder) as run:
        loader = run.loader(data, micro_batch=MICRO_BATCH, epochs=1)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model)
        for x, y in loader:
            if not began:
                dist.barrier()
                began = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return len(data) / (time.perf_counter() - began)


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
        shares = dict.fromkeys(CONTENDERS, 0.0)
        for contender in CONTENDERS:
            dist.barrier()
            if contender == "ddp":
                speeds[contender] = train_ddp(data)
            else:
                own_control_plane(f"{turn}-{contender}")
                whole.seconds = inside.seconds = 0.0
                speeds[contender] = train_paceline(contender, data, out / "runs")
                shares[contender] = (whole.seconds - inside.seconds) * speeds[contender] / len(data)
        if turn:  # the first is the warm-up
            lines.append(" ".join(map(str, [*speeds.values(), *shares.values()])))
    if dist.get_rank() == 0:
        (out / "speeds.txt").write_text("\n".join(lines))
    dist.destroy_process_group()


def against_ddp(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as out:
        launch(__file__, ["--rank-of", out, "--rounds", str(rounds)], world_size=2)
        rows = [[float(v) for v in line.split()] for line in (Path(out) / "speeds.txt").read_text().splitlines()]
    print(
        f"Two equal ranks, MLP of {sum(p.numel() for p in million_parameters().parameters()):,} parameters, "
        f"micro-batch {MICRO_BATCH}, {len(rows)} alternating turns"
    )
    for place, contender in enumerate(CONTENDERS):
        speeds = [row[place] for row in rows]
        ratios = sorted(row[place] / row[0] for row in rows)
        print(
            f"  {contender:12} {statistics.median(speeds):9.0f} samples/s   of DDP: median "
            f"{statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}"
        )
    for place, contender in list(enumerate(CONTENDERS, len(CONTENDERS)))[1:]:
        ready = statistics.median(row[place] for row in rows)
        print(f"  {contender:12} ready for a loss: {ready:.2%} of the time")


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
