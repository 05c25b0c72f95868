"""Adaptive SGD against elastic averaging, CROSSBOW, all-reduce, ABS-SGD and local SGD on sparse data: P@1 over time.

    scripts/bench adaptive [--tasks eurlex,generated] [--clusters far,near] [--seeds 3] [--sizes 32,8] [--steps 8,2]
                           [--data DIR] [--out benchmarks/results/adaptive]
    scripts/bench adaptive --processes    the same methods on four real processes, as they were tuned in virtual time
    scripts/bench adaptive --settling     updates and batches of every worker, merge by merge, without gradients

Virtual time: four workers, micro-batches of 32 or 8, plain SGD (the paper's), an all-reduce takes 5 % of a micro-batch
of 32 of the fastest. All methods train for the same time. Every method gets the same learning rates, tuned in every
cell on seed 0 together with its options, once for how far it comes and once for how soon it is where elastic averaging
was at its best; figures are medians over the seeds.

EURLex-4K is read from the folder --data, and left out when it is not there. The other rows are generated.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import mean

import torch
from parts.curves import Curve, KeptCurves, Span, Tuned, learn, tuned
from parts.races import PROCESS_SECONDS, raced, say_machine
from parts.trials import Trial, load, micro_batch_of, strategy_of

from paceline.backends.simulated import simulate
from paceline.errors import PacelineError
from paceline.race.spec import RaceSpec
from paceline.record import MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network

COMM = 0.05  # of a micro-batch
CLUSTERS = {"far": (1.0, 1.0, 0.5, 0.25), "near": (1.0, 0.92, 0.85, 0.75)}
VARIANTS = {
    "elastic-averaging": "elastic-averaging:steps={steps}",
    "adaptive-sgd": "adaptive-sgd:overlap:mega_batch={mega_batch}",
    "adaptive-sgd, momentum": "adaptive-sgd:overlap:momentum=0.5:mega_batch={mega_batch}",
    "abs-sgd": "abs-sgd",
    "all-reduce": "all-reduce",
    "crossbow": "crossbow",
    "crossbow without momentum": "crossbow:momentum=0",
    "adaptive-sgd --paper": "adaptive-sgd:paper:mega_batch={mega_batch}",
    "local-sgd": "local-sgd:steps={steps}",
    "local-sgd:by_speed": "local-sgd:by_speed:steps={steps}",
}
OURS, RIVAL = "adaptive-sgd", "elastic-averaging"
RATES = (0.3, 1.0, 3.0, 10.0, 30.0)
MERGES = 60  # of --settling


@dataclass(frozen=True)
class Task:
    """Rows, for how long they are learned, and the P@1 that races on processes go for."""

    data: str
    span: Span
    target: float


TASKS = {
    "eurlex": Task("xmc", Span(seconds=1500.0, evaluations=15, rows=3809), 0.6),
    "generated": Task(
        "xmc-generated:like=delicious-200k:scale=0.01", Span(seconds=200.0, evaluations=20, rows=1001), 0.6
    ),
}


def variants(method: str, options: argparse.Namespace) -> list[str]:
    """A method with all numbers of steps between two merges, where it has them, and all micro-batches."""
    return list(
        dict.fromkeys(
            VARIANTS[method].format(steps=steps, mega_batch=4 * steps * size) + f"@{size}"
            for steps in options.steps
            for size in options.sizes
        )
    )


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


def present(options: argparse.Namespace) -> list[Task]:
    """The tasks that were asked for and whose data are there."""
    found = []
    for name in options.tasks:
        task = TASKS[name]
        try:
            load(task.data, "sparse-mlp", options.data)
            found.append(task)
        except PacelineError as error:
            print(f"{task.data} is left out. {error}", flush=True)
    return found


def processes(options: argparse.Namespace) -> None:
    """Real processes: share of ideal, P@1 in the end, and when the target was reached. The merge's own cost
    is what workers neither compute nor wait for others."""
    torch.set_num_threads(1)
    say_machine()
    kept = KeptCurves(options.out / "runs.jsonl")
    for task in present(options):
        for name in options.clusters:
            cell = Cell(kept, task, name, options.data, 1)
            specs = [race_of(task, name, cell.tuned(variants(method, options)), options) for method in options.methods]
            with tempfile.TemporaryDirectory() as folder:
                found = raced(specs, options.seeds, Path(folder))
            print(f"\n## {task.data}, speeds {', '.join(f'{speed:g}' for speed in CLUSTERS[name])}\n")
            print(f"{options.seeds} races of {options.seconds:g} s a method, load {os.getloadavg()[0]:.1f}\n")
            print("| method | rate | share of ideal | P@1 in the end | time to target, s | communicating | MB sent |")
            print("|---" * 7 + "|")
            for spec, (strategy, results) in zip(specs, found.items(), strict=True):
                reached = " ".join(
                    "–" if t is None else f"{t:.1f}" for t in (each["time_to_target"] for each in results)
                )
                talking = [mean(worker["communicating"] for worker in each["workers"]) for each in results]
                print(
                    f"| {strategy} | {spec.lr:g} | {spread([each['share_of_ideal'] for each in results], '.3f')} "
                    f"| {spread([each['final_metric'] for each in results], '.3f')} | {reached} "
                    f"| {spread(talking, '.1%')} | {spread([each['bytes_sent'] / 1e6 for each in results], '.0f')} |",
                    flush=True,
                )


def race_of(task: Task, cluster: str, method: Tuned, options: argparse.Namespace) -> RaceSpec:
    strategy, rate = method.best()
    return RaceSpec(
        strategies=(strategy.partition("@")[0],),
        speeds=CLUSTERS[cluster],
        workload=task.data,
        optimizer="plain-sgd",
        lr=rate,
        seconds=options.seconds,
        target=task.target,
        data=str(options.data),
    )


class Cell:
    """One task on one cluster: what is not in the file yet is trained."""

    def __init__(self, kept: KeptCurves, task: Task, cluster: str, folder: Path, seeds: int) -> None:
        self._kept, self._task, self._cluster, self._folder, self._seeds = kept, task, cluster, folder, seeds

    def curve(self, strategy: str, rate: float, seed: int, beat: Curve | None = None) -> Curve:
        purpose = f"{self._task.span.seconds:g} s"
        trial = Trial("sparse-mlp", "plain-sgd", strategy, rate, seed, self._cluster, COMM, self._task.data, purpose)
        found = self._kept.get(trial)
        if found is None:
            found = learn(trial, cluster_of(trial), self._task.span, self._folder, beat)
            self._kept.add(trial, found)
            print(
                f"  {strategy} {rate:g}: {found.best:.3f}, in the end {found.final:.3f}"
                + ("" if found.ended else " given up"),
                flush=True,
            )
        return found

    def tuned(self, strategies: Sequence[str]) -> Tuned:
        return tuned(strategies, RATES, lambda strategy, rate, beat: self.curve(strategy, rate, 0, beat))

    def curves(self, setting: tuple[str, float]) -> list[Curve]:
        """Of all seeds."""
        return [self.curve(*setting, seed) for seed in range(self._seeds)]


def compare(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    kept, sections = KeptCurves(options.out / "runs.jsonl"), list[str]()
    for task in present(options):
        for name in options.clusters:
            cell = Cell(kept, task, name, options.data, options.seeds)
            rival = cell.tuned(variants(RIVAL, options))
            level = statistics.median(curve.best for curve in cell.curves(rival.best()))
            speeds = ", ".join(f"{speed:g}" for speed in CLUSTERS[name])
            rows = [
                f"\n## {task.data}, speeds {speeds}\n",
                f"For a time of {task.span.seconds:g}; and to {level:.3f}, elastic averaging's best.\n",
                "| method | best P@1 | in the end | share of ideal | with | time to that P@1 | over ours | with |",
                "|---|---|---|---:|---|---|---:|---|",
            ]
            ours = soonest(cell, cell.tuned(variants(OURS, options)), level)[1]
            for method in options.methods:
                rows.append(row(method, cell, cell.tuned(variants(method, options)), level, ours))
                print("\n".join(rows) if method == options.methods[-1] else rows[-1], flush=True)
            sections += rows
            write(options.out / "comparison.md", sections)


def soonest(cell: Cell, method: Tuned, level: float) -> tuple[tuple[str, float] | None, list[float]]:
    """The setting that reaches the level first, and when each seed does; none if one does not."""
    setting = method.soonest(level)
    times = [] if setting is None else [curve.time_to(level) for curve in cell.curves(setting)]
    return setting, [t for t in times if t is not None] if None not in times else []


def row(method: str, cell: Cell, found: Tuned, level: float, ours: Sequence[float]) -> str:
    best = found.best()
    curves = cell.curves(best)
    ideal = statistics.median(curve.share_of_ideal for curve in curves)
    setting, times = soonest(cell, found, level)
    scores = (spread([getattr(curve, at) for curve in curves], ".3f") for at in ("best", "final"))
    end = f"| {method} | {' | '.join(scores)} | {ideal:.3f} | {said(best)} |"
    if setting is None or not times:
        return f"{end} not reached by every seed | – | – |"
    over = f"{statistics.median(times) / statistics.median(ours):.2f}×" if ours else "–"
    return f"{end} {spread(times, '.0f')} | {over} | {said(setting)} |"


def said(setting: tuple[str, float]) -> str:
    return f"`{setting[0]}`, {setting[1]:g}"


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median, and in brackets the least and the most."""
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}}–{max(values):{form}})"


def write(file: Path, sections: Sequence[str]) -> None:
    machine = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}. "
        "Virtual time: the machine's load does not matter. Medians over the seeds, least and most in brackets; times "
        "in micro-batches of 32 of a device of speed 1. `with`: options @ micro-batch, learning rate."
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

    for option, choices in (("tasks", TASKS), ("clusters", CLUSTERS), ("methods", VARIANTS)):
        parser.add_argument(f"--{option}", type=names, default=list(choices), help="of " + ", ".join(choices))

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser.add_argument("--sizes", type=numbers, default=[32, 8], help="of micro-batches")
    parser.add_argument("--steps", type=numbers, default=[8, 2], help="of a worker, between two merges")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of EURLex-4K")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adaptive"))
    parser.add_argument("--seconds", type=float, default=PROCESS_SECONDS, help="of each race of --processes")
    parser.add_argument("--processes", action="store_true", help="real processes instead")
    parser.add_argument("--settling", action="store_true", help="updates and batches instead, without gradients")
    options = parser.parse_args()
    (processes if options.processes else settling if options.settling else compare)(options)


if __name__ == "__main__":
    main()
