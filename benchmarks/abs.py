"""ABS-SGD against the blocking methods: time to target, share of the limit, and what the delay costs.

    scripts/bench abs [--models lenet-5,resnet-18] [--optimizers nesterov,adamw] [--clusters equal,a,b,c,d]
                      [--comm 0.05,0.5,2] [--seeds 5] [--jobs 2] [--traces DIR] [--out benchmarks/results/abs]
    scripts/bench abs --delay      samples to target: synchronous, and one round late with each cure
    scripts/bench abs --speed      share of ideal on real processes, speeds 1, 1, ½, ¼

Fashion-MNIST in virtual time, four workers, micro-batches of 32. Every method gets the same grid of learning rates and,
but for those shown beside, of micro-batches (local SGD one of local steps too), tuned in every cell on seed 0; figures
are medians over the seeds at the rate that was best. DDP is all-reduce here: these models fit into its first bucket, so
it cannot overlap communication with the backward pass.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from parts.cells import CLUSTERS, cluster_of
from parts.comparison import Cell, Comparison, Setting
from parts.trials import MICRO_BATCH, Judge, Trial, micro_batch_of

from paceline.race.race import run_race
from paceline.race.spec import RaceSpec
from paceline.rules.limit import Fit, Limit, fit, limit, split
from paceline.simulator.cluster import Cluster

RATES = {"nesterov": (0.02, 0.04, 0.08, 0.16), "adamw": (0.001, 0.002, 0.004, 0.008)}
TARGETS = {"lenet-5": 0.80, "resnet-18": 0.75}
EVALUATE_EVERY, EVALUATED = 1500, 1000  # samples; held-out samples
MOST_SAMPLES = 60_000
LOST = (15_000, 0.2)  # accuracy after so many samples: it has diverged, or never began
OURS = "abs-sgd"
CURES = ("anticipate", "acco", "extrapolate", "none")
SPEED_STRATEGIES = ("all-reduce", "balanced", "abs-sgd --paper", "abs-sgd")
SPEED_RUNS, SPEED_SECONDS, LONG_MICRO_BATCH = 3, 20.0, 0.2
METHODS = {  # how a method is called in the tables: among what it is tuned; @8 is a micro-batch of 8 instead of 32
    "all-reduce (DDP)": ("all-reduce", "all-reduce@8"),
    "balanced": ("balanced", "balanced@8"),
    "local-sgd": ("local-sgd:steps=4", "local-sgd:steps=16", "local-sgd:steps=4@8", "local-sgd:steps=16@8"),
    "local-sgd by speed": (
        "local-sgd:steps=4:by_speed",
        "local-sgd:steps=16:by_speed",
        "local-sgd:steps=4:by_speed@8",
        "local-sgd:steps=16:by_speed@8",
    ),
    "rennala": ("rennala",),
    "abs-sgd --paper": ("abs-sgd --paper",),
    OURS: ("abs-sgd", "abs-sgd@8"),
}
BASELINES = tuple(METHODS)[:4]


SMALLER_TOO = {  # cells in which abs-sgd is tuned over micro-batches of 8 too, beside LeNet-5 with Nesterov momentum
    ("lenet-5", "adamw", "c", 0.05),
    ("resnet-18", "adamw", "equal", 0.05),
    ("resnet-18", "adamw", "a", 0.05),
    ("resnet-18", "adamw", "d", 0.05),
    ("resnet-18", "adamw", "c", 2.0),
    ("resnet-18", "nesterov", "c", 2.0),
}


def grid(method: str, cell: Cell) -> tuple[str, ...]:
    """Among what it is tuned there. Trials with micro-batches of 8 take long: ours are left out, with AdamW and with
    ResNet-18, nearly everywhere where it was the first without them."""
    smaller = (cell.model, cell.optimizer) == ("lenet-5", "nesterov")
    smaller = smaller or (cell.model, cell.optimizer, cell.cluster, cell.comm) in SMALLER_TOO
    return METHODS[method][:1] if method == OURS and not smaller else METHODS[method]


def setting(options: argparse.Namespace) -> Setting:
    def cluster(trial: Trial) -> Cluster:
        part = micro_batch_of(trial.strategy) / MICRO_BATCH
        return cluster_of(trial.cluster, trial.comm, trial.seed, options.traces, part)

    def judge(trial: Trial) -> Judge:
        return Judge("accuracy", TARGETS[trial.model], EVALUATED, EVALUATE_EVERY, MOST_SAMPLES, lost=LOST)

    return Setting(cluster, judge, as_trained, lambda cell: RATES[cell.optimizer], options.seeds)


def as_trained(trial: Trial) -> Trial:
    """The trial that is trained in its stead, because its batches are the same."""
    strategy = trial.strategy.replace("balanced", "all-reduce")
    if trial.cluster == "equal":
        strategy = strategy.replace(":by_speed", "")
    if strategy.startswith("all-reduce") or (strategy.startswith("local-sgd") and "by_speed" not in strategy):
        return replace(trial, strategy=strategy, cluster="equal", comm=0.5)
    return replace(trial, comm=0.5) if "by_speed" in strategy else trial


def fitted(comparison: Comparison, cell: Cell) -> Fit:
    """S_min and the noise scale, from synchronous training with two batches, each at its best rate."""
    points = []
    for strategy in METHODS["all-reduce (DDP)"]:
        batch = 4 * micro_batch_of(strategy)
        samples = []
        for seed in range(comparison.setting.seeds):
            found = [
                comparison.kept.get(as_trained(Trial(cell.model, cell.optimizer, strategy, lr, seed, "equal", 0.5)))
                for lr in RATES[cell.optimizer]
            ]
            samples += [min([each.samples for each in found if each and each.samples] or [0])]
        reached = [each for each in samples if each]
        if reached:
            points.append((float(batch), float(statistics.median(reached))))
    return fit(points)


def cell_limit(comparison: Comparison, cell: Cell, found: Fit) -> Limit:
    cluster = comparison.setting.cluster_of(cell.trial("all-reduce", 0.0, 0))
    speeds = [MICRO_BATCH / cluster.mean_seconds(rank) for rank in range(cluster.workers)]
    return limit(speeds, found.noise_scale, cell.comm)


def report_cell(
    comparison: Comparison, cell: Cell, methods: list[str]
) -> tuple[list[str], float | None, dict[str, float]]:
    """The rows of a cell, how many times sooner than the best baseline abs-sgd is there, and shares of the limit."""
    results = {name: comparison.method(cell, grid(name, cell)) for name in methods}
    found = fitted(comparison, cell)
    least = cell_limit(comparison, cell, found)
    times = [each.seconds for name, each in results.items() if name in BASELINES and each.seconds is not None]
    best, ours = min(times, default=None), results[OURS].seconds if OURS in results else None
    rows, shares = [], {}
    for name, each in results.items():
        if each.seconds is None or each.samples is None:
            rows.append(f"| {name} | {each.strategy} | {each.lr:g} | not reached by every seed |||||||")
            continue
        hardware = each.samples / (least.speed * each.seconds)
        parts = split(least, hardware=hardware, batch=each.batch, samples=each.samples, least_steps=found.least_steps)
        shares[name] = parts.share or 0.0
        low, high = min(each.by_seed), max(each.by_seed)
        rows.append(
            f"| {name} | {each.strategy} | {each.lr:g} | {each.seconds:.0f} ({low:.0f}–{high:.0f})"
            f" | {each.samples:.0f} | {each.batch:.0f} | {parts.share or 0:.2f} | {parts.hardware:.2f} |"
            f" {parts.batch:.2f} | {parts.statistics or 0:.2f} |"
        )
    sooner = best / ours if best is not None and ours is not None else None
    heading = (
        f"\n#### {cell.model}, {cell.optimizer}, cluster {cell.cluster}, communication {cell.comm:.0%}"
        f" — {f'{sooner:.2f}×' if sooner else 'not'} sooner than the best baseline"
        f" (S_min {found.least_steps:.0f}, noise scale {found.noise_scale:.0f}, B* {least.batch:.0f})\n"
    )
    columns = (
        "| method | options | rate | time to target | samples | batch | of limit | hardware | batch | statistics |"
    )
    return [heading, columns, "|" + "---|" * 10, *rows], sooner, shares


def compare(comparison: Comparison, options: argparse.Namespace) -> None:
    factors: dict[tuple[str, float], list[float]] = {}
    shares: dict[tuple[str, float], list[str]] = {}
    lines: list[str] = []
    for model in options.models:
        for optimizer in options.optimizers:
            for cluster in options.clusters:
                for comm in options.comm:
                    cell = Cell(model, optimizer, cluster, comm)
                    rows, sooner, of_limit = report_cell(comparison, cell, options.methods)
                    print("\n".join(rows), flush=True)
                    lines += rows
                    if sooner:
                        factors.setdefault((cluster, comm), []).append(sooner)
                        best = max(share for name, share in of_limit.items() if name in BASELINES)
                        shares.setdefault((cluster, comm), []).append(f"{of_limit[OURS]:.2f} ({best:.2f})")
    told = {place: [f"{each:.2f}×" for each in found] for place, found in factors.items()}
    summary = [*overview(options, told), means(options, factors)]
    summary += ["", "Share of the limit of the cell, in brackets the best baseline's:", "", *overview(options, shares)]
    (options.out / "comparison.md").write_text("\n".join([*machine(), "", *summary, *lines, ""]))
    print("\n".join(summary))


def overview(options: argparse.Namespace, found: dict[tuple[str, float], list[str]]) -> list[str]:
    """One row a cluster, one column for each communication."""
    rows = ["| cluster | " + " | ".join(f"communication {comm:.0%}" for comm in options.comm) + " |"]
    rows.append("|---" * (len(options.comm) + 1) + "|")
    for cluster in options.clusters:
        cells = [" ".join(found.get((cluster, comm), [])) for comm in options.comm]
        rows.append(f"| {cluster}: {CLUSTERS[cluster]} | " + " | ".join(cells) + " |")
    return rows


def means(options: argparse.Namespace, factors: dict[tuple[str, float], list[float]]) -> str:
    unequal = [name for name in options.clusters if name != "equal"]
    cells = []
    for comm in options.comm:
        all_here = [each for name in unequal for each in factors.get((name, comm), [])]
        cells.append(f"{statistics.mean(all_here):.2f}×" if all_here else "")
    return "| mean of the unequal | " + " | ".join(cells) + " |"


def delay(comparison: Comparison, options: argparse.Namespace) -> None:
    """Samples to target with the same batches, on equal workers: synchronous, and one round late with each cure."""
    print(f"| model, optimizer, rate | synchronous | {' | '.join(CURES)} |\n" + "|---" * (len(CURES) + 2) + "|")
    for model in options.models:
        for optimizer in options.optimizers:
            cell = Cell(model, optimizer, "equal", 0.5)
            (_, lr), *_ = comparison.tuned(cell, ("all-reduce",))
            strategies = [
                "all-reduce",
                *(f"abs-sgd:lr_rule=none:micro_batches=fixed:delay_cure={cure}" for cure in CURES),
            ]
            medians = []
            for strategy in strategies:
                outcomes = comparison.outcomes([cell.trial(strategy, lr, seed) for seed in range(options.seeds)])
                medians.append(statistics.median([each.samples or inf for each in outcomes]))
            told = [f"{each:.0f} ({each / medians[0]:.2f}×)" if each < inf else "not reached" for each in medians]
            print(f"| {model}, {optimizer}, {lr:g} | {' | '.join(told)} |", flush=True)


def speed(options: argparse.Namespace) -> None:
    """Share of ideal and of the limit on real processes, speeds 1, 1, ½, ¼; then with micro-batches as long as a large
    model's, which a round's cost of a millisecond or two weighs less against."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}; {SPEED_RUNS} races of {SPEED_SECONDS:g} s")
    for strategies, seconds in ((SPEED_STRATEGIES, None), (SPEED_STRATEGIES[2:], LONG_MICRO_BATCH)):
        spec = RaceSpec(
            strategies=strategies, speeds=(1.0, 1.0, 0.5, 0.25), seconds=SPEED_SECONDS, micro_batch_seconds=seconds
        )
        found: dict[str, list[dict[str, Any]]] = {}
        with tempfile.TemporaryDirectory() as out:
            for seed in range(SPEED_RUNS):
                for result in run_race(replace(spec, seed=seed), Path(out))["results"]:
                    found.setdefault(result["strategy"], []).append(result)
        print(f"micro-batches at speed 1: {'as short as the race makes them' if seconds is None else f'{seconds:g} s'}")
        for strategy, results in found.items():
            ideal = " ".join(f"{each['share_of_ideal']:.3f}" for each in results)
            to_target = " ".join(_or_dash(each["time_to_target"], ".1f") for each in results)
            of_limit = " ".join(_or_dash(each["limit"]["share"], ".2f") for each in results)
            print(f"{strategy:24} share of ideal {ideal}   to target {to_target} s   of limit {of_limit}", flush=True)


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def machine() -> list[str]:
    return [
        "# ABS-SGD against the blocking methods",
        "",
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}. "
        "Virtual time, in micro-batches of a device of speed 1; the machine's load does not matter.",
        "",
        "How many times sooner abs-sgd reaches the target than the best of all-reduce (DDP), balanced and local-sgd "
        "(equal steps or by speed), in the order of model and optimizer given below.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--models", type=names, default=list(TARGETS))
    parser.add_argument("--optimizers", type=names, default=list(RATES))
    parser.add_argument("--clusters", type=names, default=list(CLUSTERS))
    parser.add_argument("--comm", type=lambda text: [float(each) for each in text.split(",")], default=[0.05, 0.5, 2.0])
    parser.add_argument("--methods", type=names, default=list(METHODS), help="of " + ", ".join(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/abs"))
    parser.add_argument("--delay", action="store_true", help="measure what the delay costs instead")
    parser.add_argument("--speed", action="store_true", help="measure real processes instead")
    options = parser.parse_args()
    if options.speed:
        speed(options)
        return
    with Comparison(options.out, options.jobs, setting(options)) as comparison:
        (delay if options.delay else compare)(comparison, options)


if __name__ == "__main__":
    main()
