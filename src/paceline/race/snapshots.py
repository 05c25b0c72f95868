"""Held-out metrics off the clock: copies of the parameters are kept while the race runs and evaluated after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.backends.replica import in_shape
from paceline.workloads.workload import Workload

PER_RACE = 80  # how finely the time to a target can be told; each costs one copy of the parameters and one evaluation


class Snapshots:
    """Copies of flat parameters with the time and the samples that they stand for: the first after each of `PER_RACE`
    moments that are the same on all ranks."""

    def __init__(self, workload: Workload, seed: int, seconds: float) -> None:
        self._workload, self._seed = workload, seed
        self._every = seconds / PER_RACE
        self._kept: dict[int, tuple[float, int, Tensor]] = {}
        self._next = 0.0

    def look(self, t: float, samples: int, parameters: Callable[[], Tensor]) -> None:
        """Keep a copy if a moment has passed since the last one."""
        if t >= self._next:
            moment = int(t / self._every)
            self._kept[min(moment, PER_RACE)] = (t, samples, parameters().detach().clone())
            self._next = (moment + 1) * self._every

    def take(self, t: float, samples: int, parameters: Tensor) -> None:
        """Keep the last one."""
        self._kept[PER_RACE + 1] = (t, samples, parameters.detach().clone())

    def average(self, rank: int, ranks: int, add_up: Callable[[Tensor], Tensor]) -> None:
        """Where ranks step alone: the means of all ranks' models, each as of the time when the last of them was there.
        A rank that has none of a moment was in a long round, and its model was still the one of before.

        Args:
            rank, ranks: which one this is, and how many there are.
            add_up: adds a tensor over all ranks, which all call it equally often.
        """
        newest = self._kept[min(self._kept)]
        means: dict[int, tuple[float, int, Tensor]] = {}
        for moment in range(PER_RACE + 2):
            newest = self._kept.get(moment, newest)
            t, samples, parameters = newest
            told = torch.zeros(3, ranks, dtype=torch.float64)
            told[:, rank] = torch.tensor([moment in self._kept, t, samples])
            fresh, times, seen = add_up(told)
            if fresh.any():
                means[moment] = (float(times.max()), int(seen.max()), add_up(parameters / ranks))
        self._kept = means

    def evaluate(self) -> Iterator[tuple[float, int, float, float]]:
        """Time, samples, metric and loss of every copy."""
        model = self._workload.build_model(self._seed)
        weights = [p.data for p in model.parameters()]
        for _, (t, samples, parameters) in sorted(self._kept.items()):
            for weight, kept in zip(weights, in_shape(parameters, weights), strict=True):
                weight.copy_(kept)
            yield t, samples, *self._workload.evaluate(model)
