"""Every backend keeps the same contract, checked by the same probe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.backends.learners import Data
from paceline.backends.simulated import simulate
from paceline.launch.local import launch
from paceline.simulator.cluster import Cluster
from paceline.simulator.network import Network
from paceline.strategies.strategy import Strategy
from paceline.testing import MICRO_BATCH, SAMPLES, UNEQUAL, Trial, check_backend

PROCESS = """
import torch, paceline
from paceline.testing import BackendProbe, MICRO_BATCH, Trial
torch.manual_seed(0)
trial = Trial(BackendProbe(), speeds=(1.0,))
model = torch.nn.Linear(trial.x.shape[1], 1)
data = torch.utils.data.TensorDataset(trial.x, trial.y)
with paceline.Run(BackendProbe()) as run:
    loader = run.loader(data, micro_batch=MICRO_BATCH, epochs=20)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for x, y in loader:
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
"""


def test_the_simulated_backend() -> None:
    def play(strategy: Strategy) -> None:
        trial = Trial(strategy, speeds=UNEQUAL, epochs=3)
        cluster = Cluster.from_speeds(UNEQUAL, network=Network(latency=0.01))
        learners = [trial.learner(rank) for rank in range(len(UNEQUAL))]
        simulate(strategy, cluster, micro_batch=MICRO_BATCH, data=Data(SAMPLES, 3), learners=learners)

    check_backend(play)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_processes_backend(ranks: int, tmp_path: Path) -> None:
    def play(strategy: Strategy) -> None:
        outcome = launch([sys.executable, "-c", PROCESS], ranks, tmp_path, quiet=True)
        assert outcome.ok, outcome.last_words

    check_backend(play)
