"""What was measured of faults, as tables: for the terminal, and between two marks in `docs/membership.md`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts.fault_blows import KINDS, NONE, WORKER
from parts.fault_links import LINK_KINDS
from parts.fault_peers import OUTCOMES, PEERS
from parts.faults import STRATEGIES, outcomes

PAGE = Path(__file__).parents[2] / "docs" / "membership.md"
MARKED = re.compile(r"(<!-- faults: .*? -->\n).*?(<!-- /faults -->)", re.DOTALL)
BUSY = 4.0  # of two cores
LIBRARIES = {
    "ddp": "torchrun and DDP, all started again",
    "torchft": "torchft, its DDP",
    "torchft-by-hand": "torchft, gradients added up by hand",
    "hivemind": "hivemind",
}


def show() -> None:
    """Print what was measured, and put it into the page."""
    told = "\n".join([*by_strategy(outcomes()), "", *by_kind(outcomes()), "", *by_library(), ""])
    print(told)
    PAGE.write_text(MARKED.sub(lambda found: found[1] + told + found[2], PAGE.read_text()))


def by_strategy(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| strategy | SIGKILL of a worker: went on | each sample once | pause, s: median, 90 %, longest |"]
    lines[0] += " accuracy | undisturbed | difference, the same seeds |"
    lines.append("|---" * 7 + "|")
    for strategy in STRATEGIES:
        of_it = [each for each in found if each["strategy"] == strategy]
        killed, alone = ([each for each in of_it if each["kind"] == kind] for kind in (WORKER, NONE))
        if killed:
            figures = f"{accuracy(killed)} | {accuracy(alone)} | {difference(killed, alone)}"
            lines.append(f"| `{strategy}` | {row(killed)} | {figures} |")
    return lines


def by_kind(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| struck | went on | each sample once | pause, s: median, 90 %, longest | found in, s | back in, s |"]
    lines.append("|---" * 6 + "|")
    for kind in (*KINDS, *LINK_KINDS):
        tries = [each for each in found if each["kind"] == kind]
        if tries:
            told = kind not in KINDS or KINDS[kind].window or KINDS[kind].replace
            timed = [each for each in tries if undisturbed(each)]
            times = " | ".join(spread([each[name] for each in timed]) for name in ("found_in", "back_in"))
            lines.append(f"| {kind} | {row(tries)} | {times if told else '– | –'} |")
    return lines


def by_library() -> list[str]:
    found = [json.loads(line) for line in OUTCOMES.read_text().splitlines()] if OUTCOMES.exists() else []
    lines = ["| the same SIGKILL | went on | pause, s: median, 90 %, longest |", "|---|---|---|"]
    for method in PEERS:
        tries = [each for each in found if each["method"] == method]
        pauses = [each["pause"] for each in tries if each["ok"]]
        if tries:
            lines.append(f"| {LIBRARIES[method]} | {len(pauses)} of {len(tries)} | {spread(pauses)} |")
    return lines if found else []


def row(tries: Sequence[dict[str, Any]]) -> str:
    went_on = [each for each in tries if each["ok"]]
    told = "–" if tries[0]["kind"] == NONE else spread([each["pause"] for each in went_on if undisturbed(each)])
    exact = sum(each["exact"] for each in went_on)
    return f"{len(went_on)} of {len(tries)} | {exact} of {len(went_on)} | {told}"


def undisturbed(outcome: dict[str, Any]) -> bool:
    """Whether its times tell something: on a machine that was busy otherwise, only if it went before that."""
    return bool(outcome.get("nice", 0) < 0 or outcome["load"] < BUSY)


def spread(numbers: Sequence[float | None]) -> str:
    """Median, nine tenths and the longest."""
    known = sorted(each for each in numbers if each is not None)
    if not known:
        return "–"
    late = known[min(len(known) - 1, int(0.9 * len(known)))]
    return f"{statistics.median(known):.2f}, {late:.2f}, {known[-1]:.2f}"


def accuracy(tries: Sequence[dict[str, Any]]) -> str:
    return mean_and_deviation([each["accuracy"] for each in tries if each["ok"]])


def difference(killed: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> str:
    """Of the accuracies of runs on the same data, from the same weights."""
    undisturbed = {each["seed"]: each["accuracy"] for each in alone if each["ok"]}
    both = [each for each in killed if each["ok"] and each["seed"] in undisturbed]
    return mean_and_deviation([each["accuracy"] - undisturbed[each["seed"]] for each in both], sign="+")


def mean_and_deviation(scores: Sequence[float], sign: str = "") -> str:
    deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return f"{statistics.mean(scores):{sign}.3f} ± {deviation:.3f}" if scores else "–"
