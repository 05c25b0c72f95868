"""Real processes that are killed and stopped: does the run go on, with every sample once, and how long is the pause?

Every run is a line in `results/faults/outcomes.jsonl`; what is there is not run again."""

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
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from paceline.control.client import ControlClient
from paceline.errors import PacelineError
from paceline.launch.local import place_alone, run_ranks
from paceline.launch.roles import environment_of_servers
from paceline.launch.surroundings import address_on, new_run
from paceline.record import Event, read_events
from paceline.strategies import create
from paceline.summary import account
from parts.races import say_machine

RANK = Path(__file__).with_name("fault_rank.py")
OUTCOMES = Path(__file__).parents[1] / "results" / "faults" / "outcomes.jsonl"
WORKERS = 4
STRATEGIES = {
    "gssp": 2,
    "all-reduce": 0,
    "balanced": 0,
    "abs-sgd": 0,
    "non-blocking:mini_batches=4": 0,
    "non-blocking:topology=d-psgd:mini_batches=4": 0,
    "non-blocking:topology=matcha:mini_batches=4": 0,
    "adaptive-sgd:mega_batch=512": 0,
    "ssp": 1,
}
"""And how many servers each has."""
NONE, WORKER, RANK_0, SERVER, CONTROL = "nobody", "a worker", "rank 0", "a group server", "the control plane"
TWO, ALL_BUT_ONE, STOPPED = "two workers at once", "all workers but one", "a worker stopped for 20 s"
KINDS = (NONE, WORKER, RANK_0, SERVER, CONTROL, TWO, ALL_BUT_ONE, STOPPED)
EPOCHS = 6  # about five seconds
STOPPED_EPOCHS, STOPPED_SECONDS = 30, 20.0  # so that it comes back to a run that still goes on
HEARTBEAT_SECONDS = 2.0
EARLIEST, LATEST = 0.7, 2.7  # seconds after the last has started
AROUND = HEARTBEAT_SECONDS + 3.0  # seconds after a fault, in which a pause is its consequence


def measure(strategies: Sequence[str], kinds: Sequence[str], kills: int, minutes: float = inf) -> None:
    """Each kind of fault so often, at random moments. After so many minutes no run is begun any more."""
    say_machine()
    ends = time.monotonic() + 60 * minutes
    OUTCOMES.parent.mkdir(parents=True, exist_ok=True)
    done = {(each["strategy"], each["kind"], each["seed"]) for each in outcomes()}
    for kind in kinds:
        for seed in range(kills):
            for strategy in strategies:
                if time.monotonic() > ends or (strategy, kind, seed) in done:
                    continue
                if kind != SERVER or STRATEGIES[strategy] > 1:  # without another server nobody could go on
                    outcome = one_fault(strategy, kind, seed)
                    with OUTCOMES.open("a") as file:
                        file.write(json.dumps(outcome) + "\n")
                    print({each: outcome[each] for each in ("strategy", "kind", "seed", "ok", "pause")}, flush=True)
    show(strategies, kinds)


def outcomes() -> list[dict[str, Any]]:
    return [json.loads(line) for line in OUTCOMES.read_text().splitlines()] if OUTCOMES.exists() else []


def show(strategies: Sequence[str], kinds: Sequence[str]) -> None:
    """A table of all that was measured."""
    print("\n| strategy | who | went on | each sample once | pause, s: median, 90 %, longest | accuracy |")
    print("|---" * 6 + "|")
    found = outcomes()
    for strategy in strategies:
        for kind in kinds:
            tries = [each for each in found if (each["strategy"], each["kind"]) == (strategy, kind)]
            if tries:
                print(f"| `{strategy}` | {kind} | {row(tries)} |")


def row(tries: Sequence[dict[str, Any]]) -> str:
    went_on = [each for each in tries if each["ok"]]
    pauses = sorted(each["pause"] for each in went_on if each["pause"] is not None)
    told = "–"
    if pauses and tries[0]["kind"] != NONE:
        late = pauses[min(len(pauses) - 1, int(0.9 * len(pauses)))]
        told = f"{statistics.median(pauses):.2f}, {late:.2f}, {pauses[-1]:.2f}"
    scores = [each["accuracy"] for each in went_on]
    spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
    accuracy = f"{statistics.mean(scores):.3f} ± {spread:.3f}" if scores else "–"
    exact = sum(each["exact"] for each in went_on)
    return f"{len(went_on)} of {len(tries)} | {exact} of {len(went_on)} | {told} | {accuracy}"


# ---- one run


