"""Parameter servers on real processes: races, and what one server process takes."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from math import inf
from pathlib import Path

from paceline.launch.local import launch
from paceline.launch.roles import environment_of_servers
from paceline.launch.surroundings import new_run
from paceline.race.spec import RaceSpec
from parts.races import raced, say_machine

SPEEDS = (1.0, 1.0, 0.5, 0.5, 1 / 3, 1 / 3)
STRATEGIES = ("bsp", "ssp", "dssp", "asp", "gssp")
GROUPS = 3  # as many as there are classes of speed
RATES = (0.05, 0.1, 0.2, 0.4)
TUNING_SEEDS, TUNING_SECONDS = 3, 10.0
MICRO_BATCH_SECONDS = 0.02
RANK = Path(__file__).with_name("serving_rank.py")
WAYS = ("echo", "asp:delay_cure=none", "asp")  # with its cures workers compute, too, on the same cores
TURNS, SERVED = 3, 2  # workers that keep one server busy


def processes(seconds: float, seeds: int) -> None:
    """Every strategy in the same race, each at its own best rate of the grid: share of ideal and time to target."""
    say_machine()
    print(f"{seeds} races of {seconds:g} s a strategy, digits, speeds {', '.join(f'{each:.2g}' for each in SPEEDS)}")
    specs = [
        RaceSpec(
            strategies=(name,),
            speeds=SPEEDS,
            seconds=seconds,
            servers=GROUPS if name == "gssp" else 1,
            micro_batch_seconds=MICRO_BATCH_SECONDS,
        )
        for name in STRATEGIES
    ]
    with tempfile.TemporaryDirectory() as folder:
        best = [replace(spec, lr=best_rate(spec, Path(folder))) for spec in specs]
        found = raced(best, seeds, Path(folder))
    print("\n| strategy | rate | share of ideal | time to target, s | over ssp: samples |\n" + "|---" * 5 + "|")
    for spec, (strategy, results) in zip(best, found.items(), strict=True):
        ideal = [each["share_of_ideal"] for each in results]
        reached = ["–" if each["time_to_target"] is None else f"{each['time_to_target']:.1f}" for each in results]
        over = [a / b["share_of_ideal"] for a, b in zip(ideal, found["ssp"], strict=True)]
        shares = " ".join(f"{each:.3f}" for each in ideal)
        print(f"| {strategy} | {spec.lr:g} | {shares} | {' '.join(reached)} | {statistics.median(over):.2f}× |")


def best_rate(spec: RaceSpec, folder: Path) -> float:
    """Of the grid, by the median time to the target in virtual time."""
    times = dict[float, float]()
    for lr in RATES:
        found = raced([replace(spec, lr=lr, backend="simulated", seconds=TUNING_SECONDS)], TUNING_SEEDS, folder)
        times[lr] = statistics.median(each["time_to_target"] or inf for each in found[spec.strategies[0]])
    print(f"{spec.strategies[0]}, virtual time, median of {TUNING_SEEDS} seeds by rate: {times}", flush=True)
    return min(times, key=times.__getitem__)


def serving() -> None:
    """Push and pull of 100 MB: messages alone, and servers that step with what is pushed; in turns."""
    say_machine()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TURNS):
            for way in WAYS:
                found[way].append(one_server(way, Path(folder)))
    for way, each in found.items():
        rates = " ".join(f"{one['rate']:.0f}" for one in each)
        memory = max(one["memory"] for one in each)
        ratios = [served["rate"] / alone["rate"] for alone, served in zip(found["echo"], each, strict=True)]
        part = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) of the transport's"
        print(f"{way}: {rates} MB a second, push and pull, {part}; the server's memory, in models: {memory:.1f}")


def one_server(way: str, folder: Path) -> dict[str, float]:
    run = new_run(folder)
    command = [sys.executable, str(RANK), way, str(run / "found.json")]
    outcome = launch(command, SERVED + 1, run, environment=environment_of_servers(1), quiet=True)
    if not outcome.ok:
        raise SystemExit(f"{way}: {outcome.last_words}")
    found: dict[str, float] = json.loads((run / "found.json").read_text())
    return found
