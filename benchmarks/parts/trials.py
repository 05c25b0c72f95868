"""One training in virtual time, until its judge ends it; what it came to is kept in a file of lines.

The batches of a blocking method, and of local SGD, do not depend on how long communication takes. So they are trained
once, and the rounds that they needed are laid over the times of their rounds in each cell, which are simulated without
gradients. Everything else is trained in every cell.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline import workloads
from paceline.backends.flat import in_shape
from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, simulate
from paceline.errors import PacelineError
from paceline.race.simulated import mean_model
from paceline.race.spec import with_servers
from paceline.simulator.cluster import Cluster
from paceline.strategies import create
from paceline.strategies.strategy import Strategy
from paceline.workloads.workload import Samples, Workload
from parts.deferred import DeferringLearner

MICRO_BATCH = 32
SMOOTHED = 3  # evaluations whose mean must reach the target


@dataclass(frozen=True)
class Trial:
    """What to train, and where. `purpose` tells trainings apart that are alike but for how they are judged."""

    model: str
    optimizer: str
    strategy: str
    lr: float
    seed: int
    cluster: str
    comm: float
    data: str = "fashion-mnist"
    purpose: str = "target"


@dataclass(frozen=True)
class Outcome:
    """When the target was reached: None if it was not. Times are in micro-batches of a device of speed 1. A trial that
    needed more samples than another rate was given up after so many. `score`: the last one, smoothed."""

    seconds: float | None
    samples: float | None
    rounds: float
    diverged: bool
    noise_scale: float | None
    given_up_after: int | None = None
    score: float | None = None


@dataclass(frozen=True)
class Judge:
    """When a training has come to its end. Of scores the larger is the better.

    Args:
        measure: `accuracy`, or whatever the workload's metric is, on held-out samples; or `loss` on samples to learn
            from, whose score is its negative.
        target: of the smoothed score; infinite to train to the end.
        evaluated: samples that it is judged by.
        every: samples from one evaluation to the next.
        most: samples after which it ends in any case.
        first: samples before the first evaluation; 0 for as many as between two.
        lost: after so many samples, below such a score: it has diverged, or never began.
        epoch: samples of the data that are learned from; 0 for all of them.
    """

    measure: str
    target: float
    evaluated: int
    every: int
    most: int
    first: int = 0
    lost: tuple[float, float] = (inf, 0.0)
    epoch: int = 0

    @torch.no_grad()
    def score(self, workload: Workload, model: nn.Module) -> float:
        if self.measure == "loss":
            return -float(workload.loss(model, workload.train[: self.evaluated]))
        return workload.evaluate(model, Samples(*workload.test[: self.evaluated]))[0]


def micro_batch_of(strategy: str) -> int:
    """Behind an @, if it is not the usual one."""
    return int(strategy.partition("@")[2] or MICRO_BATCH)


def strategy_of(text: str) -> Strategy:
    return create(text.partition("@")[0])


class Ended(Exception):  # noqa: N818  (it is no error)
    """Ends the simulation."""


class Rounds:
    """Counts the rounds of a run. Where ranks step alone, one is over when there have been as many steps as ranks: some
    may be ahead of others."""

    def __init__(self, strategy: Strategy, workers: int) -> None:
        self._alone, self._workers = strategy.steps_alone, workers
        self._steps = self.count = 0

    def over(self, rank: int) -> bool:
        """The rank has made a step: whether a round is over by it."""
        if rank and not self._alone:  # all make the same
            return False
        self._steps += 1
        self.count = self._steps // self._workers if self._alone else self._steps
        return not self._alone or self._steps % self._workers == 0


class Course:
    """A training under the eyes of its judge."""

    def __init__(self, trial: Trial, cluster: Cluster, judge: Judge, workload: Workload, most: int | None) -> None:
        self.strategy = strategy_of(trial.strategy)
        self.cluster = with_servers(cluster, self.strategy, None)
        samples = judge.epoch or len(workload.train)
        self.learners = [learner_of(workload, trial, rank, samples) for rank in range(self.cluster.ranks)]
        self._workload, self._judge, self._most = workload, judge, most
        self._model = workload.build_model(trial.seed)
        self._rounds = Rounds(self.strategy, cluster.workers)
        self._following = judge.first or judge.every
        self._scores: list[float] = []
        self._curve: list[tuple[float, float, float, float]] = []  # smoothed score, time, samples, rounds
        self._reached: tuple[float, float, float] | None = None
        self._given_up: int | None = None
        self.diverged = False

    def look(self, rank: int, t: float, samples: int) -> None:
        """Called after each step of a rank; ends the simulation when it is time."""
        if not self._rounds.over(rank):
            return
        if self._most is not None and samples > self._most:
            self._given_up = self._most
            raise Ended
        if samples < self._following:
            return
        judge = self._judge
        self._following = samples + judge.every
        self._scores.append(self._score())
        if len(self._scores) >= SMOOTHED:
            smoothed = sum(self._scores[-SMOOTHED:]) / SMOOTHED
            self._curve.append((smoothed, t, samples, self._rounds.count))
            if smoothed >= judge.target:
                self._reached = crossing(self._curve[-2:], judge.target)
        after, below = judge.lost
        self.diverged = samples > after and not self._scores[-1] >= below
        if self._reached or self.diverged or samples > judge.most:
            raise Ended

    def _score(self) -> float:
        weights = [p.data for p in self._model.parameters()]
        for weight, present in zip(weights, in_shape(self._parameters(), weights), strict=True):
            weight.copy_(present)
        return self._judge.score(self._workload, self._model)

    def _parameters(self) -> Tensor:
        """Of the model of the run."""
        if not self.strategy.steps_alone:
            return self.learners[0].parameters
        models = [learner.parameters for learner in self.learners]
        return mean_model(self.strategy, self.cluster, models, self.learners[0].sizes)

    def outcome(self) -> Outcome:
        seconds, samples, rounds = self._reached or (None, None, self._rounds.count)
        score = self._curve[-1][0] if self._curve else None
        noise = self.learners[0].noise.value
        return Outcome(seconds, samples, rounds, self.diverged, noise, self._given_up, score)


@lru_cache(maxsize=2)
def load(data: str, model: str, folder: Path | None) -> Workload:
    return workloads.load(data, folder, model)


def train(trial: Trial, cluster: Cluster, judge: Judge, folder: Path | None, most: int | None) -> Outcome:
    """Train until the judge ends it, or for so many samples at most. `folder`: of data that need one."""
    workload = load(trial.data, trial.model, folder)
    course = Course(trial, cluster, judge, workload, most)
    try:
        simulate(
            course.strategy,
            course.cluster,
            micro_batch=micro_batch_of(trial.strategy),
            data=Data(judge.epoch or len(workload.train)),
            seconds=1e9,
            learners=course.learners,
            on_applied=course.look,
        )
    except Ended:
        pass
    except PacelineError:  # no finite gradient any more
        course.diverged = True
    return course.outcome()


def crossing(last: Sequence[tuple[float, float, float, float]], target: float) -> tuple[float, float, float]:
    """Time, samples and rounds at which the score reached the target, on a line between the last two evaluations."""
    before, after = last[0], last[-1]
    part = (target - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 1.0
    t, samples, rounds = (a + part * (b - a) for a, b in zip(before[1:], after[1:], strict=True))
    return t, samples, rounds


def sent_bytes(trial: Trial, cluster: Cluster, folder: Path | None, epoch: int, epochs: tuple[int, int]) -> float:
    """Bytes that workers push from one epoch to another, over those of dense gradients.

    Args:
        trial: what is trained.
        cluster: where.
        folder: of data that need one.
        epoch: samples of one.
        epochs: after how many it begins, and after how many it ends.
    """
    workload, strategy = load(trial.data, trial.model, folder), strategy_of(trial.strategy)
    served, micro_batch = with_servers(cluster, strategy, None), micro_batch_of(trial.strategy)
    sent, pushes, nbytes = [], [], 0
    for number in epochs:
        learners = [learner_of(workload, trial, rank, epoch) for rank in range(served.ranks)]
        data = Data(epoch, number)
        run = simulate(strategy, served, micro_batch=micro_batch, data=data, learners=learners)
        sent.append(sum(totals.nbytes for totals in run.workers))
        pushes.append(sum(totals.micro_batches for totals in run.workers))
        nbytes = learners[0].parameters.nbytes
    return (sent[1] - sent[0]) / ((pushes[1] - pushes[0]) * nbytes)


def learner_of(
    workload: Workload, trial: Trial, rank: int, samples: int, kind: type[ReplicaLearner] = DeferringLearner
) -> ReplicaLearner:
    """What a rank learns with. To defer gradients costs a copy of the model for each: where ranks seldom add up
    several, and the model is large, the plain kind is faster."""
    model = workload.build_model(trial.seed)

    def backward(model: nn.Module, indices: NDArray[Any]) -> None:
        workload.loss(model, workload.train[torch.from_numpy(indices)]).backward()

    replica = Replica(model, workload.build_optimizer(model, optimizer=trial.optimizer, lr=trial.lr))
    random = any(isinstance(module, nn.Dropout) for module in model.modules())
    return (ReplicaLearner if random else kind)(replica, backward, samples=samples, rank=rank, seed=trial.seed)


@lru_cache(maxsize=256)
def time_of_round(strategy: str, cluster: Cluster, rounds: float) -> float:
    """When the round ends on a cluster, without gradients; of part of a round, that part of it later."""
    times: list[float] = [0.0]
    course = strategy_of(strategy)
    counted = Rounds(course, cluster.workers)

    def look(rank: int, t: float, samples: int) -> None:
        if counted.over(rank):
            times.append(t)
            if len(times) > rounds + 1:
                raise Ended

    with contextlib.suppress(Ended):
        served = with_servers(cluster, course, None)
        simulate(course, served, micro_batch=micro_batch_of(strategy), seconds=1e9, on_applied=look)
    whole = int(rounds)
    return times[whole] + (rounds - whole) * (times[whole + 1] - times[whole])


class Kept:
    """Outcomes in a file, so that a comparison that was interrupted goes on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes: dict[Trial, Outcome] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                self._outcomes[Trial(**entry["trial"])] = Outcome(**entry["outcome"])

    def get(self, trial: Trial) -> Outcome | None:
        return self._outcomes.get(trial)

    def add(self, trial: Trial, outcome: Outcome) -> None:
        self._outcomes[trial] = outcome
        with self._file.open("a") as stream:
            stream.write(json.dumps({"trial": asdict(trial), "outcome": asdict(outcome)}) + "\n")
