"""The timeline's data: what every worker did when, small enough for a page and whole enough to zoom into.

A page holds two things of each lane. The shares of computing and communicating in a few thousand equal bins: whatever
the number of events, the whole run can be drawn from these. And the single intervals, with samples and round: of all
the run where they fit a budget, else of its beginning. Numbers travel as base64 of little-endian arrays.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.record import Event
from paceline.summary import Interval, intervals, window_of

MAX_LANES = 64
EXACT_BUDGET = 40_000
SHORTEST = 1e-9  # seconds that can be shown at all
"""Intervals and steps with their details in a page: 0.9 MB."""
BIN_BUDGET, MOST_BINS, FEW_BINS = 131_072, 16_384, 2_048
"""Over all lanes: 0.35 MB. A lane that is there in full needs only as many as a screen has columns."""
TICK, MOST_TICKS = 1e-6, 2**32 - 1
"""Seconds; a run of more than 71 minutes has coarser ones, so that a moment fits into 32 bits."""
KINDS = {"computing": 0, "communicating": 1, "idle": 2}
NO_ROUND = MOST_TICKS

Floats = NDArray[np.float64]


def timelines(runs: Mapping[str, Sequence[Event]], workers: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """The timeline of each run.

    Args:
        runs: the events of each run, by name.
        workers: of each run, as in a race's results: those are named as workers, all other ranks as servers.
    """
    prepared = {name: _Lanes(events, workers.get(name, ())) for name, events in runs.items()}
    until = _exact_seconds(list(prepared.values()))
    whole = all(lanes.span <= until for lanes in prepared.values())
    count = sum(len(lanes.shown) for lanes in prepared.values())
    bins = FEW_BINS if whole else max(min(MOST_BINS, BIN_BUDGET // max(count, 1)), 256)
    return {name: lanes.as_dict(until, bins) for name, lanes in prepared.items()}


class _Lanes:
    """One run's lanes, from the beginning of its window on."""

    def __init__(self, events: Sequence[Event], workers: Sequence[Mapping[str, Any]]) -> None:
        self._start, end = window_of(events)
        self._done, self._steps, self._marks = intervals(events), _steps_of(events), _marks_of(events)
        last = max((interval.end for lane in self._done.values() for interval in lane), default=end)
        self.span = max(end, last) - self._start
        speeds = {worker["rank"]: worker["speed"] for worker in workers}
        ranks = sorted({*speeds, *(event["rank"] for event in events)})
        computing = {rank for rank, lane in self._done.items() if any(i.doing == "computing" for i in lane)}
        self._names = {
            rank: (f"rank {rank}", f"{speeds[rank]:,.0f}/s" if rank in speeds else "")
            if rank in computing or speeds.get(rank)
            else (f"server {rank}", "")
            for rank in ranks
        }
        self.shown = ranks[:MAX_LANES]
        self.left_out = len(ranks) - len(self.shown)

    def moments(self) -> Iterable[float]:
        """When each interval and step of the shown lanes began."""
        for rank in self.shown:
            yield from (interval.t - self._start for interval in self._done.get(rank, ()))
            yield from (t - self._start for t in self._steps[rank])

    def as_dict(self, until: float, bins: int) -> dict[str, Any]:
        tick = max(TICK, self.span / MOST_TICKS)
        edges = np.linspace(0.0, self.span, bins + 1)
        lanes = [self._lane(rank, edges, until, tick) for rank in self.shown]
        return {
            "span": self.span,
            "exact": min(until, self.span),
            "tick": tick,
            "bins": bins,
            "lanes": lanes,
            "left_out": self.left_out,
        }

    def _lane(self, rank: int, edges: Floats, until: float, tick: float) -> dict[str, Any]:
        done = self._done.get(rank, [])
        name, note = self._names[rank]
        shares = np.stack([_shares(done, doing, edges + self._start) for doing in ("computing", "communicating")])
        kept = [interval for interval in done if self._start < interval.end and interval.t - self._start <= until]
        times = np.array([(i.t, i.end) for i in kept], dtype=np.float64).reshape(-1, 2) - self._start
        ticks = np.clip(np.rint(times / tick), 0, MOST_TICKS).astype("<u4")
        samples, rounds = self._details(rank, kept)
        steps = np.array([t - self._start for t in self._steps[rank]], dtype=np.float64)
        steps = steps[(steps >= 0) & (steps <= until)]
        return {
            "name": name,
            "note": note,
            "density": len(done) / self.span if done and self.span else 1.0,
            "shares": _packed(np.rint(255 * shares).astype("u1")),
            "start": _packed(ticks[:, 0]),
            "end": _packed(ticks[:, 1]),
            "kind": _packed(np.array([KINDS[interval.doing] for interval in kept], dtype="u1")),
            "samples": _packed(samples),
            "round": _packed(rounds),
            "steps": _packed(np.rint(steps / tick).astype("<u4")),
        }

    def _details(self, rank: int, kept: Sequence[Interval]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Samples of each interval, and the round that it belongs to: what was computed goes into the rank's next
        contribution, and what was waited for is applied next."""
        computed, given, applied = self._marks[rank]
        samples = [computed.get((i.t, i.end), 0) if i.doing == "computing" else 0 for i in kept]
        ends = np.array([interval.end for interval in kept])
        rounds = np.full(len(kept), NO_ROUND, dtype=np.int64)
        computing = np.array([interval.doing == "computing" for interval in kept], dtype=bool)
        for mask, marks in ((computing, given), (~computing, applied)):
            if marks and mask.any():
                times, numbers = np.array([t for t, _ in marks]), np.array([n for _, n in marks] + [NO_ROUND])
                rounds[mask] = numbers[np.searchsorted(times, ends[mask] - TICK / 1000)]
        return np.array(samples, dtype="<u4"), rounds.astype("<u4")


def _exact_seconds(runs: Sequence[_Lanes]) -> float:
    """Up to when all runs can be shown in full: the same for all of them, so that they can be compared."""
    moments = np.sort(np.fromiter((moment for lanes in runs for moment in lanes.moments()), dtype=np.float64))
    if len(moments) <= EXACT_BUDGET:
        return max((lanes.span for lanes in runs), default=0.0)
    return float(max(moments[EXACT_BUDGET], 0.0))


def _shares(done: Sequence[Interval], doing: str, edges: Floats) -> Floats:
    """Which share of each bin the rank did this."""
    times = np.array([(i.t, i.end) for i in done if i.doing == doing], dtype=np.float64).reshape(-1, 2)
    if not len(times) or edges[-1] - edges[0] < SHORTEST:
        return np.zeros(len(edges) - 1)
    starts, ends = times[:, 0], np.maximum.accumulate(times[:, 1])
    starts = np.maximum(starts, np.concatenate([starts[:1], ends[:-1]]))  # overlapping ones count once
    lengths = np.maximum(ends - starts, 0.0)
    until = np.cumsum(lengths)
    points = np.stack([starts, starts + lengths], axis=1).ravel()
    values = np.stack([until - lengths, until], axis=1).ravel()
    shares: Floats = np.clip(np.diff(np.interp(edges, points, values)) / np.diff(edges), 0.0, 1.0)
    return shares


def _steps_of(events: Iterable[Event]) -> dict[int, list[float]]:
    steps: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event["kind"] in ("applied", "step") and event["samples"]:
            steps[event["rank"]].append(event["t"])
    return steps


_Marks = tuple[dict[tuple[float, float], int], list[tuple[float, int]], list[tuple[float, int]]]


def _marks_of(events: Iterable[Event]) -> dict[int, _Marks]:
    """Of each rank: samples of its micro-batches, when it gave something to which round, and when one was applied."""
    marks: dict[int, _Marks] = defaultdict(lambda: ({}, [], []))
    for event in events:
        computed, given, applied = marks[event["rank"]]
        match event["kind"]:
            case "compute":
                computed[event["t"], event["end"]] = event["samples"]
            case "join":
                given.append((event["t"], event["round"]))
            case "applied":
                applied.append((event["t"], event["round"]))
            case "step":
                given.append((event["t"], event["round"]))
                applied.append((event["t"], event["round"]))
    for _, given, applied in marks.values():
        given.sort()
        applied.sort()
    return marks


def _packed(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
