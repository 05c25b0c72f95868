"""GSSP against BSP, SSP, DSSP and ASP: time to target, accuracy at equal samples, what compressors send and cost.

    scripts/bench gssp [--tasks lenet,resnet,seq2seq] [--methods bsp@8,…] [--seeds 3] [--jobs 2] [--data DIR]
                       [--out benchmarks/results/gssp]
    scripts/bench gssp --final        held-out accuracy after the same samples: groups, exchanges, compressors, bytes
    scripts/bench gssp --processes    share of ideal and time to target, six real processes and their servers
    scripts/bench gssp --serving      what one server process takes of what the transport alone reaches, 100 MB

What kills and stops do to it: scripts/bench faults --strategies gssp,ssp.

Virtual time unless it says processes. Sixteen workers in four classes of times 1 : 1.5 : 2 : 3, micro-batches of 8, a
push and a pull take 5 % of a micro-batch of the fastest. Every method gets the same learning rates of SGD with momentum
0.9 (AdamW for translation), tuned in every cell on seed 0; figures are medians over the seeds at the best rate.

CIFAR-10 and Multi30k are read from the folder --data, and left out when they are not there.
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
from parts.cells import four_classes
from parts.comparison import Cell, Comparison, Result, Setting
from parts.serving import processes, serving
from parts.trials import Judge, Trial, load, micro_batch_of, sent_bytes, strategy_of

from paceline.backends.simulated import simulate
from paceline.errors import PacelineError
from paceline.race.spec import with_servers

COMM = 0.05  # of a micro-batch
CLUSTER = "four classes"
PLAIN = ("bsp@8", "ssp:delay_cure=none@8", "dssp:delay_cure=none@8")  # as their authors have them
CURED = ("ssp@8", "dssp@8")  # with what gssp has against lateness: the baselines may have it too
METHODS = ("bsp@8", *CURED, "asp@8", "gssp@8", *PLAIN[1:], "gssp --paper@8")
OURS, ANSWERED = "gssp@8", (*PLAIN, *CURED)
ASKED = ("bsp@8", "gssp@8", "gssp:compress=gdtopk@8", "gssp:compress=gdtopk:direction=speed@8")  # by all seeds
FINAL = (
    *ASKED,
    "asp@8",
    "ssp@8",
    "gssp:exchange=gradient@8",
    "gssp:exchange=global@8",
    "gssp --paper@8",
    "gssp:compress=top-k@8",
)
MOST_SAMPLES = 60_000
LOST = (20_000, 0.15)  # of any of the metrics, after so many samples: it has diverged, or never began
LONG_RUN = 600.0  # micro-batches of a device of speed 1
WARM_UP_EPOCHS, EPOCHS = 5, 7  # of GDTopK, whose ratio falls in the first five


@dataclass(frozen=True)
class Task:
    """Data and model, how they are optimised and judged; `samples` of a training to the end, of which `every` so many
    lie between two evaluations."""

    data: str
    model: str
    optimizer: str
    rates: tuple[float, ...]
    target: float
    evaluated: int
    samples: int
    every: int = 1536


TASKS = {
    "lenet": Task("fashion-mnist", "lenet-5", "sgd", (0.02, 0.04, 0.08, 0.16), 0.80, 2000, 84_000),
    "resnet": Task("cifar-10", "resnet-18", "sgd", (0.02, 0.04, 0.08, 0.16), 0.35, 1000, 40_000),
    "seq2seq": Task("multi30k", "seq2seq", "adamw", (0.008, 0.016, 0.032), 0.30, 200, 20_000, 384),
}


def setting(options: argparse.Namespace) -> Setting:
    return Setting(
        cluster_of=lambda trial: four_classes(trial.comm, trial.seed),
        judge_of=judge_of,
        as_trained=lambda trial: trial,
        rates=lambda cell: task_of(cell.data, cell.model).rates,
        seeds=options.seeds,
        folders={task.data: options.data for task in TASKS.values() if task.data != "fashion-mnist"},
    )


def task_of(data: str, model: str) -> Task:
    return next(task for task in TASKS.values() if (task.data, task.model) == (data, model))


def judge_of(trial: Trial) -> Judge:
    task = task_of(trial.data, trial.model)
    if trial.purpose == "final":
        samples = task.samples
        first = samples - 2 * task.every
        return Judge("accuracy", inf, 10_000, task.every, samples, first=first, epoch=samples // EPOCHS)
    return Judge("accuracy", task.target, task.evaluated, task.every, MOST_SAMPLES, lost=LOST)


def present(options: argparse.Namespace) -> list[Task]:
    """The tasks that were asked for and whose data are there."""
    found = []
    for name in options.tasks:
        task = TASKS[name]
        try:
            load(task.data, task.model, None if task.data == "fashion-mnist" else options.data)
            found.append(task)
        except PacelineError as error:
            print(f"{task.data} with {task.model} is left out. {error}", flush=True)
    return found


def compare(comparison: Comparison, options: argparse.Namespace) -> None:
    """One file for each task: they may be compared with different methods."""
    for task in present(options):
        cell = Cell(task.model, task.optimizer, CLUSTER, COMM, task.data)
        results = {method: comparison.method(cell, (method,)) for method in options.methods}
        rows = [
            f"\n## {task.data}, {task.model}, {task.optimizer}: held-out metric {task.target:g}\n",
            "| method | rate | time to target | samples | gssp is sooner | throughput over ssp |",
            "|---" * 6 + "|",
            *(row(method, result, results[OURS]) for method, result in results.items()),
        ]
        best = min(results[method].seconds or inf for method in ANSWERED if method in results)
        ours = results[OURS].seconds or inf
        rows.append(f"\ngssp is {best / ours:.2f} times sooner than the best of bsp, ssp and dssp.")
        print("\n".join(rows), flush=True)
        write(options.out / f"{task.data}-{task.model}.md", "# GSSP against BSP, SSP, DSSP and ASP", rows)


def row(method: str, result: Result, ours: Result) -> str:
    name = method.partition("@")[0]
    faster = in_the_long_run(method) / in_the_long_run("ssp@8")
    if not result.by_seed:
        return f"| {name} | {result.lr:g} | not reached by every seed | – | – | {faster:.2f}× |"
    sooner = "–"
    if ours.by_seed:
        sooner = spread([a / b for a, b in zip(result.by_seed, ours.by_seed, strict=True)], ".2f", "×")
    times = spread(result.by_seed, ".0f")
    return f"| {name} | {result.lr:g} | {times} | {result.samples:.0f} | {sooner} | {faster:.2f}× |"


def in_the_long_run(method: str) -> float:
    """Samples a second, without gradients."""
    strategy = strategy_of(method)
    cluster = with_servers(four_classes(COMM, 0), strategy, None)
    run = simulate(strategy, cluster, micro_batch=micro_batch_of(method), seconds=LONG_RUN)
    return run.samples_applied / run.seconds


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median, and in brackets the least and the most."""
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}}–{max(values):{form}})"


