"""Adaptive SGD against elastic averaging, CROSSBOW, all-reduce, ABS-SGD and local SGD on sparse data: time to P@1.

    scripts/bench adaptive [--tasks eurlex,generated] [--clusters near,far] [--seeds 3] [--jobs 2] [--data DIR]
                           [--out benchmarks/results/adaptive]
    scripts/bench adaptive --settling     updates and batches of every worker, merge by merge, without gradients

Virtual time: four workers, micro-batches of 32 or 8, plain SGD (the paper's), an all-reduce takes 5 % of a micro-batch
of 32 of the fastest. Every method gets the same learning rates, tuned in every cell on seed 0 together with its
options; figures are medians over the seeds at what was best.

EURLex-4K is read from the folder --data, and left out when it is not there. The other rows are generated.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch
from parts.comparison import Cell, Comparison, Result, Setting
from parts.trials import Judge, Trial, load, micro_batch_of, strategy_of

from paceline.backends.simulated import simulate
from paceline.errors import PacelineError
from paceline.record import MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network

COMM = 0.05  # of a micro-batch
CLUSTERS = {"near": (1.0, 0.92, 0.85, 0.75), "far": (1.0, 1.0, 0.5, 0.25)}
SIZES = (32, 8)  # of micro-batches
STEPS = (8, 32)  # of a worker, between two merges
METHODS = {
    "adaptive-sgd": tuple(
        f"adaptive-sgd:overlap:momentum={momentum}:mega_batch={4 * steps * size}@{size}"
        for steps in STEPS
        for size in SIZES
        for momentum in (0.0, 0.9)
    ),
    "adaptive-sgd --paper": tuple(
        f"adaptive-sgd:paper:mega_batch={4 * steps * size}@{size}" for steps in STEPS for size in SIZES
    ),
    "elastic-averaging": tuple(f"elastic-averaging:steps={steps}@{size}" for steps in STEPS for size in SIZES),
    "crossbow": tuple(f"crossbow@{size}" for size in SIZES),
    "all-reduce": tuple(f"all-reduce@{size}" for size in SIZES),
    "abs-sgd": tuple(f"abs-sgd@{size}" for size in SIZES),
    "local-sgd": tuple(f"local-sgd:steps={steps}@{size}" for steps in STEPS for size in SIZES),
    "local-sgd:by_speed": tuple(f"local-sgd:by_speed:steps={steps}@{size}" for steps in STEPS for size in SIZES),
}
OURS = "adaptive-sgd"
RATES = (0.1, 0.3, 1.0, 3.0)
EVALUATE_EVERY = 1024
MERGES = 60  # of --settling


@dataclass(frozen=True)
class Task:
    """Rows, the P@1 to reach, held-out rows that judge it, and samples after which a trial ends in any case."""

    data: str
    target: float
    evaluated: int
    most: int


TASKS = {
    "eurlex": Task("xmc", 0.50, 1000, 160_000),
    "generated": Task("xmc-generated:like=eurlex-4k:scale=0.1", 0.35, 381, 40_000),
}


def cluster_of(trial: Trial) -> Cluster:
    """Four workers whose all-reduce takes `comm` micro-batches of the fastest."""
    speeds, part = CLUSTERS[trial.cluster], micro_batch_of(trial.strategy) / 32
    return Cluster.from_speeds(
        speeds,
        micro_batch_seconds=part,
        jitter=LogNormal(0.05),
        network=Network(latency=trial.comm / (2 * (len(speeds) - 1))),
        seed=trial.seed,
    )


def task_of(data: str) -> Task:
    return next(task for task in TASKS.values() if task.data == data)


def judge_of(trial: Trial) -> Judge:
    task = task_of(trial.data)
    return Judge("accuracy", task.target, task.evaluated, EVALUATE_EVERY, task.most)


def setting(options: argparse.Namespace) -> Setting:
    return Setting(
        cluster_of=cluster_of,
        judge_of=judge_of,
        as_trained=lambda trial: trial,
        rates=lambda cell: RATES,
        seeds=options.seeds,
        folders={"xmc": options.data},
    )


def present(options: argparse.Namespace) -> list[Task]:
    """The tasks that were asked for and whose data are there."""
    found = []
    for name in options.tasks:
        task = TASKS[name]
        try:
            load(task.data, "sparse-mlp", options.data if task.data == "xmc" else None)
            found.append(task)
        except PacelineError as error:
            print(f"{task.data} is left out. {error}", flush=True)
    return found


def compare(options: argparse.Namespace) -> None:
    comparison = Comparison(options.out, options.jobs, setting(options))
    sections: list[str] = []
    for task in present(options):
        for name in options.clusters:
            cell = Cell("sparse-mlp", "sgd", name, COMM, task.data)
            results = {method: comparison.method(cell, METHODS[method]) for method in options.methods}
            speeds = ", ".join(f"{speed:g}" for speed in CLUSTERS[name])
            rows = [
                f"\n## {task.data}, speeds {speeds}: P@1 {task.target:g}\n",
                "| method | at its best, @ micro-batch | rate | time to target | samples | adaptive-sgd is sooner |",
                "|---" * 6 + "|",
                *(row(method, result, results.get(OURS)) for method, result in results.items()),
            ]
            print("\n".join(rows), flush=True)
            sections += rows
            write(options.out / "comparison.md", sections)


def row(method: str, result: Result, ours: Result | None) -> str:
    best = f"`{result.strategy}`"
    if not result.by_seed:
        return f"| {method} | {best} | {result.lr:g} | not reached by every seed | – | – |"
    sooner = "–"
    if ours is not None and ours.by_seed:
        sooner = spread([a / b for a, b in zip(result.by_seed, ours.by_seed, strict=True)], ".2f", "×")
    return f"| {method} | {best} | {result.lr:g} | {spread(result.by_seed, '.0f')} | {result.samples:.0f} | {sooner} |"


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median, and in brackets the least and the most."""
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}}–{max(values):{form}})"


