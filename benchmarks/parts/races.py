"""Races on four real processes: blocking and non-blocking side by side, and AD-PSGD for as long as one likes."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.race.race import run_race
from paceline.race.spec import RaceSpec
from paceline.record import read_events
from paceline.summary import account

WORKERS = 4
PROCESS_SECONDS = 20.0
PAIRS = {
    "all-reduce:micro_batches=8": "non-blocking",
    "d-psgd:micro_batches=8": "non-blocking:topology=d-psgd",
    "matcha:micro_batches=8": "non-blocking:topology=matcha",
}
SPEEDS = {
    "one 2× slow": (1.0, 1.0, 1.0, 0.5),
    "one 4× slow": (1.0, 1.0, 1.0, 0.25),
    "half 2× slow": (1.0, 1.0, 0.5, 0.5),
}
RANDOM_JITTER = "each 6× slow with probability 1/8 a round", '{kind = "slow-rounds", factor = 6.0, probability = 0.125}'
HEAVY_JITTER = '{kind = "pareto", shape = 1.5}'  # of infinite variance: now and then one is away for seconds
DEVICES = """micro_batch_seconds = 0.02
[[devices]]
count = {workers}
jitter = {jitter}
"""


def processes(seconds: float, seeds: int) -> None:
    """Each pair in the same race, over several seeds: share of ideal, time to target, and how many times better."""
    say_machine()
    print(
        f"{seeds} races of {seconds:g} s a strategy, digits, mini-batches of 4 that take 20 ms at speed 1", flush=True
    )
    strategies = tuple(strategy for pair in PAIRS.items() for strategy in pair)
    with tempfile.TemporaryDirectory() as folder:
        places: dict[str, dict[str, Any]] = {name: {"speeds": speeds} for name, speeds in SPEEDS.items()}
        name, jitter = RANDOM_JITTER
        places[name] = {"cluster": cluster_file(Path(folder), jitter)}
        for name, place in places.items():
            found = raced([RaceSpec(strategies=strategies, seconds=seconds, **place)], seeds, Path(folder))
            show(name, found)


def raced(specs: Sequence[RaceSpec], seeds: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The results of each strategy, seed by seed. Every seed goes through all races before the next, so that a machine
    that gets slower does so for all."""
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for spec in specs:
            for result in run_race(replace(spec, seed=seed), folder)["results"]:
                found.setdefault(result["strategy"], []).append(result)
    return found


def show(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n#### {name}, {WORKERS} processes, load {os.getloadavg()[0]:.2f}\n")
    print("| strategy | share of ideal | time to target | over blocking: samples | time |\n" + "|---" * 5 + "|")
    for blocking, ours in PAIRS.items():
        for strategy in (blocking, ours):
            results = found.get(strategy, [])
            ideal = " ".join(f"{each['share_of_ideal']:.3f}" for each in results)
            reached = " ".join(
                "–" if each["time_to_target"] is None else f"{each['time_to_target']:.1f}" for each in results
            )
            better = " | "
            if strategy == ours:
                more = median_ratio(found, (ours, blocking), "share_of_ideal")
                better = f"{more} | {median_ratio(found, (blocking, ours), 'time_to_target')}"
            print(f"| {strategy} | {ideal} | {reached} | {better} |", flush=True)


def median_ratio(found: dict[str, list[dict[str, Any]]], pair: tuple[str, str], field: str) -> str:
    """Of two strategies, seed by seed."""
    upper, lower = (found.get(strategy, []) for strategy in pair)
    if len(upper) != len(lower) or not all(each[field] for each in (*upper, *lower)):
        return "–"
    return f"{statistics.median(a[field] / b[field] for a, b in zip(upper, lower, strict=True)):.2f}×"


def soak(seconds: float) -> None:
    """AD-PSGD with random delays for so long: that it ended, what every worker did, and where the samples went."""
    say_machine()
    with tempfile.TemporaryDirectory() as folder:
        file = cluster_file(Path(folder), HEAVY_JITTER)
        began = time.monotonic()
        run_race(RaceSpec(strategies=("ad-psgd",), cluster=file, seconds=seconds), Path(folder))
        print(f"A race of {seconds:g} s came to its end after {time.monotonic() - began:.0f} s in all.")
        (events,) = Path(folder).glob("race/*/ad-psgd/events")
        happened = read_events(events)
    rounds = Counter(event["rank"] for event in happened if event["kind"] == "step")
    print("Rounds of each worker: " + ", ".join(str(rounds[rank]) for rank in range(WORKERS)))
    books = account(happened)
    print(
        f"Samples computed {books.computed} = applied {books.applied} + discarded {books.discarded}"
        f" + in flight {books.in_flight}; errors: {'; '.join(books.errors) or 'none'}"
    )


def cluster_file(folder: Path, jitter: str) -> str:
    file = folder / "cluster.toml"
    file.write_text(DEVICES.format(workers=WORKERS, jitter=jitter))
    return str(file)


def say_machine() -> None:
    print(
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.2f}"
    )
