"""Parameter servers on real processes: races, what one server process takes, and what happens when ranks die."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.launch.local import launch
from paceline.launch.roles import environment_of_servers
from paceline.launch.surroundings import new_run
from paceline.race.spec import RaceSpec
from paceline.record import read_events
from paceline.summary import account
from parts.races import raced, say_machine

SPEEDS = (1.0, 1.0, 0.5, 0.5, 1 / 3, 1 / 3)
STRATEGIES = ("bsp", "ssp", "dssp", "asp", "gssp")
GROUPS = 2
RANK = Path(__file__).with_name("serving_rank.py")
WAYS = ("echo", "asp")
TURNS, SERVED = 3, 2  # workers that keep one server busy


def processes(seconds: float, seeds: int) -> None:
    """Every strategy in the same race: share of ideal and time to target."""
    say_machine()
    print(f"{seeds} races of {seconds:g} s a strategy, digits, speeds {', '.join(f'{each:.2g}' for each in SPEEDS)}")
    specs = [
        RaceSpec(strategies=(name,), speeds=SPEEDS, seconds=seconds, servers=GROUPS if name == "gssp" else 1, lr=0.05)
        for name in STRATEGIES
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = raced(specs, seeds, Path(folder))
    print("\n| strategy | share of ideal | time to target, s | over ssp: samples |\n" + "|---" * 4 + "|")
    for strategy, results in found.items():
        ideal = [each["share_of_ideal"] for each in results]
        reached = ["–" if each["time_to_target"] is None else f"{each['time_to_target']:.1f}" for each in results]
        over = [a / b["share_of_ideal"] for a, b in zip(ideal, found["ssp"], strict=True)]
        shares = " ".join(f"{each:.3f}" for each in ideal)
        print(f"| {strategy} | {shares} | {' '.join(reached)} | {statistics.median(over):.2f}× |")


def serving() -> None:
    """Push and pull of 100 MB: messages alone, and a server that steps with what is pushed; in turns."""
    say_machine()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TURNS):
            for way in WAYS:
                found[way].append(one_server(way, Path(folder)))
    for way, each in found.items():
        rates = " ".join(f"{one['rate']:.0f}" for one in each)
        memory = max(one["memory"] for one in each)
        print(f"{way:6} MB a second, push and pull: {rates}; the server's memory, in models: {memory:.1f}")
    ratios = [served["rate"] / alone["rate"] for alone, served in zip(found["echo"], found["asp"], strict=True)]
    print(
        f"A server takes {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) of the transport's rate"
    )


def one_server(way: str, folder: Path) -> dict[str, float]:
    run = new_run(folder)
    command = [sys.executable, str(RANK), way, str(run / "found.json")]
    outcome = launch(command, SERVED + 1, run, environment=environment_of_servers(1), quiet=True)
    if not outcome.ok:
        raise SystemExit(f"{way}: {outcome.last_words}")
    found: dict[str, float] = json.loads((run / "found.json").read_text())
    return found


KINDS = ("SIGKILL of a worker", "SIGKILL of a group server", "SIGSTOP of a worker for 20 s")
FAULT_STRATEGIES = {"ssp": 1, "gssp": 2}
WORKERS, EPOCHS = 4, 40


def faults(kills: int) -> None:
    """Each fault at random moments: whether the run went on, the longest pause of a survivor, and the samples."""
    say_machine()
    print(
        "\n| strategy | fault | went on | longest pause, s | samples lost or used twice | accuracy |\n"
        + "|---" * 6
        + "|"
    )
    for strategy, servers in FAULT_STRATEGIES.items():
        for kind in ("none", *KINDS):
            if servers == 1 and "server" in kind:
                continue  # there is no other that could go on
            tries = [one_fault(strategy, servers, kind, seed) for seed in range(kills if kind != "none" else 1)]
            pauses = [each["pause"] for each in tries]
            print(
                f"| {strategy} | {kind} | {sum(each['ok'] for each in tries)} of {len(tries)} "
                f"| {statistics.median(pauses):.2f} ({min(pauses):.2f}–{max(pauses):.2f}) "
                f"| {' '.join(str(each['lost']) for each in tries)} "
                f"| {' '.join(format(each['accuracy'], '.3f') for each in tries)} |",
                flush=True,
            )


def one_fault(strategy: str, servers: int, kind: str, seed: int) -> dict[str, Any]:
    chance = random.Random(f"{strategy} {kind} {seed}")
    victim = chance.randrange(WORKERS) if "worker" in kind else WORKERS + chance.randrange(servers)
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder))
        found = run / "found.json"
        command = [sys.executable, str(RANK), f"train {strategy} {EPOCHS}", str(found)]
        killer = threading.Thread(target=strike, args=(run, victim, kind, 1.0 + 3.0 * chance.random()))
        if kind != "none":
            killer.start()
        outcome = launch(command, WORKERS + servers, run, environment=environment_of_servers(servers), quiet=True)
        if kind != "none":
            killer.join()
        events = read_events(run / "events")
        told = json.loads(found.read_text()) if found.exists() else {"accuracy": 0.0, "samples": 0}
    books = account(events)
    wanted = told["samples"]
    survivors = [rank for rank in range(WORKERS) if rank != victim]
    return {
        "ok": outcome.ok and bool(told["samples"]),
        "pause": max(longest_pause(events, rank) for rank in survivors),
        "lost": wanted - books.applied,
        "accuracy": told["accuracy"],
    }


def strike(run: Path, victim: int, kind: str, after: float) -> None:
    """Wait until the victim trains, and for so long; then strike."""
    record = run / "events" / f"rank-{victim:04d}.jsonl"
    deadline = time.monotonic() + 120
    pid = None
    while pid is None and time.monotonic() < deadline:
        time.sleep(0.05)
        if record.exists():
            for line in record.read_text().splitlines():
                if '"start"' in line:
                    pid = json.loads(line)["pid"]
    if pid is None:
        return
    time.sleep(after)
    os.kill(pid, signal.SIGSTOP if "STOP" in kind else signal.SIGKILL)
    if "STOP" in kind:
        time.sleep(20.0)
        os.kill(pid, signal.SIGCONT)


def longest_pause(events: list[dict[str, Any]], rank: int) -> float:
    """From the end of one micro-batch to the beginning of the next."""
    computed = [(event["t"], event["end"]) for event in events if event["kind"] == "compute" and event["rank"] == rank]
    return max((b[0] - a[1] for a, b in pairwise(computed)), default=0.0)
