"""Trials of many methods in many cells. Nothing is trained twice, and rates are tuned for all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Self

import torch

from paceline.simulator.cluster import Cluster
from parts.trials import Judge, Kept, Outcome, Trial, time_of_round, train

PATIENCE = 1.25  # while tuning, a rate is given up when it needs so many times the samples of the best so far


@dataclass(frozen=True)
class Cell:
    """Where methods are compared. `comm`: an all-reduce, in micro-batches of a device of speed 1."""

    model: str
    optimizer: str
    cluster: str
    comm: float
    data: str = "fashion-mnist"

    def trial(self, strategy: str, lr: float, seed: int, purpose: str = "target") -> Trial:
        return Trial(self.model, self.optimizer, strategy, lr, seed, self.cluster, self.comm, self.data, purpose)


@dataclass(frozen=True)
class Result:
    """A method in a cell, at its best: medians over the seeds, None when a seed did not reach the target; and the times
    of all seeds."""

    strategy: str
    lr: float
    seconds: float | None
    samples: float | None
    batch: float
    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What the trials of a benchmark have in common.

    Args:
        cluster_of: the cluster of a trial.
        judge_of: what ends a trial.
        as_trained: the trial that is trained in its stead, because its batches are the same.
        rates: learning rates to choose from, for all methods the same.
        seeds: trials of a method at the rate that was best with the first of them.
        folders: of data that need one.
        finalists: rates, of the best with the first seed, that are tried with all; the best of them counts.
    """

    cluster_of: Callable[[Trial], Cluster]
    judge_of: Callable[[Trial], Judge]
    as_trained: Callable[[Trial], Trial]
    rates: Callable[[Cell], Sequence[float]]
    seeds: int
    folders: Mapping[str, Path] = field(default_factory=dict)
    finalists: int = 1


class Comparison:
    """Runs what is not in the file yet, on several processes."""

    def __init__(self, out: Path, jobs: int, setting: Setting) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.kept, self.setting = Kept(out / "runs.jsonl"), setting
        self._pool = ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,))
        self._running: dict[Trial, Future[Outcome]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def outcome(self, trial: Trial, most: int | None = None) -> Outcome:
        """What the trial comes to in its cell; trained now if it was not yet."""
        trained = self.setting.as_trained(trial)
        self.start(trial, most)
        if trained in self._running:
            self.kept.add(trained, self._running.pop(trained).result())
        found = self.kept.get(trained)
        assert found is not None
        if trained == trial or found.seconds is None:
            return found
        return replace(found, seconds=time_of_round(trial.strategy, self.setting.cluster_of(trial), found.rounds))

    def start(self, trial: Trial, most: int | None = None) -> None:
        """Begin to train it, unless it was trained before, for at least so many samples."""
        trained = self.setting.as_trained(trial)
        found = self.kept.get(trained)
        enough = found is not None and (
            found.given_up_after is None or (most is not None and most <= found.given_up_after)
        )
        if not enough and trained not in self._running:
            cluster, judge = self.setting.cluster_of(trained), self.setting.judge_of(trained)
            folder = self.setting.folders.get(trained.data)
            self._running[trained] = self._pool.submit(train, trained, cluster, judge, folder, most)

    def outcomes(self, trials: Sequence[Trial]) -> list[Outcome]:
        """Of all, trained side by side."""
        for trial in trials:
            self.start(trial)
        return [self.outcome(trial) for trial in trials]

    def method(self, cell: Cell, strategies: Sequence[str]) -> Result:
        """The method at its best options and rate in the cell, over all seeds. A rate at which some seed does not reach
        the target is passed over for the next best."""
        ranking = self.tuned(cell, strategies)
        finalists: list[Result] = []
        for strategy, lr in ranking:
            trials = [cell.trial(strategy, lr, seed) for seed in range(self.setting.seeds)]
            outcomes = self.outcomes(trials)
            seconds = [each.seconds for each in outcomes if each.seconds is not None]
            samples = [each.samples for each in outcomes if each.samples is not None]
            if len(seconds) == len(trials):
                batch = sum(samples) / sum(each.rounds for each in outcomes)
                middle = statistics.median(seconds), statistics.median(samples)
                finalists.append(Result(strategy, lr, *middle, batch, tuple(seconds)))
            if len(finalists) == self.setting.finalists:
                break
        return min(finalists, key=lambda result: result.seconds or 0.0, default=Result(*ranking[0], None, None, 0.0))

    def tuned(self, cell: Cell, strategies: Sequence[str]) -> list[tuple[str, float]]:
        """Strategies and rates that reach the target with seed 0, the first to do so first."""
        found: list[tuple[float, str, float]] = []
        rates = self.setting.rates(cell)
        for strategy in strategies:
            most = None
            for lr in sorted(rates, key=lambda lr: abs(rates.index(lr) - 2)):  # from the middle outwards
                trial = cell.trial(strategy, lr, 0)
                outcome = self.outcome(trial, most)
                if outcome.samples is not None and outcome.seconds is not None:
                    most = min(most or self.setting.judge_of(trial).most, round(outcome.samples * PATIENCE))
                    found.append((outcome.seconds, strategy, lr))
        return [(strategy, lr) for _, strategy, lr in sorted(found)] or [(strategies[0], rates[2])]
