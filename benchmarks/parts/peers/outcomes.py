"""What came of each race, kept as lines of a dated file, and what is worked out from them."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from paceline.record import read_events
from paceline.summary import summarise, window_of
from parts.peers.course import WORKERS, Race, paces
from parts.peers.methods import METHODS

# Held-out loss, as the mean over all snapshots of so many samples around one. Samples to it differ by 8 % from seed to
# seed (standard deviation over 20 seeds of synchronous SGD); to an accuracy of 0.95 by 20 %: see docs/peers.md.
TARGET, WINDOW = 0.3, 500
LATER = 0.95  # accuracy, as the mean of some snapshots in a row
SMOOTHED = 3
TUNED_ON = "static"
# Seconds; races whose sleeps ended later on average were disturbed too much to count. Who races alone is disturbed by
# nothing but the processes that it has started itself, and is given more.
MOST_OVERSLEPT, ALONE_OVERSLEPT = 0.002, 0.02
FINALISTS = 2  # settings that are tried with all seeds
EQUAL_SAMPLES = 1_000

ALONE = {method.name for method in METHODS if method.alone}

Point = tuple[float, int, float, float]


@dataclass(frozen=True)
class Outcome:
    """Raw numbers of a race.

    Args:
        race: what was run.
        samples: used.
        seconds: that it took.
        possible: samples that all devices together could have computed in that time.
        curve: (seconds, samples, held-out accuracy, held-out loss) of every snapshot.
        bytes: sent by all processes together, None where they cannot be told from others'.
        start_up: seconds from the launch to the first micro-batch; None for all but the first race of a session.
        load: of the machine when it was over.
        overslept: seconds that the workers' sleeps ended late on average, because others had the processors.
    """

    race: Race
    samples: int
    seconds: float
    possible: float
    curve: tuple[Point, ...]
    bytes: int | None
    start_up: float | None
    load: float
    overslept: float

    @property
    def share_of_ideal(self) -> float:
        return self.samples / self.possible

    @property
    def disturbed(self) -> bool:
        return self.overslept > (ALONE_OVERSLEPT if self.race.method in ALONE else MOST_OVERSLEPT)

    @cached_property
    def losses(self) -> list[tuple[float, float, float]]:
        """(seconds, samples, loss), the loss as a mean over a window of samples: as many for a method that makes
        little of its time as for others. Only where the race has seen all of the window."""
        whole = [point for point in self.curve if point[1] + WINDOW / 2 <= self.curve[-1][1]]
        return [
            (t, samples, statistics.fmean(each[3] for each in self.curve if abs(each[1] - samples) <= WINDOW / 2))
            for t, samples, _, _ in whole
        ]

    @cached_property
    def reached(self) -> tuple[float, float] | None:
        """Seconds and samples at the target, on a line between two snapshots; None if it was not reached."""
        for before, after in pairwise(self.losses):
            if after[2] <= TARGET < before[2]:
                part = (before[2] - TARGET) / (before[2] - after[2])
                return before[0] + part * (after[0] - before[0]), before[1] + part * (after[1] - before[1])
        return None

    @property
    def time_to_target(self) -> float | None:
        return None if self.reached is None else self.reached[0]

    @property
    def samples_to_target(self) -> float | None:
        return None if self.reached is None else self.reached[1]

    @cached_property
    def accuracies(self) -> list[tuple[float, int, float]]:
        """(seconds, samples, accuracy), the accuracy as a mean of some snapshots in a row, as of the middle one: some
        methods have a model of the run every tenth of a second, others only every second, and these would have to
        wait longer for their last one."""
        points, half = self.curve, SMOOTHED // 2
        return [
            (*points[middle][:2], statistics.fmean(each[2] for each in points[middle - half : middle + half + 1]))
            for middle in range(half, len(points) - half)
        ]

    @property
    def time_to_accuracy(self) -> float | None:
        return next((t for t, _, accuracy in self.accuracies if accuracy >= LATER), None)

    @property
    def final(self) -> float:
        """Accuracy when the time was up."""
        before = [accuracy for t, _, accuracy in self.accuracies if t <= self.race.seconds]
        return before[-1] if before else 0.0

    @property
    def at_equal_samples(self) -> float | None:
        return next((accuracy for _, samples, accuracy in self.accuracies if samples >= EQUAL_SAMPLES), None)


def collect(race: Race, folder: Path, traces: Path, *, apart: bool) -> Outcome:
    """Of a race that is over.

    Args:
        race: that it was.
        folder: of the race; the first of a session is called 0.
        traces: recorded jobs.
        apart: whether the session's traffic was its own.
    """
    found = _of_paceline(race, folder) if (folder / "traffic.json").exists() else _of_peer(race, folder)
    seconds = found["seconds"]
    return Outcome(
        race,
        round(found["samples"]),
        round(seconds, 3),
        round(sum(pace.by(seconds) for pace in paces(race.cluster, race.seed, race.seconds, traces)), 1),
        tuple(
            (round(t, 3), int(samples), round(metric, 4), round(loss, 4)) for t, samples, metric, loss in found["curve"]
        ),
        found["bytes"] if apart else None,
        round(found["start_up"], 2) if folder.name == "0" else None,
        float(Path("/proc/loadavg").read_text().split()[0]),
        round(
            statistics.mean(json.loads((folder / f"over-{rank}").read_text())["overslept"] for rank in range(WORKERS)),
            5,
        ),
    )


def _of_peer(race: Race, folder: Path) -> dict[str, Any]:
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORKERS)]
    samples = ranks[0]["samples"] or sum(each["own"] for each in ranks)
    return ranks[0] | {"samples": samples, "seconds": max(race.seconds, *(each["ended"] for each in ranks))}


def _of_paceline(race: Race, folder: Path) -> dict[str, Any]:
    (events,) = folder.glob("runs/run/*/events")
    happened = read_events(events)
    start, _ = window_of(happened, race.seconds)
    summary = summarise(happened, speeds=[1.0], seconds=race.seconds)
    metrics = sorted((event for event in happened if event["kind"] == "metric"), key=lambda event: event["t"])
    traffic: dict[str, Any] = json.loads((folder / "traffic.json").read_text())
    return traffic | {
        "seconds": summary.seconds,
        "samples": summary.share_of_ideal * summary.seconds,
        "curve": [
            (max(event["t"] - start, 0.0), event["samples"], event["metric"], event["loss"]) for event in metrics
        ],
    }


class Book:
    """A dated file: how it was made (again each time that it is gone on with), then a line for each race, and for each
    method that could not be run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.outcomes: dict[Race, Outcome] = {}
        self._lock = threading.Lock()
        for line in path.read_text().splitlines() if path.exists() else ():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "about" in line:
            seen, self.about = self.about.get("versions", {}), line["about"]
            if "versions" in self.about:  # of those who run; others may have run before
                self.about["versions"] = seen | self.about["versions"]
        elif "failed" in line:
            self.failures[line["failed"]] = line["reason"]
        else:
            race = Race(**line.pop("race"))
            line["curve"] = tuple(map(tuple, line["curve"]))
            outcome = Outcome(race, **line)
            if race not in self.outcomes or outcome.overslept < self.outcomes[race].overslept:
                self.outcomes[race] = outcome  # the less disturbed one counts
            self.failures.pop(race.method, None)

    def begin(self, about: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write({"about": about})

    def add(self, outcome: Outcome) -> None:
        fields = {name: getattr(outcome, name) for name in outcome.__dataclass_fields__}
        self._write(fields | {"race": outcome.race.as_dict()})

    def fail(self, method: str, reason: str) -> None:
        self._write({"failed": method, "reason": reason})

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            text = json.dumps(line)
            with self.path.open("a") as file:
                file.write(text + "\n")
            self._take(json.loads(text))

    def best(self, method: str) -> Race | None:
        """The method's best settings: those whose median time to the target was the shortest on the static cluster, of
        all that were tried with enough seeds, or while there are none, with as many as any others."""
        tried: dict[tuple[int, float, float], list[Outcome]] = {}
        for race, each in self.outcomes.items():
            if race.method == method and race.cluster == TUNED_ON and not each.disturbed:
                tried.setdefault((race.micro_batch, race.lr, race.seconds), []).append(each)
        most = max(map(len, tried.values()), default=0)
        enough = min(most, self.about.get("seeds", most))
        complete = [found for found in tried.values() if len(found) >= enough]
        return min(complete, key=quality)[0].race if complete else None

    def finalists(self, settings: Sequence[Race]) -> list[Race]:
        """Those of these races that did best, undisturbed: their settings are worth trying with other seeds."""
        tried = [race for race in settings if race in self.outcomes and not self.outcomes[race].disturbed]
        return sorted(tried, key=lambda race: quality([self.outcomes[race]]))[:FINALISTS]

    def at_best(self, method: str, cluster: str) -> list[Outcome]:
        """Of all seeds, at the method's best settings; none if there are not enough."""
        best = self.best(method)
        found = [
            each
            for race, each in sorted(self.outcomes.items(), key=lambda item: item[0].seed)
            if (race.method, race.cluster) == (method, cluster) and not each.disturbed
            if best is not None and race == replace(best, cluster=cluster, seed=race.seed)
        ]
        return found if len(found) >= self.about.get("seeds", 1) else []


def median_time(outcomes: Sequence[Outcome]) -> float:
    """To the target, over the seeds; infinite if most of them did not reach it."""
    return statistics.median(inf if each.time_to_target is None else each.time_to_target for each in outcomes)


def quality(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """The smaller the better: the time to the target, and where it was not reached the accuracy in the end."""
    return median_time(outcomes), -statistics.median(each.final for each in outcomes)
