"""Adaptive SGD against elastic averaging, CROSSBOW, all-reduce, ABS-SGD and local SGD on sparse data: P@1 over time.

    scripts/bench adaptive [--tasks eurlex,generated] [--clusters far,near] [--seeds 3] [--sizes 32,8] [--steps 8,2]
                           [--data DIR] [--out benchmarks/results/adaptive]
    scripts/bench adaptive --processes [--rates 3,10] [--minutes 4]    the same methods on four real processes
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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import mean

import torch
from parts.curves import Curve, KeptCurves, Span, Tuned, learn, tuned
from parts.races import PROCESS_SECONDS, say_machine
from parts.trials import Trial, load, micro_batch_of, strategy_of

from paceline.backends.simulated import simulate
from paceline.errors import PacelineError
from paceline.race.race import run_race
from paceline.race.spec import RaceSpec
from paceline.record import Event, MemoryRecorder, read_events
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network

COMM = 0.05  # of a micro-batch
CLUSTERS = {"far": (1.0, 1.0, 0.5, 0.25), "near": (1.0, 0.92, 0.85, 0.75)}
VARIANTS = {
    "elastic-averaging": "elastic-averaging:steps={steps}",
    "adaptive-sgd": "adaptive-sgd:overlap:mega_batch={mega_batch}",
    "adaptive-sgd with momentum": "adaptive-sgd:overlap:momentum=0.5:mega_batch={mega_batch}",
    "abs-sgd": "abs-sgd",
    "all-reduce": "all-reduce",
    "crossbow": "crossbow",
    "crossbow without momentum": "crossbow:momentum=0",
    "adaptive-sgd --paper": "adaptive-sgd:paper:mega_batch={mega_batch}",
    "local-sgd": "local-sgd:steps={steps}",
    "local-sgd:by_speed": "local-sgd:by_speed:steps={steps}",
}
OURS, RIVAL = "adaptive-sgd", "elastic-averaging"
RATES = (0.3, 1.0, 3.0, 5.6, 10.0, 18.0, 30.0)
MERGES = 60  # of --settling
MICRO_BATCH_SECONDS = 0.06  # of a device of speed 1, on processes: many times what it computes here


@dataclass(frozen=True)
class Task:
    """Rows, and for how long they are learned in virtual time."""

    data: str
    span: Span


TASKS = {
    "eurlex": Task("xmc", Span(seconds=1000.0, evaluations=15, rows=1905)),
    "generated": Task("xmc-generated:like=delicious-200k:scale=0.03", Span(seconds=1000.0, evaluations=15, rows=1502)),
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
    """Real processes, every method at the same rates: what is not in the file yet is raced, for some minutes. The
    merge's own cost is what workers neither compute nor wait for others."""
    torch.set_num_threads(1)
    say_machine()
    kept, until = KeptCurves(options.out / "races.jsonl"), time.monotonic() + 60 * options.minutes
    for task in present(options):
        for name in options.clusters:
            wanted = [
                trial_of(task, name, variant, rate, seed, options)
                for seed in range(options.seeds)
                for rate in options.rates
                for method in options.methods
                for variant in variants(method, options)
            ]
            for trial in wanted:
                if kept.get(trial) is None and time.monotonic() < until:
                    kept.add(trial, race(trial, task, options))
            show_races(task, name, {trial: curve for trial in wanted if (curve := kept.get(trial))})


def trial_of(task: Task, cluster: str, strategy: str, rate: float, seed: int, options: argparse.Namespace) -> Trial:
    purpose = f"processes, {options.seconds:g} s"
    return Trial("sparse-mlp", "plain-sgd", strategy, rate, seed, cluster, 0.0, task.data, purpose)


def race(trial: Trial, task: Task, options: argparse.Namespace) -> Curve:
    spec = RaceSpec(
        strategies=(trial.strategy.partition("@")[0],),
        speeds=CLUSTERS[trial.cluster],
        workload=task.data,
        optimizer="plain-sgd",
        lr=trial.lr,
        seed=trial.seed,
        seconds=options.seconds,
        micro_batch_seconds=MICRO_BATCH_SECONDS,
        data=str(options.data),
    )
    with tempfile.TemporaryDirectory() as folder:
        (result,) = run_race(spec, Path(folder))["results"]
        (record,) = Path(folder).glob("race/*/*/events")
        happened = read_events(record)
    began = max(event["t"] for event in happened if event["kind"] == "start")
    seen = [
        (event["t"] - began, event["samples"], event["metric"])
        for event in sorted(happened, key=lambda event: event["t"])
        if event["kind"] == "metric"
    ]
    times, samples, scores = zip(*seen, strict=True)
    talking = mean(worker["communicating"] for worker in result["workers"])
    return Curve(times, samples, scores, result["share_of_ideal"], True, round(talking, 4), result["bytes_sent"])


