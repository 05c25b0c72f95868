"""How far from the limit each strategy of a race stayed, worked out from the events of all of them.

What the limit needs and no clock tells, the race's blocking strategies give: they take every gradient at the newest
parameters, so the noise scale and the least number of steps are those of the task, and not of somebody's delay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

from paceline.errors import PacelineError
from paceline.record import Event
from paceline.rules.limit import Limit, least_steps, limit, split
from paceline.strategies import create

Runs = Mapping[str, Sequence[Event]]
"""The events of each strategy, by its name with its options."""


def shares_of_limit(
    results: Sequence[Mapping[str, Any]],
    runs: Runs,
    *,
    speeds: Sequence[float],
    comm_seconds: float | None,
    target: float,
) -> list[dict[str, Any]]:
    """What each result of a race gets as its `limit`; None stands for what the race did not tell.

    Args:
        results: of the strategies, as in the race's JSON.
        runs: their events.
        speeds: of each worker alone, samples a second.
        comm_seconds: what an all-reduce takes.
        target: of the held-out metric.
    """
    noise = noise_scale(runs)
    bound = _bound(speeds, noise, comm_seconds)
    lines = [_Line.of(result, runs[result["strategy"]], target) for result in results]
    steps = None if noise is None else _least_steps(lines, noise)
    seconds = None if bound is None or steps is None else steps * bound.seconds_per_step_min
    best_batch = None if bound is None else bound.batch
    return [
        {
            **line.shares(bound, steps),
            "noise_scale": noise,
            "comm_seconds": comm_seconds,
            "best_batch": best_batch,
            "seconds": seconds,
        }
        for line in lines
    ]


def _bound(speeds: Sequence[float], noise: float | None, comm_seconds: float | None) -> Limit | None:
    if noise is None or comm_seconds is None:
        return None
    try:
        return limit(speeds, noise, comm_seconds)
    except PacelineError:  # a described network may take for ever; the race that was run on it is a result all the same
        return None


def noise_scale(runs: Runs) -> float | None:
    """B_noise of the race, in samples: that of its blocking strategies together, else that of all together."""
    blocking = [events for name, events in runs.items() if create(name).blocking]
    found = _pooled(blocking)
    return _pooled(runs.values()) if found is None else found


def _pooled(runs: Iterable[Sequence[Event]]) -> float | None:
    """A ratio of sums: either estimate of one moment is far too noisy to divide by."""
    squared_norm = variance = 0.0
    for events in runs:
        for event in events:
            if event["kind"] == "noise" and isfinite(event["squared_norm"]) and isfinite(event["variance"]):
                squared_norm += event["squared_norm"]
                variance += event["variance"]
    return max(variance / squared_norm, 0.0) if squared_norm > 0 else None


def measured_comm_seconds(runs: Iterable[Sequence[Event]]) -> float | None:
    """What an all-reduce takes from the last rank's joining it to its end, as those see it who wait for it: the median
    of a strategy, and of these the smallest, because a limit must not blame the network for a busy machine. None when
    nobody waited."""
    medians = []
    for events in runs:
        joined: dict[int, float] = {}
        for event in events:
            if event["kind"] == "join":
                joined[event["round"]] = max(event["t"], joined.get(event["round"], event["t"]))
        waits = [event for event in events if event["kind"] == "wait" and event["round"] in joined]
        if waits:
            medians.append(median(max(event["end"] - joined[event["round"]], 0.0) for event in waits))
    return min(medians, default=None)


def contribution_bytes(runs: Iterable[Sequence[Event]]) -> int:
    """What one rank brings to an all-reduce."""
    return max((event["bytes"] for events in runs for event in events if event["kind"] == "join"), default=0)


def samples_to_target(events: Iterable[Event], target: float) -> int | None:
    """How many samples had been applied when the held-out metric first reached the target."""
    metrics = sorted((event for event in events if event["kind"] == "metric"), key=lambda event: event["t"])
    return next((int(event["samples"]) for event in metrics if event["metric"] >= target), None)


@dataclass(frozen=True)
class _Line:
    """One strategy's line of the result: what its distance from the limit depends on."""

    blocking: bool
    hardware: float
    batch: float | None  # samples in a round, on average
    samples: int | None  # to the target

    @classmethod
    def of(cls, result: Mapping[str, Any], events: Iterable[Event], target: float) -> _Line:
        rounds = result["rounds"]
        return cls(
            blocking=create(result["strategy"]).blocking,
            hardware=result["share_of_ideal"],
            batch=result["samples_applied"] / rounds if rounds else None,
            samples=samples_to_target(events, target),
        )

    def shares(self, bound: Limit | None, steps: float | None) -> dict[str, float | None]:
        if bound is None or self.batch is None:
            return {"share": None, "hardware": self.hardware, "batch": None, "statistics": None}
        found = split(bound, hardware=self.hardware, batch=self.batch, samples=self.samples, least_steps=steps)
        return {
            "share": found.share,
            "hardware": found.hardware,
            "batch": found.batch,
            "statistics": found.statistics,
        }


def _least_steps(lines: Iterable[_Line], noise: float) -> float | None:
    """S_min: the least that any blocking strategy made do with."""
    known = [(line.samples, line.batch) for line in lines if line.blocking]
    return min((least_steps(samples, batch, noise) for samples, batch in known if samples and batch), default=None)
