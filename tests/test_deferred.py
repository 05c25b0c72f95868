"""Micro-batches of a round in one backward pass, as benchmarks take them: the same training, but for the rounding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, simulate
from paceline.simulator.cluster import Cluster
from paceline.strategies import create

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from parts.deferred import DeferringLearner

SAMPLES = 192
STRATEGIES = (
    "all-reduce:micro_batches=4",
    "d-psgd:micro_batches=4",
    "non-blocking:mini_batches=4",
    "abs-sgd",
    "local-sgd:steps=4",
)


def trained(strategy: str, kind: type[ReplicaLearner]) -> tuple[list[Tensor], int]:
    """What all ranks end with, and how many backward passes it took."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    passes = 0

    def backward(model: nn.Module, indices: NDArray[np.int64]) -> None:
        nonlocal passes
        passes += 1
        nn.functional.cross_entropy(model(inputs[indices]), labels[indices]).backward()

    def learner(rank: int) -> ReplicaLearner:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return kind(Replica(model, optimizer), backward, samples=SAMPLES, rank=rank)

    cluster = Cluster.from_speeds((1.0, 1.0, 0.6, 0.25), micro_batch_seconds=1.0)
    learners: list[Any] = [learner(rank) for rank in range(cluster.workers)]
    simulate(create(strategy), cluster, micro_batch=4, data=Data(SAMPLES, 3), learners=learners)
    return [each.parameters for each in learners], passes


@pytest.mark.parametrize(
    "strategy",
    [
        "all-reduce:micro_batches=4",
        "d-psgd:micro_batches=4",
        "non-blocking:mini_batches=4",
        "abs-sgd",
        "local-sgd:steps=4",
    ],
)
def test_the_passes_of_a_round_may_be_one(strategy: str) -> None:
    expected, one_each = trained(strategy, ReplicaLearner)
    found, together = trained(strategy, DeferringLearner)
    for end, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(end, wanted, rtol=1e-9, atol=1e-11)
    assert together <= one_each
    if "micro_batches=4" in strategy:
        assert together < one_each / 2
