"""What giving up an unwanted mini-batch costs and saves: between layers, when it is through, or not at all.

    scripts/bench abort [--seconds 10] [--turns 3]

Four real processes, non-blocking SGD, batches of eight mini-batches, a model of twelve layers that take a device of
speed 1 one millisecond each forward and two backward (they sleep, and a slower device sleeps longer). The three ways
take turns in the same processes; figures are ratios of neighbouring turns. Then what looking for the signal costs a
model that computes: LeNet-5, with the hooks of `run.abortable()` and without, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from parts.ranks import launch, own_control_plane
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.run.giving_up import Abortable
from paceline.workloads import load

WAYS = {  # how it is called: strategy, whether the loop is abortable
    "between layers": ("non-blocking", True),
    "when it is through": ("non-blocking", False),
    "never: it is finished and counts": ("non-blocking:unfinished=finish", False),
}
SPEEDS = {
    "one 4× slow": (1.0, 1.0, 1.0, 0.25),
    "half 2× slow": (1.0, 1.0, 0.5, 0.5),
    "each 6× slow with probability 1/8 a round": (1.0, 1.0, 1.0, 1.0),
}
SLOW_DOWN, PROBABILITY = 6.0, 1 / 8
LAYERS, LAYER_SECONDS, MINI_BATCH = 12, 0.001, 4
PASSES = 200


class Sleep(torch.autograd.Function):
    """Hands a tensor on after a while, and its gradient after twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # of its own arguments
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layer(nn.Module):
    """A linear layer on a slow device."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16) + 0.01 * torch.randn(16, 16))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = Sleep.apply(x, self._seconds())  # type: ignore[no-untyped-call]
        return slept @ self.weight


def train(way: str, cluster: str, seconds: float, folder: Path) -> float:
    """Samples a second that were used."""
    strategy, abortable = WAYS[way]
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(lambda: layer_seconds(cluster, run)) for _ in range(LAYERS)))
    data = TensorDataset(torch.randn(4096, 16), torch.randint(16, (4096,)))
    with paceline.Run(strategy, out=folder) as run:
        loader = run.loader(data, micro_batch=MINI_BATCH, seconds=seconds)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for x, y in loader:
            with run.abortable() if abortable else nullcontext():
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return run.node.samples_applied / seconds


def layer_seconds(cluster: str, run: paceline.Run) -> float:
    """Of this rank in the round under way: the same for every way."""
    seconds = LAYER_SECONDS / SPEEDS[cluster][run.rank]
    if cluster.startswith("each") and Random(f"{run.rank} {run.node.rounds}").random() < PROBABILITY:
        return SLOW_DOWN * seconds
    return seconds


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for turn in range(options.turns):
        for cluster in SPEEDS:
            for way in WAYS:
                dist.barrier()
                own_control_plane(f"{turn}-{cluster}-{way}")
                used = train(way, cluster, options.seconds, options.rank_of / "runs")
                found.append({"cluster": cluster, "way": way, "used": used})
    if dist.get_rank() == 0:
        (options.rank_of / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def saved(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as out:
        given = ["--rank-of", out, "--seconds", str(options.seconds), "--turns", str(options.turns)]
        launch(__file__, given, world_size=4)
        found = json.loads((Path(out) / "found.json").read_text())
    print("\n| | given up | samples a second used | over giving up never |\n|---|---|---:|---:|")
    for cluster in SPEEDS:
        used = {way: [x["used"] for x in found if (x["cluster"], x["way"]) == (cluster, way)] for way in WAYS}
        *_, never = used.values()
        for way, each in used.items():
            ratios = [a / b for a, b in zip(each, never, strict=True)]
            told = f"{statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})"
            print(f"| {cluster} | {way} | {statistics.median(each):.0f} | {told} |")


def cost_of_looking() -> None:
    torch.set_num_threads(1)
    workload = load("fashion-mnist", None, "lenet-5")
    model = workload.build_model(0)
    batch = workload.train[:32]

    def seconds(micro_batch: Callable[[], Any]) -> float:
        began = time.perf_counter()
        with micro_batch():
            workload.loss(model, batch).backward()
        return time.perf_counter() - began

    ratios, plain = [], []
    for turn in range(PASSES):
        abortable = Abortable(model, lambda: False)
        first = seconds(abortable.micro_batch) if turn % 2 else None
        abortable.remove()
        plain.append(seconds(nullcontext))
        abortable = Abortable(model, lambda: False)
        ratios.append((first or seconds(abortable.micro_batch)) / plain[-1])
        abortable.remove()
    print(
        f"\nLooking for the signal inside a pass of {statistics.median(plain) * 1e3:.1f} ms (LeNet-5, 32 samples): "
        f"{statistics.median(ratios) - 1:+.1%}, the median of {PASSES} pairs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank_main(options)
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, torch {torch.__version__}, {platform.system()}")
    saved(options)
    cost_of_looking()


if __name__ == "__main__":
    main()
