"""Non-blocking SGD against the blocking methods: time to the same training loss, with eight learners.

    scripts/bench non-blocking [--data-sets fashion-mnist,cifar-10] [--models lenet-5,resnet-18] [--clusters one-2x,…]
                               [--seeds 3] [--finalists 1] [--jobs 2] [--data DIR] [--out DIR]
    scripts/bench non-blocking --final          held-out accuracy after the same number of samples
    scripts/bench non-blocking --processes      share of ideal and time to target on four real processes
    scripts/bench non-blocking --soak SECONDS   AD-PSGD on real processes with random delays: does it come to its end?

Virtual time. A batch is 8 mini-batches of 8 samples a learner; the paper's are of 32, but then a round of eight
learners would be 2,048 samples, and as many rounds too long for two cores. An all-reduce takes 5 % of a mini-batch; the
network is the same for all. Every method gets the same four learning rates of SGD with momentum 0.9, tuned in every
cell on seed 0; figures are medians over the seeds at the rate that was best, or at the best of several (--finalists).

CIFAR-10 is read from the folder --data, and left out when it is not there.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path

import torch
from parts.cells import STRAGGLERS, stragglers
from parts.comparison import Cell, Comparison, Result, Setting
from parts.races import PROCESS_SECONDS, processes, soak
from parts.trials import Judge, Trial, load, micro_batch_of, strategy_of

from paceline.backends.simulated import simulate
from paceline.errors import PacelineError

TOPOLOGIES = {  # how one is called in the tables: blocking, non-blocking; mini-batches are of 8
    "ring all-reduce": ("all-reduce:micro_batches=8@8", "non-blocking@8"),
    "D-PSGD, ring": ("d-psgd:micro_batches=8@8", "non-blocking:topology=d-psgd@8"),
    "MATCHA, ring, budget ½": ("matcha:micro_batches=8@8", "non-blocking:topology=matcha@8"),
}
ACCELERATED = ("matcha:micro_batches=8:momentum=acid@8", "non-blocking:topology=matcha:momentum=acid@8")  # in the end
COMM = 0.05  # of a mini-batch
CLUSTERS = [name for name in STRAGGLERS if name != "equal"]
RATES = (0.02, 0.04, 0.08, 0.16)
TASKS = {  # data and model: training loss to reach, samples of a training to the end
    ("fashion-mnist", "lenet-5"): (1.0, 180_000),
    ("cifar-10", "lenet-5"): (1.95, 60_000),
    ("fashion-mnist", "resnet-18"): (1.0, 30_000),
    ("cifar-10", "resnet-18"): (2.0, 30_000),
}
EVALUATE_EVERY, EVALUATED = 1536, 2000  # samples: three rounds of blocking learners; of those to learn from
MOST_SAMPLES = 80_000
LOST = (40_000, -2.2)  # the loss of guessing is 2.3; the first rounds of LeNet-5 hardly change it
FINAL_CLUSTER = "one-2x"
LONG_RUN = 2000.0  # mini-batches of a device of speed 1: a hundred rounds and more


def setting(options: argparse.Namespace) -> Setting:
    return Setting(
        cluster_of=lambda trial: stragglers(trial.cluster, trial.comm, trial.seed),
        judge_of=judge_of,
        as_trained=as_trained,
        rates=lambda cell: RATES,
        seeds=options.seeds,
        folders={"cifar-10": options.data},
        finalists=options.finalists,
    )


def judge_of(trial: Trial) -> Judge:
    loss, samples = TASKS[trial.data, trial.model]
    if trial.purpose == "final":
        return Judge("accuracy", inf, 10_000, EVALUATE_EVERY, samples, first=samples - 2 * EVALUATE_EVERY)
    return Judge("loss", -loss, EVALUATED, EVALUATE_EVERY, MOST_SAMPLES, lost=LOST)


def as_trained(trial: Trial) -> Trial:
    """Blocking learners make the same batches whatever their speeds: they are trained once, as equal ones."""
    if trial.strategy.startswith("non-blocking"):
        return trial
    return replace(trial, cluster="equal")


def compare(comparison: Comparison, options: argparse.Namespace) -> None:
    """One file for each task: they may be compared with different numbers of seeds."""
    for data, model in present(options):
        sections: list[str] = []
        sooner: dict[tuple[str, str], str] = {}
        for cluster in options.clusters:
            rows, factors = report_cell(comparison, Cell(model, "sgd", cluster, COMM, data))
            print("\n".join([f"\n## {data}, {model}", *rows]), flush=True)
            sections += rows
            sooner |= {(cluster, topology): factor for topology, factor in factors.items()}
        heading = (
            f"{HEADING}\n\n{data}, {model}: training loss {TASKS[data, model][0]:g}; {options.seeds} seeds, the best "
            f"{options.finalists} of the rates on seed 0 with all of them."
        )
        write(options.out / f"{data}-{model}.md", heading, overview(options.clusters, sooner), sections)


def present(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The tasks that were asked for and whose data are there."""
    found = []
    for data, model in TASKS:
        if data in options.data_sets and model in options.models:
            try:
                load(data, model, {"cifar-10": options.data}.get(data))
                found.append((data, model))
            except PacelineError as error:
                print(f"{data} with {model} is left out. {error}", flush=True)
    return found


