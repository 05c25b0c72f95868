"""Real processes that are struck: does the run go on, with every sample once, and how long is the pause?

Every run is a line in `results/faults/outcomes.jsonl`; what is there is not run again."""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from paceline.control.client import ControlClient
from paceline.errors import PacelineError
from paceline.launch.local import Launch, Place, place_alone
from paceline.launch.roles import environment_of_servers
from paceline.launch.surroundings import address_on, new_run
from paceline.race.links import reason_against
from paceline.record import Event, read_events
from paceline.run.checkpoint import read_latest
from paceline.strategies import create
from paceline.summary import account
from parts.fault_blows import FIFTH, FULL, KINDS, NONE, NOTICE, SERVER, WORKERS, Blow, small_disk, victims_of
from parts.forked import ForkedRanks, Zygote
from parts.races import say_machine

OUTCOMES = Path(__file__).parents[1] / "results" / "faults" / "outcomes.jsonl"
STRATEGIES = {
    "all-reduce": 0,
    "balanced": 0,
    "abs-sgd": 0,
    "non-blocking:mini_batches=4": 0,
    "non-blocking:topology=d-psgd:mini_batches=4": 0,
    "non-blocking:topology=matcha:mini_batches=4": 0,
    "gssp": 2,
    "adaptive-sgd:mega_batch=512": 0,
}
"""And how many servers each has."""
AROUND = 3.0  # seconds after a loss is found, in which a pause is its consequence


Strike = Callable[[str, str, int], dict[str, Any]]


def measure(strike: Strike, strategies: Sequence[str], kinds: Sequence[str], tries: int, minutes: float = inf) -> None:
    """Each kind of fault so often, at random moments. After so many minutes no run is begun any more."""
    say_machine()
    ends = time.monotonic() + 60 * minutes
    OUTCOMES.parent.mkdir(parents=True, exist_ok=True)
    done = {(each["strategy"], each["kind"], each["seed"]) for each in outcomes()}
    for kind in kinds:
        for seed in range(tries):
            for strategy in strategies:
                if time.monotonic() > ends or (strategy, kind, seed) in done or why_not(strategy, kind):
                    continue
                outcome = strike(strategy, kind, seed)
                with OUTCOMES.open("a") as file:
                    file.write(json.dumps(outcome) + "\n")
                shown = ("strategy", "kind", "seed", "ok", "exact", "pause", "found_in", "back_in", "words")
                print({each: outcome[each] for each in shown}, flush=True)
    for kind in kinds:
        for strategy in strategies:
            if why_not(strategy, kind):
                print(f"Not with {strategy}: {kind}: {why_not(strategy, kind)}")


def why_not(strategy: str, kind: str) -> str:
    """Why a strategy is not struck in that way, or an empty string."""
    if kind == SERVER and STRATEGIES[strategy] < 2:
        return "without another server nobody could go on"
    if kind not in KINDS:
        return reason_against()
    return "a small disk needs root" if kind == FULL and os.geteuid() else ""


def outcomes() -> list[dict[str, Any]]:
    return [json.loads(line) for line in OUTCOMES.read_text().splitlines()] if OUTCOMES.exists() else []


# ---- one run