def one_fault(strategy: str, kind: str, seed: int) -> dict[str, Any]:
    servers, chance = STRATEGIES[strategy], random.Random(f"{strategy} {kind} {seed}")
    victims, moment = victims_of(kind, servers, chance), chance.uniform(EARLIEST, LATEST)
    epochs = STOPPED_EPOCHS if kind == STOPPED else EPOCHS
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder))
        found = run / "found.json"
        command = [sys.executable, str(RANK), strategy, str(epochs), str(seed), str(found)]
        beats = {"heartbeat_timeout": HEARTBEAT_SECONDS} if kind == STOPPED else {}
        ranks = WORKERS + servers
        with place_alone(ranks, run, environment=environment_of_servers(servers), **beats) as place:
            blow = Blow(run, ranks, victims, kind, moment)
            blow.start()
            outcome = run_ranks(command, place, quiet=True)
            blow.join()
            ledger = ledger_of(address_on(place.card), bytes.fromhex(place.card["secret"]), ranks)
        events, struck = read_events(run / "events"), blow.at - float(place.card["origin"])
        told = json.loads(found.read_text()) if found.exists() else {"accuracy": 0.0, "samples": 0}
        words = [] if found.exists() else [line for lines in outcome.last_words.values() for line in lines[-3:]]
    living = [rank for rank in range(WORKERS) if rank not in victims]
    return {
        "strategy": strategy,
        "kind": kind,
        "seed": seed,
        "ok": outcome.ok and bool(told["samples"]) and (kind == NONE or blow.at > 0),
        "exact": is_exact(strategy, events, ledger, told["samples"], living[0]),
        "pause": None if kind == NONE else max(pause(events, rank, struck, bool(servers)) for rank in living),
        "struck": struck,
        "accuracy": told["accuracy"],
        "ledger": ledger,
        "errors": account(events).errors,
        "words": words,
        "load": os.getloadavg()[0],
    }


def victims_of(kind: str, servers: int, chance: random.Random) -> list[int]:
    """Ranks; none for a run without a fault, and for the control plane."""
    if kind == SERVER:
        return [WORKERS + chance.randrange(servers)]
    if kind == RANK_0:
        return [0]
    return chance.sample(range(WORKERS), {WORKER: 1, STOPPED: 1, TWO: 2, ALL_BUT_ONE: WORKERS - 1}.get(kind, 0))


def ledger_of(address: tuple[str, int], secret: bytes, ranks: int) -> dict[str, Any]:
    """What became of the samples, as the control plane has it in the end."""
    with ControlClient(address, secret, ranks) as control:
        ledger: dict[str, Any] | None = control.status()["ledger"]
    return ledger or {}


def is_exact(strategy: str, events: list[Event], ledger: dict[str, Any], samples: int, rank: int) -> bool:
    """Whether every sample was used once or said to be discarded: by the ledger, and by the record of a rank that is
    left where that tells of everybody's samples."""
    if not ledger.get("complete") or ledger["used"] + ledger["discarded"] != samples or account(events).errors:
        return False
    if create(strategy).steps_alone:
        return True
    applied = sum(event["samples"] for event in events if event["kind"] == "applied" and event["rank"] == rank)
    return applied == int(ledger["used"])


def pause(events: Iterable[Event], rank: int, struck: float, served: bool) -> float:
    """How much longer than usual a rank that is left waited for its next round; for its next micro-batch if servers
    make the steps."""
    kinds = {"compute"} if served else {"applied", "step"}
    times = sorted(event["t"] for event in events if event["kind"] in kinds and event["rank"] == rank)
    gaps = list(pairwise(times))
    before = [b - a for a, b in gaps if b < struck]
    after = [b - a for a, b in gaps if b >= struck and a < struck + AROUND]
    return max(after, default=0.0) - (statistics.median(before) if before else 0.0)


class Blow(threading.Thread):
    """Strikes some time after all ranks have begun to train.

    Args:
        run: the run's folder.
        ranks: how many there are.
        victims: which of them are struck.
        kind: how, and whether it is the control plane instead.
        moment: seconds to wait.
    """

    def __init__(self, run: Path, ranks: int, victims: Sequence[int], kind: str, moment: float) -> None:
        super().__init__(daemon=True)
        self._records = [run / "events" / f"rank-{rank:04d}.jsonl" for rank in range(ranks)]
        self._victims, self._kind, self._moment = victims, kind, moment
        self.at = 0.0
        """`time.time()` of the blow."""

    def run(self) -> None:
        deadline = time.monotonic() + 120
        while len(pids := [pid for record in self._records for pid in pids_in(record)]) < len(self._records):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        if self._kind == NONE:
            return
        time.sleep(self._moment)
        struck = [pids[rank] for rank in self._victims] or control_planes(os.getpid())
        self.at = time.time()
        for pid in struck:
            os.kill(pid, signal.SIGSTOP if self._kind == STOPPED else signal.SIGKILL)
        if self._kind == STOPPED:
            time.sleep(STOPPED_SECONDS)
            for pid in struck:
                os.kill(pid, signal.SIGCONT)


def pids_in(record: Path) -> list[int]:
    """The rank's, if it has begun to train."""
    lines = record.read_text().splitlines(keepends=True) if record.exists() else []
    return [json.loads(line)["pid"] for line in lines[:20] if '"start"' in line and line.endswith("\n")]


def control_planes(parent: int) -> list[int]:
    """Children of a process that are a control plane."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                owner = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if owner == parent and b"paceline.control" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile
                continue
    if not found:
        raise PacelineError("There is no control plane to be killed.")
    return found