def final(comparison: Comparison, options: argparse.Namespace) -> None:
    """Held-out accuracy after the same samples; every method at the rate at which its kind was first at the target.
    Those that are only shown beside have one seed."""
    for task in present(options):
        cell = Cell(task.model, task.optimizer, CLUSTER, COMM, task.data)
        epoch = task.samples // EPOCHS
        rows = [
            f"\n## {task.data}, {task.model}: {EPOCHS} epochs of {epoch:,} samples\n",
            f"| method | rate | held-out metric | against bsp | pushed after epoch {WARM_UP_EPOCHS}, of dense |",
            "|---" * 5 + "|",
        ]
        reference = None
        for method in options.finals:
            kind = method if method in METHODS else OURS
            (_, lr), *_ = comparison.tuned(cell, (kind,))
            seeds = options.seeds if method in ASKED else 1
            trials = [cell.trial(method, lr, seed, "final") for seed in range(seeds)]
            scores = [each.score or 0.0 for each in comparison.outcomes(trials)]
            middle = statistics.median(scores)
            reference = middle if reference is None else reference
            sent = "100 %"
            if "compress" in method:
                folder, cluster = comparison.setting.folders.get(task.data), four_classes(COMM, 0)
                sent = f"{sent_bytes(trials[0], cluster, folder, epoch, (WARM_UP_EPOCHS, EPOCHS)):.2%}"
            points = f"{100 * (middle - reference):+.2f} points"
            rows.append(f"| {method.partition('@')[0]} | {lr:g} | {spread(scores, '.2%')} | {points} | {sent} |")
            print(rows[-1], flush=True)
        write(options.out / f"final-{task.data}-{task.model}.md", "# Held-out metric after the same samples", rows)


def write(file: Path, heading: str, sections: Sequence[str]) -> None:
    machine = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}. "
        "Virtual time: the machine's load does not matter. Medians over the seeds, least and most in brackets; times "
        "in micro-batches of a device of speed 1."
    )
    file.write_text("\n".join([heading, "", machine, *sections, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", type=lambda text: text.split(","), default=list(TASKS), help="of " + ", ".join(TASKS)
    )
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=list(METHODS), help="of " + ", ".join(METHODS)
    )
    parser.add_argument(
        "--finals", type=lambda text: text.split(","), default=list(FINAL), help="of --final: " + ", ".join(FINAL)
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of CIFAR-10 and Multi30k")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gssp"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each race of --processes")
    for mode, what in (
        ("final", "accuracy in the end"),
        ("processes", "real processes"),
        ("serving", "one server process"),
    ):
        parser.add_argument(f"--{mode}", action="store_true", help=f"measure {what} instead")
    options = parser.parse_args()
    if options.processes:
        processes(options.seconds, options.seeds)
    elif options.serving:
        serving()
    else:
        with Comparison(options.out, options.jobs, setting(options)) as comparison:
            (final if options.final else compare)(comparison, options)


if __name__ == "__main__":
    main()