def show_races(task: Task, cluster: str, found: dict[Trial, Curve]) -> None:
    """Every method at the rate at which it came furthest, over the seeds that were raced there."""
    by_setting: dict[tuple[str, float], list[Curve]] = {}
    for trial, curve in found.items():
        by_setting.setdefault((trial.strategy, trial.lr), []).append(curve)
    best = {
        strategy: max(
            (setting for setting in by_setting if setting[0] == strategy), key=lambda each: by_setting[each][0].best
        )
        for strategy, _ in by_setting
    }
    rivals = [setting for strategy, setting in best.items() if strategy.startswith(RIVAL)]
    level = max((statistics.median(each.best for each in by_setting[rival]) for rival in rivals), default=inf)
    print(f"\n## {task.data}, speeds {', '.join(f'{speed:g}' for speed in CLUSTERS[cluster])}, load {load_now()}\n")
    print(f"| method | rate | races | share of ideal | communicating | MB | best P@1 | last | time to {level:.3f}, s |")
    print("|---" * 9 + "|")
    for strategy, setting in best.items():
        curves = by_setting[setting]
        sent = statistics.median((curve.nbytes or 0) / 1e6 for curve in curves)
        reached = " ".join("–" if t is None else f"{t:.1f}" for t in (curve.time_to(level) for curve in curves))
        told = [curve.communicating for curve in curves if curve.communicating is not None]
        talking = spread(told, ".1%") if told else "–"
        print(
            f"| {strategy} | {setting[1]:g} | {len(curves)} | {spread([c.share_of_ideal for c in curves], '.3f')} "
            f"| {talking} | {sent:.0f} | {spread([c.best for c in curves], '.3f')} "
            f"| {spread([c.final for c in curves], '.3f')} | {reached} |",
            flush=True,
        )


def load_now() -> str:
    return f"{os.getloadavg()[0]:.1f}"


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
    print("| speeds | options | micro-batches | updates: first merge | last | batches | 5 % from | share of ideal |")
    print("|---" * 8 + "|")
    for name in options.clusters:
        speeds = CLUSTERS[name]
        for setting in ("", ":paper", ":rule=release", ":overlap"):
            for micro_batches in (100, 200):
                strategy = f"adaptive-sgd{setting}:mega_batch={micro_batches * 1024}"
                recorder, cluster = MemoryRecorder(), Cluster.from_speeds(speeds, micro_batch_seconds=1.0)
                seconds = MERGES * micro_batches / sum(speeds)
                run = simulate(strategy_of(strategy), cluster, micro_batch=1024, seconds=seconds, recorder=recorder)
                merges = updates_and_batches(recorder.events, len(speeds))[:-2]  # the last ones are cut short
                updates = [[made for made, _ in merge] for merge in merges]
                near = [max(each) / min(each) < 1.05 for each in updates]
                settled = next((n for n in range(len(near)) if all(near[n:])), "–")
                first, last, batches = (
                    " ".join(map(str, each)) for each in (updates[0], updates[-1], [size for _, size in merges[-1]])
                )
                print(
                    f"| {', '.join(f'{speed:g}' for speed in speeds)} | {setting} | {micro_batches} | {first} | {last} "
                    f"| {batches} | {settled} | {run.share_of_ideal:.3f} |",
                    flush=True,
                )


def updates_and_batches(events: Sequence[Event], ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """Of every merge and worker: how many updates it made, and of how many samples the last one was."""
    made: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    updates, batches = [0] * ranks, [0] * ranks
    for event in events:
        rank = event["rank"]
        if event["kind"] == "compute":
            updates[rank], batches[rank] = updates[rank] + 1, event["samples"]
        elif event["kind"] == "join":
            made[rank].append((updates[rank], batches[rank]))
            updates[rank] = 0
    return list(zip(*made, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(text: str) -> list[str]:
        return text.split(",")

    for option, choices in (("tasks", TASKS), ("clusters", CLUSTERS), ("methods", VARIANTS)):
        parser.add_argument(f"--{option}", type=names, default=list(choices), help="of " + ", ".join(choices))

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    def rates(text: str) -> list[float]:
        return [float(each) for each in text.split(",")]

    parser.add_argument("--sizes", type=numbers, default=[32], help="of micro-batches")
    parser.add_argument("--steps", type=numbers, default=[8], help="of a worker, between two merges")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of EURLex-4K")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adaptive"))
    parser.add_argument("--rates", type=rates, default=[3.0, 10.0], help="of --processes")
    parser.add_argument("--minutes", type=float, default=inf, help="of --processes: no race begins after so many")
    parser.add_argument("--seconds", type=float, default=PROCESS_SECONDS, help="of each race of --processes")
    parser.add_argument("--processes", action="store_true", help="real processes instead")
    parser.add_argument("--settling", action="store_true", help="updates and batches instead, without gradients")
    options = parser.parse_args()
    (processes if options.processes else settling if options.settling else compare)(options)


if __name__ == "__main__":
    main()
