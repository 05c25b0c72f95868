"""Held-out metrics off the clock: copies of the parameters are kept while the race runs and evaluated after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import nan

import torch
from torch import Tensor

from paceline.backends.flat import in_shape
from paceline.node import Share
from paceline.workloads.workload import Workload

PER_RACE = 80  # how finely the time to a target can be told; each costs one copy of the parameters and one evaluation

LAST = 2**62  # after all moments


def share_of(parameters: Tensor, share: Share) -> Tensor:
    """What a rank brings to the mean model, with zeros where it brings nothing."""
    part = torch.zeros_like(parameters)
    part[share.part] = parameters[share.part]
    return part


class Snapshots:
    """Copies of flat parameters with the time and the samples that they stand for: the first after each of some moments
    that are the same on all ranks. (The clock runs since the launch: a race may begin at any of them.)"""

    def __init__(self, workload: Workload, seed: int, seconds: float, per_race: int = PER_RACE) -> None:
        self._workload, self._seed = workload, seed
        self._every = seconds / per_race
        self._kept: dict[int, tuple[float, int, Tensor]] = {}
        self._next = 0.0

    def look(self, t: float, samples: int, parameters: Callable[[], Tensor]) -> None:
        """Keep a copy if a moment has passed since the last one."""
        if t >= self._next:
            moment = int(t / self._every)
            self._kept[moment] = (t, samples, parameters().detach().clone())
            self._next = (moment + 1) * self._every

    def take(self, t: float, samples: int, parameters: Tensor) -> None:
        """Keep the last one."""
        self._kept[LAST] = (t, samples, parameters.detach().clone())

    def average(self, rank: int, ranks: int, share: Share, add_up: Callable[[Tensor], Tensor]) -> None:
        """Where ranks step alone: the means of all ranks' models, each as of the time when the last of them was there.
        A rank that has none of a moment was in a long round, and its model was still the one of before. One that brings
        nothing to the mean, a worker of a parameter server, has no say in when that was.

        Args:
            rank, ranks: which one this is, and how many there are.
            share: what this rank brings to the mean.
            add_up: adds a tensor over all ranks, which all call it equally often.
        """
        newest = self._kept[min(self._kept)]
        models = int(add_up(torch.tensor([float(share.models)], dtype=torch.float64)))
        means: dict[int, tuple[float, int, Tensor]] = {}
        bounds = torch.zeros(2, ranks, dtype=torch.float64)
        looked_at = [moment for moment in self._kept if moment != LAST] or [0]
        bounds[:, rank] = torch.tensor([nan, nan] if share.empty else [min(looked_at), max(looked_at)])
        first, last = (each[~each.isnan()] for each in add_up(bounds))
        for moment in [*range(int(first.min()), int(last.max()) + 1), LAST]:
            newest = self._kept.get(moment, newest)
            t, samples, parameters = newest
            told = torch.zeros(3, ranks, dtype=torch.float64)
            if not share.empty:
                told[:, rank] = torch.tensor([moment in self._kept, t, samples], dtype=torch.float64)
            fresh, times, seen = add_up(told)
            if fresh.any():
                means[moment] = (float(times.max()), int(seen.max()), add_up(share_of(parameters, share) / models))
        self._kept = means

    def evaluate(self) -> Iterator[tuple[float, int, float, float]]:
        """Time, samples, metric and loss of every copy."""
        model = self._workload.build_model(self._seed)
        weights = [p.data for p in model.parameters()]
        for _, (t, samples, parameters) in sorted(self._kept.items()):
            for weight, kept in zip(weights, in_shape(parameters, weights), strict=True):
                weight.copy_(kept)
            yield t, samples, *self._workload.evaluate(model)
