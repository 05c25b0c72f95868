"""Whole learning curves in virtual time, for methods that are judged by how far they come and how soon; kept in a file
of lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from paceline.backends.flat import in_shape
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, simulate
from paceline.errors import PacelineError
from paceline.simulator.cluster import Cluster
from parts.trials import Ended, Rounds, Samples, Trial, Workload, learner_of, load, micro_batch_of, strategy_of

LAST = 3  # evaluations whose mean counts: one alone is noisy
BEHIND = 0.1  # while tuning, a rate so far below the best so far, at the same time, is given up
TIME_TO_LEARN = 0.5  # of the time, before a rate is given up


@dataclass(frozen=True)
class Curve:
    """What a training came to: times, samples and scores of its evaluations, and the share of ideal. `ended`: whether
    it was trained to the end; it was not if it diverged, or was given up. On real processes also which part of their
    time the workers spent on communication alone, and how many bytes they brought."""

    times: tuple[float, ...]
    samples: tuple[int, ...]
    scores: tuple[float, ...]
    share_of_ideal: float
    ended: bool
    communicating: float | None = None
    nbytes: int | None = None

    @property
    def final(self) -> float:
        """Where it was in the end: the mean of the last evaluations."""
        last = self.scores[-LAST:]
        return sum(last) / len(last) if last else 0.0

    @property
    def best(self) -> float:
        """Where it was at its best."""
        return max(self.smoothed, default=0.0)

    @property
    def smoothed(self) -> list[float]:
        """The mean of each score and the ones before and after it."""
        return [sum(self.scores[n - 1 : n + 2]) / LAST for n in range(1, len(self.scores) - 1)]

    def time_to(self, score: float) -> float | None:
        """When the smoothed score reaches this one, on a line between two evaluations."""
        smoothed = self.smoothed
        for n, reached in enumerate(smoothed):
            if reached >= score:
                if n == 0:
                    return self.times[1]
                part = (score - smoothed[n - 1]) / (reached - smoothed[n - 1])
                return self.times[n] + part * (self.times[n + 1] - self.times[n])
        return None

    def at(self, t: float) -> float:
        """The last smoothed score until then."""
        known = [s for when, s in zip(self.times[1:], self.smoothed, strict=False) if when <= t]
        return known[-1] if known else 0.0


@dataclass(frozen=True)
class Span:
    """How long a training lasts, in micro-batches of 32 of a device of speed 1; and how often it is judged, by how many
    held-out rows."""

    seconds: float
    evaluations: int
    rows: int


class Look:
    """Evaluates the model of the run now and then."""

    def __init__(self, workload: Workload, trial: Trial, span: Span, beat: Curve | None) -> None:
        self._workload, self._span, self._beat = workload, span, beat
        self._model = workload.build_model(trial.seed)
        self._held_out = Samples(*workload.test[: span.rows])
        self.course: list[tuple[float, int, float]] = []
        self.parameters: Callable[[], torch.Tensor]
        self.rounds: Rounds

    def __call__(self, rank: int, t: float, samples: int) -> None:
        if not self.rounds.over(rank) or t < (1 + len(self.course)) * self._span.seconds / self._span.evaluations:
            return
        score = self.score()
        self.course.append((t, samples, score))
        late = t > TIME_TO_LEARN * self._span.seconds
        if late and self._beat is not None and score < self._beat.at(t) - BEHIND:
            raise Ended

    @torch.no_grad()
    def score(self) -> float:
        weights = [p.data for p in self._model.parameters()]
        for weight, present in zip(weights, in_shape(self.parameters(), weights), strict=True):
            weight.copy_(present)
        return self._workload.evaluate(self._model, self._held_out)[0]


def learn(trial: Trial, cluster: Cluster, span: Span, folder: Path | None, beat: Curve | None) -> Curve:
    """Train for so long. `beat`: give up when it stays far behind this curve."""
    workload, strategy = load(trial.data, trial.model, folder), strategy_of(trial.strategy)
    look = Look(workload, trial, span, beat)
    samples = len(workload.train)
    learners = [learner_of(workload, trial, rank, samples, ReplicaLearner) for rank in range(cluster.ranks)]
    look.parameters, look.rounds = lambda: learners[0].parameters, Rounds(strategy, cluster.workers)
    ended, ideal = True, 0.0
    try:
        ideal = simulate(
            strategy,
            cluster,
            micro_batch=micro_batch_of(trial.strategy),
            data=Data(samples),
            seconds=span.seconds,
            learners=learners,
            on_applied=look,
        ).share_of_ideal
    except (Ended, PacelineError):  # given up, or no finite gradient any more
        ended = False
    times, counts, scores = zip(*look.course, strict=True) if look.course else ((), (), ())
    return Curve(times, counts, scores, ideal, ended)


class KeptCurves:
    """Curves in a file, so that a comparison that was interrupted goes on."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._curves: dict[Trial, Curve] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                fields = {name: tuple(v) if isinstance(v, list) else v for name, v in entry["curve"].items()}
                self._curves[Trial(**entry["trial"])] = Curve(**fields)

    def get(self, trial: Trial) -> Curve | None:
        return self._curves.get(trial)

    def add(self, trial: Trial, curve: Curve) -> None:
        self._curves[trial] = curve
        rounded = replace(
            curve,
            times=tuple(round(t, 2) for t in curve.times),
            scores=tuple(round(s, 5) for s in curve.scores),
            share_of_ideal=round(curve.share_of_ideal, 4),
        )
        with self._file.open("a") as stream:
            stream.write(json.dumps({"trial": asdict(trial), "curve": asdict(rounded)}) + "\n")


@dataclass(frozen=True)
class Tuned:
    """A method's settings that were tried on seed 0, and the curve of each."""

    curves: dict[tuple[str, float], Curve]

    def best(self) -> tuple[str, float]:
        """That came furthest."""
        return max(self.curves, key=lambda setting: self.curves[setting].best)

    def soonest(self, score: float) -> tuple[str, float] | None:
        """That reached this score first."""
        times = {setting: curve.time_to(score) for setting, curve in self.curves.items()}
        reached = {setting: t for setting, t in times.items() if t is not None}
        return min(reached, key=lambda setting: reached[setting]) if reached else None


def tuned(
    strategies: Sequence[str], rates: Sequence[float], curve_of: Callable[[str, float, Curve | None], Curve]
) -> Tuned:
    """Every variant of a method at the rate at which it comes furthest: from the best rate so far up, and down, as long
    as it gets better.

    Args:
        strategies: the variants.
        rates: in order.
        curve_of: trains one variant at one rate, and may give up when it stays far behind the curve that is given.
    """
    curves: dict[tuple[str, float], Curve] = {}
    place, beat = len(rates) // 2, None
    for strategy in strategies:
        tried: dict[int, float] = {}

        def best(number: int, strategy: str = strategy, tried: dict[int, float] = tried) -> float:
            nonlocal beat
            if number not in tried:
                curve = curves[strategy, rates[number]] = curve_of(strategy, rates[number], beat)
                tried[number] = curve.best
                if beat is None or (curve.ended and curve.best > beat.best):
                    beat = curve
            return tried[number]

        start = place
        while place + 1 < len(rates) and best(place + 1) > best(place):
            place += 1
        while place == start and place > 0 and best(place - 1) > best(place):
            start = place = place - 1
    return Tuned(curves)
