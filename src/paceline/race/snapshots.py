"""Held-out metrics off the clock: copies of the parameters are kept while the race runs and evaluated after it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from paceline.backends.replica import in_shape
from paceline.workloads.workload import Workload

PER_RACE = 80  # how finely the time to a target can be told; each costs one copy of the parameters and one evaluation


class Snapshots:
    """Copies of flat parameters with the time and the samples that they stand for."""

    def __init__(self, workload: Workload, seed: int, seconds: float) -> None:
        self._workload, self._seed = workload, seed
        self._every = seconds / PER_RACE
        self._next = 0.0
        self._kept: list[tuple[float, int, Tensor]] = []

    def look(self, t: float, samples: int, parameters: Tensor) -> None:
        """Keep a copy if the last one is old enough."""
        if t >= self._next:
            self.take(t, samples, parameters)

    def take(self, t: float, samples: int, parameters: Tensor) -> None:
        self._kept.append((t, samples, parameters.detach().clone()))
        self._next = t + self._every

    def evaluate(self) -> Iterator[tuple[float, int, float, float]]:
        """Time, samples, metric and loss of every copy."""
        model = self._workload.build_model(self._seed)
        weights = [p.data for p in model.parameters()]
        for t, samples, parameters in self._kept:
            for weight, kept in zip(weights, in_shape(parameters, weights), strict=True):
                weight.copy_(kept)
            yield t, samples, *self._workload.evaluate(model)
