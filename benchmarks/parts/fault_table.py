"""What was measured of faults, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from parts.fault_blows import KINDS, NONE
from parts.faults import outcomes


def show(strategies: Sequence[str], kinds: Sequence[str]) -> None:
    """All that was measured: each strategy with each kind of fault, and all strategies together."""
    found = outcomes()
    print("\n| strategy | struck | went on | each sample once | pause, s: median, 90 %, longest | accuracy |")
    print("|---" * 6 + "|")
    for kind in kinds:
        for strategy in strategies:
            tries = [each for each in found if (each["strategy"], each["kind"]) == (strategy, kind)]
            if tries:
                print(f"| `{strategy}` | {kind} | {row(tries)} | {accuracy(tries)} |")
    print("\n| struck | went on | each sample once | pause, s: median, 90 %, longest | found in, s | back in, s |")
    print("|---" * 6 + "|")
    for kind in kinds:
        tries = [each for each in found if each["strategy"] in strategies and each["kind"] == kind]
        if tries:
            times = " | ".join(spread([each[name] for each in tries]) for name in ("found_in", "back_in"))
            told = kind not in KINDS or KINDS[kind].window or KINDS[kind].replace
            print(f"| {kind} | {row(tries)} | {times if told else '– | –'} |")


def row(tries: Sequence[dict[str, Any]]) -> str:
    went_on = [each for each in tries if each["ok"]]
    told = "–" if tries[0]["kind"] == NONE else spread([each["pause"] for each in went_on])
    exact = sum(each["exact"] for each in went_on)
    return f"{len(went_on)} of {len(tries)} | {exact} of {len(went_on)} | {told}"


def spread(numbers: Sequence[float | None]) -> str:
    """Median, nine tenths and the longest."""
    known = sorted(each for each in numbers if each is not None)
    if not known:
        return "–"
    late = known[min(len(known) - 1, int(0.9 * len(known)))]
    return f"{statistics.median(known):.2f}, {late:.2f}, {known[-1]:.2f}"


def accuracy(tries: Sequence[dict[str, Any]]) -> str:
    scores = [each["accuracy"] for each in tries if each["ok"]]
    deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
    return f"{statistics.mean(scores):.3f} ± {deviation:.3f}" if scores else "–"
