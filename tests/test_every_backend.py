"""Every backend keeps the same contract, checked by the same probe."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from paceline.backends.simulated import simulate
from paceline.backends.sources import Data
from paceline.launch.local import launch
from paceline.node import GIVEN_UP
from paceline.record import Event, MemoryRecorder, read_events
from paceline.simulator.cluster import Cluster
from paceline.simulator.network import Network
from paceline.strategies.strategy import Strategy
from paceline.summary import account
from paceline.testing import DISCARDED, MICRO_BATCH, SAMPLES, UNEQUAL, WARNED, Trial, check_backend

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


def assert_told(events: list[Event], ranks: int, samples: int) -> None:
    """The record of a probed run says what the probe did, and its books are right."""
    books = account(events)
    assert books.errors == () and books.in_flight == 0
    discards = [event for event in events if event["kind"] == "discard"]
    assert {event["reason"] for event in discards} <= {DISCARDED, GIVEN_UP}
    again = sum(event["samples"] for event in discards if event["reason"] == GIVEN_UP)
    assert books.computed - again == books.applied + books.discarded - again == samples
    dropped = [(event["rank"], event["samples"]) for event in discards if event["reason"] == DISCARDED]
    assert {rank for rank, count in dropped if count} == set(range(ranks))
    assert [event["text"] for event in events if event["kind"] == "warning"] == [WARNED]
    for rank in range(ranks):
        rounds = [event["round"] for event in events if event["kind"] == "applied" and event["rank"] == rank]
        joined = [event["round"] for event in events if event["kind"] == "join" and event["rank"] == rank]
        assert rounds == joined == list(range(len(rounds))), "each once, also those that share a step"


def test_the_simulated_backend() -> None:
    recorder, used = MemoryRecorder(), Counter[int]()

    def play(strategy: Strategy) -> None:
        trial = Trial(strategy, speeds=UNEQUAL, epochs=5, used=used)
        cluster = Cluster.from_speeds(UNEQUAL, network=Network(latency=0.01))
        learners = [trial.learner(rank) for rank in range(len(UNEQUAL))]
        simulate(
            strategy, cluster, micro_batch=MICRO_BATCH, data=Data(SAMPLES, 5), learners=learners, recorder=recorder
        )

    check_backend(play)
    assert used == Counter(dict.fromkeys(range(SAMPLES), 5)), "every sample once an epoch, whatever the sizes"
    assert_told(recorder.events, len(UNEQUAL), 5 * SAMPLES)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_processes_backend(ranks: int, tmp_path: Path) -> None:
    def play(strategy: Strategy) -> None:
        outcome = launch([sys.executable, "-c", PROCESS], ranks, tmp_path, quiet=True)
        assert outcome.ok, outcome.last_words

    check_backend(play)
    assert_told(read_events(tmp_path / "events"), ranks, 20 * SAMPLES)
