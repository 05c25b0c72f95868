"""One training in virtual time, until it reaches the target; what it came to is kept in a file of lines.

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
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from paceline import workloads
from paceline.backends.replica import Replica, in_shape
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, simulate
from paceline.errors import PacelineError
from paceline.strategies import create
from paceline.workloads.workload import Workload
from parts.cells import cluster_of

MICRO_BATCH = 32
EVALUATE_EVERY, EVALUATED, SMOOTHED = 1500, 1000, 3  # samples; held-out samples; evaluations whose mean must reach it
MOST_SAMPLES = 60_000
LOST_AFTER, LOST_BELOW = 15_000, 0.2  # accuracy after so many samples: it has diverged, or never began


@dataclass(frozen=True)
class Trial:
    """What to train, and where."""

    model: str
    optimizer: str
    strategy: str
    lr: float
    seed: int
    cluster: str
    comm: float


@dataclass(frozen=True)
class Outcome:
    """When the target was reached: None if it was not. Times are in micro-batches of a device of speed 1. A trial that
    needed more samples than another rate was given up after so many."""

    seconds: float | None
    samples: float | None
    rounds: float
    diverged: bool
    noise_scale: float | None
    given_up_after: int | None = None


def micro_batch_of(strategy: str) -> int:
    """Behind an @, if it is not the usual one."""
    return int(strategy.partition("@")[2] or MICRO_BATCH)


class TargetReached(Exception):  # noqa: N818  (it is no error)
    """Ends the simulation."""


@lru_cache(maxsize=2)
def load(model: str) -> Workload:
    return workloads.load("fashion-mnist", None, model)


def train(trial: Trial, target: float, most: int | None, traces: Path) -> Outcome:
    """Train until the target, or for so many samples at most."""
    workload = load(trial.model)
    cluster = cluster_of(trial.cluster, trial.comm, trial.seed, traces, micro_batch_of(trial.strategy) / MICRO_BATCH)
    learners = [_learner(workload, trial, rank) for rank in range(cluster.workers)]
    judge = workload.build_model(trial.seed)
    weights = [p.data for p in judge.parameters()]
    x, y = workload.test_x[:EVALUATED], workload.test_y[:EVALUATED]
    seen: list[float] = []
    curve: list[tuple[float, float, float, float]] = []  # smoothed accuracy, time, samples, rounds
    rounds, following, reached, diverged, given_up = 0, EVALUATE_EVERY, None, False, None

    def look(rank: int, t: float, samples: int) -> None:
        nonlocal rounds, following, reached, diverged, given_up
        if rank:
            return
        rounds += 1
        if most is not None and samples > most:
            given_up = most
            raise TargetReached
        if samples < following:
            return
        following = samples + EVALUATE_EVERY
        for weight, present in zip(weights, in_shape(learners[0].parameters, weights), strict=True):
            weight.copy_(present)
        with torch.no_grad():
            seen.append(float((judge(x).argmax(1) == y).float().mean()))
        if len(seen) >= SMOOTHED:
            curve.append((sum(seen[-SMOOTHED:]) / SMOOTHED, t, samples, rounds))
        if curve and curve[-1][0] >= target:
            reached = crossing(curve[-2:], target)
        diverged = samples > LOST_AFTER and seen[-1] < LOST_BELOW
        if reached or diverged or samples > MOST_SAMPLES:
            raise TargetReached

    try:
        simulate(
            create(trial.strategy.partition("@")[0]),
            cluster,
            micro_batch=micro_batch_of(trial.strategy),
            data=Data(len(workload.train)),
            seconds=1e9,
            learners=learners,
            on_applied=look,
        )
    except TargetReached:
        pass
    except PacelineError:  # no finite gradient any more
        diverged = True
    seconds, samples, at_round = reached or (None, None, rounds)
    return Outcome(seconds, samples, at_round, diverged, learners[0].noise.value, given_up)


def crossing(last: Sequence[tuple[float, float, float, float]], target: float) -> tuple[float, float, float]:
    """Time, samples and rounds at which the accuracy reached the target, on a line between the last two evaluations."""
    before, after = last[0], last[-1]
    part = (target - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 1.0
    t, samples, rounds = (a + part * (b - a) for a, b in zip(before[1:], after[1:], strict=True))
    return t, samples, rounds


def _learner(workload: Workload, trial: Trial, rank: int) -> ReplicaLearner:
    model = workload.build_model(trial.seed)

    def backward(model: nn.Module, indices: NDArray[Any]) -> None:
        chosen = torch.from_numpy(indices)
        workload.loss(model, (workload.train.x[chosen], workload.train.y[chosen])).backward()

    replica = Replica(model, workload.build_optimizer(model, optimizer=trial.optimizer, lr=trial.lr))
    return ReplicaLearner(replica, backward, samples=len(workload.train), rank=rank, seed=trial.seed)


@lru_cache(maxsize=256)
def time_of_round(strategy: str, cluster: str, comm: float, seed: int, rounds: float, traces: Path) -> float:
    """When the round ends in a cell, without gradients; of part of a round, that part of it later."""
    times: list[float] = [0.0]

    def look(rank: int, t: float, samples: int) -> None:
        if rank == 0:
            times.append(t)
            if len(times) > rounds + 1:
                raise TargetReached

    with contextlib.suppress(TargetReached):
        simulate(
            create(strategy.partition("@")[0]),
            cluster_of(cluster, comm, seed, traces, micro_batch_of(strategy) / MICRO_BATCH),
            micro_batch=micro_batch_of(strategy),
            seconds=1e9,
            on_applied=look,
        )
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
