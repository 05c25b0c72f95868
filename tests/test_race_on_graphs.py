"""Races of strategies that step alone: on the graph of the cluster file, and judged by the mean of their models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from paceline.backends.replica_learner import ReplicaLearner
from paceline.backends.simulated_node import SimulatedNode
from paceline.node import WHOLE
from paceline.race import simulated, worker
from paceline.race.race import on_the_graph_of, run_race
from paceline.race.snapshots import PER_RACE, Snapshots
from paceline.race.spec import RaceSpec
from paceline.record import read_events
from paceline.simulator.cluster import Cluster
from paceline.simulator.cluster_file import parse_cluster
from paceline.strategies import create
from paceline.strategies.parameter_server import NOTHING
from paceline.workloads.synthetic import synthetic
from paceline.workloads.workload import Workload

STAR = """micro_batch_seconds = 0.05
[[devices]]
count = 4
[graph]
name = "star"
"""
MATCHED = """micro_batch_seconds = 0.05
[[devices]]
count = 4
[graph]
edges = [[0, 1], [1, 2], [2, 3]]
matchings = [[[0, 1], [2, 3]], [[1, 2]]]
"""


# ---- the graph of the cluster file


@pytest.mark.parametrize(
    ("strategy", "becomes"),
    [
        ("d-psgd", "d-psgd:graph=0-1+0-2+0-3"),
        ("matcha:budget=0.3", "matcha:budget=0.3:graph=0-1+0-2+0-3"),
        ("ad-psgd --seed=4", "ad-psgd --seed=4:graph=0-1+0-2+0-3"),
        ("non-blocking:topology=d-psgd", "non-blocking:topology=d-psgd:graph=0-1+0-2+0-3"),
        ("d-psgd:graph=ring", "d-psgd:graph=ring"),
        ("ad-psgd --graph=ring", "ad-psgd --graph=ring"),
        ("non-blocking", "non-blocking"),
        ("all-reduce", "all-reduce"),
    ],
)
def test_a_strategy_takes_the_clusters_graph_unless_it_names_one(strategy: str, becomes: str) -> None:
    cluster = parse_cluster(STAR)
    found = on_the_graph_of(cluster, strategy)
    assert found == becomes
    create(found)
    assert on_the_graph_of(Cluster.from_speeds([1.0] * 4), strategy) == strategy, "a cluster without a graph"


def test_matcha_takes_the_clusters_matchings_too() -> None:
    assert on_the_graph_of(parse_cluster(MATCHED), "matcha") == "matcha:graph=0-1+2-3/1-2"


@pytest.mark.parametrize(
    ("file", "edges"),
    [(STAR, {(0, 1), (0, 2), (0, 3)}), (MATCHED, {(0, 1), (1, 2), (2, 3)})],
    ids=["star", "matchings"],
)
def test_models_travel_along_the_edges_of_the_cluster_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, edges: set[tuple[int, int]]
) -> None:
    used = set[tuple[int, int]]()
    send = SimulatedNode.send

    def spy(node: SimulatedNode, to: int, kind: str, *tensors: Tensor) -> None:
        used.add((min(node.rank, to), max(node.rank, to)))
        send(node, to, kind, *tensors)

    monkeypatch.setattr(SimulatedNode, "send", spy)
    path = tmp_path / "cluster.toml"
    path.write_text(file)
    strategies = ("d-psgd", "matcha", "ad-psgd")
    spec = RaceSpec(strategies=strategies, cluster=str(path), workload="synthetic", backend="simulated", seconds=2.0)
    race = run_race(spec, tmp_path)
    assert used == edges
    assert [result["strategy"] for result in race["results"]] == list(strategies), "called as they were asked for"
    assert not race["failed"] and all(result["final_metric"] > 0.3 for result in race["results"])


def test_a_graph_that_a_strategy_names_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(STAR)
    raced: list[str] = []

    def look(spec: RaceSpec, workload: Workload, cluster: Cluster, strategy: str) -> Any:
        raced.append(strategy)
        return simulated.race_simulated(spec, workload, cluster, strategy)

    monkeypatch.setattr("paceline.race.race.race_simulated", look)
    spec = RaceSpec(
        strategies=("d-psgd:graph=ring", "all-reduce"),
        cluster=str(path),
        workload="synthetic",
        backend="simulated",
        seconds=0.5,
    )
    run_race(spec, tmp_path)
    assert raced == ["d-psgd:graph=ring", "all-reduce"]


# ---- snapshots of the mean


class Transparent:
    """A workload whose model is two numbers, and whose metric and loss are those numbers."""

    def build_model(self, seed: int) -> nn.Module:
        return nn.Linear(2, 1, bias=False)

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        metric, loss = next(model.parameters()).flatten().tolist()
        return metric, loss


class Ranks:
    """So many callers that wait for each other and get the sum of what all have brought."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.calls = ranks, [0] * ranks
        self._barrier, self._brought = threading.Barrier(ranks, timeout=60), [torch.zeros(0)] * ranks

    def add_up(self, rank: int) -> Callable[[Tensor], Tensor]:
        def together(tensor: Tensor) -> Tensor:
            self.calls[rank] += 1
            self._brought[rank] = tensor.clone()
            self._barrier.wait()
            total = torch.stack(self._brought).sum(0)
            self._barrier.wait()
            return total

        return together

    def average(self, kept: list[Snapshots], workers: int = 0) -> None:
        """The first so many are workers of a parameter server, and bring nothing."""
        threads = [
            threading.Thread(
                target=each.average,
                args=(rank, self.ranks, NOTHING if rank < workers else WHOLE, self.add_up(rank)),
            )
            for rank, each in enumerate(kept)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def snapshots(*looks: tuple[float, int, float, float], last: tuple[float, int, float, float]) -> Snapshots:
    """Of a rank that was looked at at these times, samples and parameters; one moment a second."""
    made = Snapshots(cast(Workload, Transparent()), seed=0, seconds=float(PER_RACE))
    for t, samples, *numbers in looks:
        made.look(t, samples, partial(torch.tensor, numbers))
    made.take(last[0], last[1], torch.tensor(last[2:]))
    return made


def test_the_mean_of_a_moment_is_of_the_models_that_the_ranks_had_then() -> None:
    kept = [
        snapshots((0.1, 8, 0.0, 9.0), (1.2, 30, 3.0, 0.0), (2.2, 50, 6.0, 0.0), last=(9.0, 90, 12.0, 3.0)),
        snapshots((0.4, 10, 3.0, 0.0), (2.9, 60, 9.0, 0.0), last=(9.5, 95, 12.0, 3.0)),
        snapshots((1.5, 35, 6.0, 3.0), (2.5, 55, 9.0, 6.0), last=(9.2, 92, 12.0, 3.0)),
    ]
    ranks = Ranks(3)
    ranks.average(kept)
    expected = [
        (1.5, 35, 3.0, 4.0),  # moment 0: the third had none yet, and counts with its first
        (1.5, 35, 4.0, 1.0),  # moment 1: the second was in a long round
        (2.9, 60, 8.0, 2.0),
        (9.5, 95, 12.0, 3.0),  # the end
    ]
    for each in kept:
        found = list(each.evaluate())
        assert [row[:2] for row in found] == [pytest.approx(row[:2]) for row in expected]
        assert [row[2:] for row in found] == [pytest.approx(row[2:]) for row in expected], "the same on all ranks"
    assert len(set(ranks.calls)) == 1, "all call equally often, or real ranks would wait for ever"


def test_moments_that_nobody_was_looked_at_in_have_no_mean() -> None:
    kept = [snapshots((0.0, 1, 1.0, 1.0), (50.5, 2, 2.0, 2.0), last=(60.0, 3, 3.0, 3.0)) for _ in range(2)]
    Ranks(2).average(kept)
    assert [row[:2] for row in kept[0].evaluate()] == [(0.0, 1), (50.5, 2), (60.0, 3)]


def test_a_race_that_begins_late_is_looked_at_to_its_end() -> None:
    """The clock of a real run begins with the launch, and ranks take seconds to come up."""
    late = 25.0
    times = [late + second for second in range(PER_RACE)]
    looked = [snapshots(*((t, int(t), t, 0.0) for t in times), last=(106.0, 106, 106.0, 0.0)) for _ in range(2)]
    assert [row[0] for row in looked[0].evaluate()] == [*times, 106.0]
    Ranks(2).average(looked)
    assert [row[0] for row in looked[0].evaluate()] == [*times, 106.0]


def test_who_brings_nothing_does_not_say_when_a_model_was_there() -> None:
    """Workers of a parameter server are not looked at before the end: with their time every target would be late."""
    kept = [
        snapshots(last=(9.0, 90, 7.0, 7.0)),
        snapshots((31.5, 40, 1.0, 0.0), (32.5, 60, 2.0, 0.0), last=(40.0, 95, 12.0, 3.0)),
        snapshots((31.2, 30, 3.0, 0.0), (32.9, 65, 4.0, 0.0), last=(41.0, 96, 12.0, 3.0)),
    ]
    ranks = Ranks(3)
    ranks.average(kept, workers=1)
    assert list(kept[0].evaluate()) == [(31.5, 40, 2.0, 0.0), (32.9, 65, 3.0, 0.0), (41.0, 96, 12.0, 3.0)]
    assert set(ranks.calls) == {2 + 2 + 2 + 2}, "two for the race, two for each moment"


def test_the_mean_of_one_rank_is_its_model() -> None:
    kept = snapshots((0.0, 1, 1.5, -1.0), (3.0, 9, 2.5, 0.0), last=(4.0, 12, 3.5, 1.0))
    before = list(kept.evaluate())
    kept.average(0, 1, WHOLE, lambda tensor: tensor.clone())
    assert list(kept.evaluate()) == before


# ---- judged by the mean


@pytest.mark.parametrize(("strategy", "alone"), [("d-psgd", True), ("ad-psgd", True), ("all-reduce", False)])
def test_a_simulated_race_looks_at_the_mean_of_all_models(
    monkeypatch: pytest.MonkeyPatch, strategy: str, alone: bool
) -> None:
    learners: list[ReplicaLearner] = []
    make, looks = simulated._learner, list[bool]()

    def collect(spec: RaceSpec, workload: Workload, rank: int) -> ReplicaLearner:
        learners.append(make(spec, workload, rank))
        return learners[-1]

    class Looking(Snapshots):
        def look(self, t: float, samples: int, parameters: Callable[[], Tensor]) -> None:
            models = torch.stack([learner.parameters for learner in learners])
            torch.testing.assert_close(parameters(), models.mean(0) if alone else models[0])
            looks.append(bool((models != models[0]).any()))
            super().look(t, samples, parameters)

    monkeypatch.setattr(simulated, "_learner", collect)
    monkeypatch.setattr(simulated, "Snapshots", Looking)
    spec = RaceSpec(
        strategies=(strategy,), speeds=(1.0, 0.5, 0.25), workload="synthetic", backend="simulated", seconds=1.0
    )
    events = simulated.race_simulated(spec, synthetic(200, 4, 3), spec.build_cluster(0.05), strategy)
    metrics = [event for event in events if event["kind"] == "metric"]
    assert len(metrics) > 3 and metrics[-1]["loss"] < metrics[0]["loss"]
    assert any(looks), "models that differ: of ranks that step alone, and of those that have not applied the round yet"


def test_a_worker_of_its_own_averages_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    spec = RaceSpec(strategies=("ad-psgd",), speeds=(1.0,), workload="synthetic", seconds=0.3)
    workload = synthetic(40, 4, 3)
    worker.train(spec, workload, "ad-psgd", partial(worker.emulated, spec, workload, 0.005))
    [folder] = tmp_path.rglob("events")
    metrics = [event for event in read_events(folder) if event["kind"] == "metric"]
    assert len(metrics) >= 2 and metrics[-1]["samples"] > 0