def write(file: Path, sections: Sequence[str]) -> None:
    machine = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}. "
        "Virtual time: the machine's load does not matter. Medians over the seeds, least and most in brackets; times "
        "in micro-batches of 32 of a device of speed 1."
    )
    file.write_text("\n".join(["# Adaptive SGD against other methods on sparse data", "", machine, *sections, ""]))


def settling(options: argparse.Namespace) -> None:
    """How many updates each worker makes between two merges, and of how many samples: micro-batches of 1024."""
    for name in options.clusters:
        speeds = CLUSTERS[name]
        for options_of in ("", ":rule=release", ":overlap"):
            strategy = f"adaptive-sgd:mega_batch={100 * 1024}{options_of}"
            recorder = MemoryRecorder()
            cluster = Cluster.from_speeds(speeds, micro_batch_seconds=1.0)
            seconds = MERGES * 25 * len(speeds) / sum(speeds)
            run = simulate(strategy_of(strategy), cluster, micro_batch=1024, seconds=seconds, recorder=recorder)
            print(f"\n{strategy}, speeds {speeds}, share of ideal {run.share_of_ideal:.3f}")
            updates, batches, spreads = [0] * len(speeds), [0] * len(speeds), list[float]()
            for event in recorder.events:
                rank = event["rank"]
                if event["kind"] == "compute":
                    updates[rank], batches[rank] = updates[rank] + 1, event["samples"]
                elif event["kind"] == "applied" and rank == 0:
                    spreads.append(max(updates) / max(1, min(updates)) - 1)
                    if event["round"] in (0, 1, 2, 5, 10, 20, 40, MERGES - 2):
                        print(f"  merge {event['round']}: updates {updates}, batches {batches}")
                    updates = [0] * len(speeds)
            settled = next((n for n in range(len(spreads)) if max(spreads[n:-2], default=inf) < 0.08), None)
            print(f"  updates are within 8 % of each other from merge {settled} on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(text: str) -> list[str]:
        return text.split(",")

    for option, choices in (("tasks", TASKS), ("clusters", CLUSTERS), ("methods", METHODS)):
        parser.add_argument(f"--{option}", type=names, default=list(choices), help="of " + ", ".join(choices))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of EURLex-4K")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adaptive"))
    parser.add_argument("--settling", action="store_true", help="updates and batches instead, without gradients")
    options = parser.parse_args()
    (settling if options.settling else compare)(options)


if __name__ == "__main__":
    main()
