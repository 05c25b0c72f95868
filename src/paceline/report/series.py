"""The curves of the report, worked out from the record: learning, share of ideal, batches, delays, bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite, nan
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.node import GIVEN_UP
from paceline.record import Event
from paceline.summary import window_of

WINDOWS = 50
"""In which the share of ideal is told over a run: fine enough for a disturbance, coarse enough for a calm line."""
MAX_POINTS = 400
"""Of a curve: more than a screen can show; a long run must not make a heavy page."""
MAX_WORKERS = 8
"""As many curves as can be told apart; beyond it the batches are told by their least, median and largest."""
MAX_DELAYS = 32

T = TypeVar("T")
Floats = NDArray[np.float64]
Curve = dict[str, list[Any]]


def learning(events: Iterable[Event], start: float) -> Curve:
    """Seconds since `start`, samples, metric and loss of every snapshot, in order of time."""
    found = sorted((event for event in events if event["kind"] == "metric"), key=lambda event: event["t"])
    kept = _thinned(found)
    return {
        "seconds": [_short(event["t"] - start) for event in kept],
        "samples": [event["samples"] for event in kept],
        "metric": [_number(event["metric"]) for event in kept],
        "loss": [_number(event["loss"]) for event in kept],
    }


def share_of_ideal(events: Sequence[Event], ideal: float) -> Curve:
    """Samples applied in each of `WINDOWS` windows ÷ what all workers could have computed in it.

    A rank's samples count as used evenly since its step before: a round of two seconds is work of two seconds, and not
    of the instant at which it was applied.

    Args:
        events: of one run.
        ideal: samples a second of all workers, each at its own speed alone.

    >>> run = [{"kind": "start", "rank": 0, "t": 0.0},
    ...        {"kind": "applied", "rank": 0, "t": 5.0, "round": 0, "samples": 400, "own": 400},
    ...        {"kind": "applied", "rank": 0, "t": 10.0, "round": 1, "samples": 100, "own": 100}]
    >>> curve = share_of_ideal(run, 100.0)
    >>> [(curve["seconds"][at], curve["share"][at]) for at in (0, -1)]
    [(0.1, 0.8), (9.9, 0.2)]
    """
    start, end = window_of(events)
    if end <= start or ideal <= 0:
        return {"seconds": [], "share": []}
    edges = np.linspace(start, end, WINDOWS + 1)
    used = np.zeros(WINDOWS + 1)
    for steps in _steps_by_rank(events).values():
        times = np.array([start, *(t for t, _ in steps)])
        used += np.interp(edges, times, np.cumsum([0, *(samples for _, samples in steps)]))
    share = np.diff(used) / (ideal * np.diff(edges))
    middles = (edges[:-1] + edges[1:]) / 2 - start
    return {"seconds": [_short(t) for t in middles], "share": [_short(value) for value in share]}


def batches(events: Sequence[Event]) -> dict[str, Any]:
    """Samples that each worker brought to each round: `rounds`, and `curves` of a name and as many values (or none).

    A server's step is a round of the worker whose samples it used.
    """
    # Who steps alone counts rounds of its own; those of all are then means of models, and begin at zero again.
    alone = any(event["kind"] == "step" for event in events)
    given: dict[int, dict[int, int]] = defaultdict(dict)
    for event in events:
        if event["kind"] == "step" or (event["kind"] == "join" and not alone):
            giver: int = event["of"] if "of" in event else event["rank"]
            given[giver][event["round"]] = event["samples"]
    # By a round without a sample ranks agree that all are done.
    rounds = _thinned(sorted({number for rank in given.values() for number, samples in rank.items() if samples}))
    table = {rank: [given[rank].get(number) for number in rounds] for rank in sorted(given)}
    if len(table) <= MAX_WORKERS:
        return {"rounds": rounds, "curves": [[f"rank {rank}", values] for rank, values in table.items()]}
    columns = [sorted(value for value in column if value is not None) for column in zip(*table.values(), strict=True)]
    parts = {"largest": 1.0, "median": 0.5, "least": 0.0}
    curves = [[name, [column[int(part * (len(column) - 1))] for column in columns]] for name, part in parts.items()]
    return {"rounds": rounds, "curves": curves}


def delays(events: Sequence[Event]) -> Curve:
    """How many steps late gradients were applied: the delays, and the share of the samples that had each.

    The delay of a micro-batch is the number of steps that its rank's parameters made between its beginning, when they
    were read, and the step that used it. Where the record says so itself (`delay` in `applied` and `step`), that
    counts. Steps alone without it tell nothing: what a rank took from its neighbours meanwhile is not in the record.
    Cures (such as looking ahead) are not taken into account.
    """
    counted: dict[int, int] = defaultdict(int)
    for own in _by_rank(events).values():
        told = [event for event in own if "delay" in event]
        for event in told:
            counted[event["delay"]] += event["own"] if event["kind"] == "applied" else event["samples"]
        if not told and not any(event["kind"] == "step" for event in own):
            _derive_delays(own, counted)
    width = ceil((max(counted, default=0) + 1) / MAX_DELAYS)
    merged: dict[int, int] = defaultdict(int)
    for delay, samples in counted.items():
        merged[delay - delay % width] += samples
    total = sum(merged.values())
    found = sorted(delay for delay, samples in merged.items() if samples)
    return {"delays": found, "share": [_short(merged[delay] / total) for delay in found], "width": [width]}


def bytes_sent(events: Iterable[Event], start: float) -> Curve:
    """Bytes that all ranks had sent until each moment."""
    sent = sorted((event["t"], event["bytes"]) for event in events if event["kind"] in ("join", "step"))
    totals = np.cumsum([size for _, size in sent], dtype=np.int64)
    kept = _thinned(range(len(sent)))
    return {
        "seconds": [0.0, *(_short(max(sent[at][0] - start, 0.0)) for at in kept)],
        "bytes": [0, *(int(totals[at]) for at in kept)],
    }


def curves_of(events: Sequence[Event], result: Mapping[str, Any]) -> dict[str, Any]:
    """All curves of one run; the workers' speeds are the result's."""
    start, _ = window_of(events)
    ideal = sum(worker["speed"] for worker in result["workers"])
    return {
        "learning": learning(events, start),
        "share": share_of_ideal(events, ideal),
        "batches": batches(events),
        "delays": delays(events),
        "bytes": bytes_sent(events, start),
    }


def _derive_delays(own: Sequence[Event], counted: dict[int, int]) -> None:
    """Of one rank's micro-batches that went into rounds of all ranks."""
    applied = sorted((event["t"], event["round"]) for event in own if event["kind"] == "applied")
    joins = sorted((event["t"], event["round"]) for event in own if event["kind"] == "join")
    given_up = {event["t"] for event in own if event["kind"] == "discard" and event["reason"] == GIVEN_UP}
    computed = [event for event in own if event["kind"] == "compute" and event["end"] not in given_up]
    if not applied or not joins or not computed:
        return
    times, when = np.array([t for t, _ in applied]), {number: t for t, number in applied}
    joined = np.array([t for t, _ in joins])
    places = np.searchsorted(joined, [event["end"] - 1e-9 for event in computed])
    used = np.array([when.get(joins[place][1], nan) if place < len(joins) else nan for place in places])
    late = np.searchsorted(times, used) - np.searchsorted(times, [event["t"] for event in computed], side="right")
    for event, steps, known in zip(computed, late, np.isfinite(used), strict=True):
        if known:
            counted[max(int(steps), 0)] += event["samples"]


def _steps_by_rank(events: Iterable[Event]) -> dict[int, list[tuple[float, int]]]:
    steps: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        if event["kind"] in ("applied", "step"):
            steps[event["rank"]].append((event["t"], event["own" if event["kind"] == "applied" else "samples"]))
    return {rank: sorted(own) for rank, own in steps.items()}


def _by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    own: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        own[event["rank"]].append(event)
    return own


def _thinned(values: Sequence[T]) -> list[T]:
    """At most about `MAX_POINTS` of them, evenly, and the last one."""
    stride = ceil(len(values) / MAX_POINTS)
    return [*values[:-1:stride], values[-1]] if stride > 1 else list(values)


def _short(value: float) -> float:
    """Six digits are more than a screen shows, and half of what Python would write."""
    return float(f"{value:.6g}")


def _number(value: float) -> float | None:
    """JSON knows neither infinity nor NaN; a curve has a gap there."""
    return _short(value) if isfinite(value) else None
