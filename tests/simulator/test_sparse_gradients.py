"""A table with sparse gradients learns as one with dense gradients does, whatever the strategy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated import Data, simulate
from paceline.record import MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.network import Network
from paceline.strategies import create

ROWS, SAMPLES, LENGTH = 40, 60, 5
CHANCE = torch.Generator().manual_seed(3)
BAGS = torch.randint(ROWS, (SAMPLES, LENGTH), generator=CHANCE)
VALUES = torch.rand(SAMPLES, LENGTH, generator=CHANCE)
CLASSES = BAGS.sum(1) % 3
STRATEGIES = ["all-reduce", "all-reduce:micro_batches=3", "balanced", "abs-sgd", "abs-sgd:delay_cure=none", "local-sgd"]


class Table(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.rows = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=sparse)
            self.output = nn.Linear(4, 3)

    def forward(self, bags: Tensor, values: Tensor) -> Tensor:
        logits: Tensor = self.output(torch.relu(self.rows(bags, per_sample_weights=values)))
        return logits


def classify(model: nn.Module, indices: NDArray[np.int64]) -> None:
    chosen = torch.from_numpy(indices)
    nn.functional.cross_entropy(model(BAGS[chosen], VALUES[chosen]), CLASSES[chosen]).backward()


def trained(strategy: str, sparse: bool, optimizer: str) -> tuple[Tensor, list[str]]:
    """The parameters of all ranks, and what was told."""
    learners = []
    for rank in range(3):
        model = Table(sparse)
        sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
        moving = sgd if optimizer == "sgd" else torch.optim.AdamW(model.parameters(), lr=0.01)
        learners.append(ReplicaLearner(Replica(model, moving), classify, samples=SAMPLES, rank=rank))
    network = Network(latency=0.05, bandwidth=1e6)
    cluster = Cluster.from_speeds([1.0, 1.0, 0.4], micro_batch_seconds=0.1, network=network)
    recorder = MemoryRecorder()
    simulate(
        create(strategy),
        cluster,
        micro_batch=4,
        data=Data(SAMPLES, epochs=4),
        seconds=1e9,
        learners=learners,
        recorder=recorder,
    )
    warnings = [event["text"] for event in recorder.events if event["kind"] == "warning"]
    return torch.stack([learner.parameters for learner in learners]), warnings


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sparse_and_dense_gradients_lead_to_the_same_model(strategy: str, optimizer: str) -> None:
    (sparse, told), (dense, silent) = (trained(strategy, kind, optimizer) for kind in (True, False))
    assert torch.allclose(sparse, dense, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(sparse[0], nn.utils.parameters_to_vector(Table(True).parameters()), atol=1e-2)
    assert all(torch.equal(sparse[0], each) for each in sparse)
    assert silent == [] and len(told) == 1 and "Sparse gradients become dense" in told[0]
