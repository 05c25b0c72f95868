"""Micro-batches of one round in one backward pass: the same sums, in less than half of the time.

A rank that adds up several micro-batches takes all of them at the parameters with which its round began. So the passes
may wait until somebody looks at the sum, and then be one. What is given up before that is never computed at all. In
virtual time nobody can tell the difference, but for the rounding.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.backends.flat import FlatSum, FreshGradient
from paceline.backends.replica_learner import ReplicaLearner
from paceline.node import Gradient


class DeferringLearner(ReplicaLearner):
    """Computes when it must. For models without randomness of their own, such as dropout."""

    def compute(self, samples: list[range]) -> Gradient:
        self.epoch = samples[-1].start // self._samples
        indices = np.concatenate([self._indices(part) for part in samples])
        return Gradient(Deferred(self, indices), len(indices), samples)

    def backward_at(self, parameters: Tensor, indices: NDArray[np.int64]) -> list[Tensor | None]:
        """The mean gradients over these items, at parameters that may no longer be those of now."""
        replica = self.replica
        moved = None if torch.equal(parameters, replica.parameters) else replica.parameters.clone()
        if moved is not None:
            replica.parameters.copy_(parameters)
        replica.drop_gradients()
        self._backward(replica.model, indices)
        gradient = replica.take_gradients(len(indices), [])
        if moved is not None:
            replica.parameters.copy_(moved)
        assert isinstance(gradient.values, FreshGradient)
        return gradient.values.parts


class Deferred(FreshGradient):
    """Gradients that nobody has looked at yet."""

    __slots__ = ("_indices", "_learner", "_parameters", "_parts")

    def __init__(self, learner: DeferringLearner, indices: NDArray[np.int64]) -> None:
        self._replica, self._learner, self._indices = learner.replica, learner, indices
        self._parameters = learner.parameters.clone()
        self._parts: list[Tensor | None] | None = None
        self.count = len(indices)

    @property
    def parts(self) -> list[Tensor | None]:  # type: ignore[override]  # worked out when asked for
        if self._parts is None:
            self._parts = self._learner.backward_at(self._parameters, self._indices)
        return self._parts

    def plus(self, other: FlatSum | FreshGradient) -> FlatSum | Deferred:  # type: ignore[override]  # no sum yet
        if not isinstance(other, Deferred) or not torch.equal(self._parameters, other._parameters):
            return super().plus(other)
        self._indices = np.concatenate([self._indices, other._indices])
        self.count = len(self._indices)
        return self