def report_cell(comparison: Comparison, cell: Cell) -> tuple[list[str], dict[str, str]]:
    """The rows of a cell, and how many times sooner non-blocking is there in each topology."""
    rows = [
        f"\n### {STRAGGLERS[cell.cluster]}\n",
        "| topology | blocking: rate | time | samples | non-blocking: rate | time | samples | sooner | throughput |",
        "|---" * 9 + "|",
    ]
    factors = {}
    for topology, pair in TOPOLOGIES.items():
        blocking, ours = (comparison.method(cell, (strategy,)) for strategy in pair)
        factors[topology] = how_much_sooner(blocking, ours)
        faster = in_the_long_run(pair[1], cell.cluster) / in_the_long_run(pair[0], cell.cluster)
        rows.append(f"| {topology} | {told(blocking)} | {told(ours)} | {factors[topology]} | {faster:.2f}× |")
    return rows, factors


def told(result: Result) -> str:
    if result.seconds is None:
        return f"{result.lr:g} | not reached by every seed | –"
    return f"{result.lr:g} | {spread(result.by_seed, '.0f')} | {result.samples:.0f}"


def how_much_sooner(blocking: Result, ours: Result) -> str:
    """Seed by seed, because both then begin with the same model and the same order of the data."""
    if not blocking.by_seed or not ours.by_seed:
        return "–"
    return spread([a / b for a, b in zip(blocking.by_seed, ours.by_seed, strict=True)], ".2f", "×")


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median, and in brackets the least and the most."""
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}}–{max(values):{form}})"


@lru_cache
def in_the_long_run(strategy: str, cluster: str) -> float:
    """Samples a second, without gradients. Learners on a graph who are not beside a slow one get ahead of it in the
    first rounds; that helps the blocking ones in a short training, and no more in a long one."""
    run = simulate(
        strategy_of(strategy), stragglers(cluster, COMM, 0), micro_batch=micro_batch_of(strategy), seconds=LONG_RUN
    )
    return run.samples_applied / run.seconds


def overview(clusters: Sequence[str], sooner: dict[tuple[str, str], str]) -> list[str]:
    rows = ["| cluster | topology | sooner |", "|---" * 3 + "|"]
    for cluster in clusters:
        rows += [f"| {STRAGGLERS[cluster]} | {topology} | {sooner[cluster, topology]} |" for topology in TOPOLOGIES]
    return rows


def final(comparison: Comparison, options: argparse.Namespace) -> None:
    """Held-out accuracy after the same samples, beside all-reduce's: what leaving mini-batches out costs in the end."""
    sections = []
    for data, model in present(options):
        cell = Cell(model, "sgd", FINAL_CLUSTER, COMM, data)
        rows = [
            f"\n## {data}, {model}: {TASKS[data, model][1]:,} samples, {STRAGGLERS[FINAL_CLUSTER]}\n",
            "| method | rate | held-out accuracy | against all-reduce |",
            "|---" * 4 + "|",
        ]
        reference = None
        for strategy in (*(each for pair in TOPOLOGIES.values() for each in pair), *ACCELERATED):
            lr = best_in_the_end(comparison, cell, strategy)
            trials = [cell.trial(strategy, lr, seed, "final") for seed in range(options.seeds)]
            found = [each.score or 0.0 for each in comparison.outcomes(trials)]
            middle = statistics.median(found)
            reference = middle if reference is None else reference
            name, points = strategy.partition("@")[0], 100 * (middle - reference)
            rows.append(f"| {name} | {lr:g} | {spread(found, '.2%')} | {points:+.2f} points |")
        print("\n".join(rows), flush=True)
        sections += rows
        write(options.out / "final.md", FINAL_HEADING, [], sections)


def best_in_the_end(comparison: Comparison, cell: Cell, strategy: str) -> float:
    """The rate that was first at the training loss, or half of it: what is best at first may not be stood for long."""
    (_, first), *_ = comparison.tuned(cell, (strategy.replace(":momentum=acid", ""),))
    rates = (first, first / 2)
    outcomes = comparison.outcomes([cell.trial(strategy, lr, 0, "final") for lr in rates])
    scores = [each.score or 0.0 for each in outcomes]
    return max(zip(scores, rates, strict=True))[1]


HEADING = """# Non-blocking SGD against the blocking methods

How many times sooner non-blocking SGD is at the same training loss than the blocking method on the same topology, eight
learners, seed by seed. Medians over the seeds, least and most in brackets; times in mini-batches of a device of speed
1. `throughput`: how many times the samples a second it uses in a long run, without gradients."""
FINAL_HEADING = """# Held-out accuracy after the same number of samples

Every method at the rate at which it was first at the training loss on seed 0, or at half of it, whichever ends better
with that seed. The mean of the last three evaluations of a training, and of those the median over the seeds, least and
most in brackets."""


def write(file: Path, heading: str, summary: Sequence[str], sections: Sequence[str]) -> None:
    machine = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}. "
        "Virtual time: the machine's load does not matter."
    )
    file.write_text("\n".join([heading, "", machine, "", *summary, *sections, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--data-sets", type=names, default=["fashion-mnist", "cifar-10"])
    parser.add_argument("--models", type=names, default=["lenet-5", "resnet-18"])
    parser.add_argument("--clusters", type=names, default=CLUSTERS, help="of " + ", ".join(CLUSTERS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--finalists", type=int, default=1, help="rates that are tried with all seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/non-blocking"))
    parser.add_argument("--final", action="store_true", help="measure the accuracy in the end instead")
    parser.add_argument("--processes", action="store_true", help="measure real processes instead")
    parser.add_argument("--seconds", type=float, default=PROCESS_SECONDS, help="of each race of --processes")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="let AD-PSGD run for so long instead")
    options = parser.parse_args()
    if options.soak:
        soak(options.soak)
    elif options.processes:
        processes(options.seconds, options.seeds)
    else:
        with Comparison(options.out, options.jobs, setting(options)) as comparison:
            (final if options.final else compare)(comparison, options)


if __name__ == "__main__":
    main()