def one_fault(zygote: Zygote, strategy: str, kind: str, seed: int) -> dict[str, Any]:
    servers, chance, way = STRATEGIES[strategy], random.Random(f"{strategy} {kind} {seed}"), KINDS[kind]
    victims = victims_of(kind, servers, chance)
    with tempfile.TemporaryDirectory() as folder:
        run = new_run(Path(folder))
        with (
            small_disk(run / "checkpoints") if kind == FULL else nullcontext(),
            place_alone(WORKERS + servers, run, environment=environment_of_servers(servers), **way.terms) as place,
        ):
            ranks = ForkedRanks(
                zygote, place, [strategy, way.epochs, seed, str(run / "found.json"), way.saves], way.replace
            )
            records = [run / "events" / f"rank-{rank:04d}.jsonl" for rank in place.ranks]
            blow = Blow(ranks, records, victims, kind, chance)
            outcome, ledger = watch(ranks, place, blow)
            events = read_events(run / "events")
            told = found_in(run)
            told |= {"whole": is_whole(run / "checkpoints")} if way.saves else {}
            told |= {"stayed": blow.hit} if kind == FIFTH else {}
            words = ranks.last_words(outcome) if not told["samples"] or not outcome.ok else []
    living = [rank for rank in range(WORKERS) if rank not in victims]
    struck = blow.at - float(place.card["origin"])
    return {
        "strategy": strategy,
        "kind": kind,
        "seed": seed,
        "ok": outcome.ok and bool(told["samples"]) and did_as_promised(kind, outcome, victims, events, told),
        "hit": blow.hit and (kind == NONE or blow.at > 0),
        "exact": is_exact(strategy, events, ledger, told["samples"], living[0]),
        "pause": None
        if kind == NONE
        else max(pause(events, rank, struck, bool(servers), way.window) for rank in living),
        "found_in": first_after(events, "lost", victims, struck),
        "back_in": first_after(events, "start", victims, struck),
        "accuracy": told["accuracy"],
        "ledger": ledger,
        "errors": account(events).errors,
        "words": words,
        "load": os.getloadavg()[0],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }


def watch(ranks: ForkedRanks, place: Place, blow: Blow) -> tuple[Launch, dict[str, Any]]:
    """What comes of it, and of the samples, as the control plane has it in the end."""
    secret = bytes.fromhex(place.card["secret"])
    with ControlClient(address_on(place.card), secret, place.world_size) as control:
        blow.start()
        try:
            outcome = ranks.watch(control)
        finally:
            blow.over.set()
            ranks.end_all()
            blow.join()
        ledger: dict[str, Any] | None = control.status()["ledger"]
    return outcome, ledger or {}


def found_in(run: Path) -> dict[str, Any]:
    """What whoever led in the end has written."""
    path = run / "found.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"accuracy": 0.0, "samples": 0}
    return found


def is_whole(checkpoints: Path) -> bool:
    try:
        return read_latest(checkpoints) is not None
    except PacelineError:
        return False


def did_as_promised(
    kind: str, outcome: Launch, victims: Sequence[int], events: list[Event], told: dict[str, Any]
) -> bool:
    """What is promised beside that the run goes on."""
    if kind == NOTICE:
        return outcome.left == list(victims) and outcome.exit_code(victims[0]) == 0
    if kind == FULL:
        warned = any("could not be written" in event.get("text", "") for event in events if event["kind"] == "warning")
        return bool(told["whole"]) and warned
    if kind == FIFTH:
        return bool(told["stayed"]) and any(each["kind"] == "compute" and each["rank"] in victims for each in events)
    return bool(told.get("whole", True))


def is_exact(strategy: str, events: list[Event], ledger: dict[str, Any], samples: int, rank: int) -> bool:
    """Whether every sample was used once or said to be discarded: by the ledger, and by the record of a rank that is
    left where that tells of everybody's samples."""
    if not ledger.get("complete") or ledger["used"] + ledger["discarded"] != samples or account(events).errors:
        return False
    if create(strategy).steps_alone:
        return True
    applied = sum(event["samples"] for event in events if event["kind"] == "applied" and event["rank"] == rank)
    return applied == int(ledger["used"])


def pause(events: Iterable[Event], rank: int, struck: float, served: bool, window: float) -> float:
    """How much longer than usual a rank that is left waited for its next round; for its next micro-batch if servers
    make the steps."""
    kinds = {"compute"} if served else {"applied", "step"}
    times = sorted(event["t"] for event in events if event["kind"] in kinds and event["rank"] == rank)
    gaps = list(pairwise(times))
    before = [b - a for a, b in gaps if b < struck]
    after = [b - a for a, b in gaps if b >= struck and a < struck + window + AROUND]
    return max(after, default=0.0) - (statistics.median(before) if before else 0.0)


def first_after(events: Iterable[Event], kind: str, victims: Sequence[int], struck: float) -> float | None:
    """Seconds from the blow to the first event of a kind about the last of those who were struck."""
    first = {
        event["rank"]: event["t"] - struck
        for event in reversed(list(events))
        if event["kind"] == kind and event["rank"] in victims and event["t"] > struck
    }
    return max(first.values(), default=None)
