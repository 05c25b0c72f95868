"""Strategies on a graph talk to neighbours only, wait for neighbours only, and end together; with and without
tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.backends.simulated import Data, Simulation, simulate
from paceline.backends.simulated_node import SimulatedNode
from paceline.record import Event, MemoryRecorder
from paceline.rules.graphs import named
from paceline.rules.matcha import matcha
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Hang
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.summary import account

Play = Callable[..., Any]
MODEL_BYTES = 4 * 8  # four parameters in float64
ON_GRAPHS = [
    "d-psgd",
    "d-psgd:graph=star:micro_batches=2",
    "matcha",
    "matcha:graph=complete:budget=0.2",
    "non-blocking:topology=d-psgd",
    "non-blocking:topology=matcha:unfinished=finish",
    "non-blocking:topology=d-psgd:graph=star:mini_batches=3:carry",
]
ALL = [*ON_GRAPHS, "ad-psgd", "ad-psgd:graph=ring", *(f"{text}:momentum=acid" for text in ("d-psgd", "ad-psgd"))]


class Sent(NamedTuple):
    sender: int
    to: int
    kind: str
    number: int


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """Every message of a simulated run, in the order of sending."""
    found: list[Sent] = []
    send = SimulatedNode.send

    def spy(node: SimulatedNode, to: int, kind: str, *tensors: Tensor) -> None:
        what, _, number = kind.partition(" ")
        found.append(Sent(node.rank, to, what, int(number or -1)))
        send(node, to, kind, *tensors)

    monkeypatch.setattr(SimulatedNode, "send", spy)
    return found


def mixed(workers: int, seed: int = 4) -> Cluster:
    speeds = [(1, 0.7, 0.25, 0.5)[rank % 4] for rank in range(workers)]
    jitter, network = LogNormal(0.3), Network(latency=0.1)
    return Cluster.from_speeds(speeds, micro_batch_seconds=1.0, jitter=jitter, network=network, seed=seed)


def graph_name(text: str) -> str:
    options = dict(part.split("=") for part in text.split(":") if "=" in part)
    return options.get("graph", "ring")


# ---- who talks to whom


@pytest.mark.parametrize("text", ON_GRAPHS)
def test_a_round_sends_a_model_once_to_each_partner_and_to_nobody_else(text: str, sent: list[Sent]) -> None:
    simulate(create(text), mixed(6), micro_batch=4, data=Data(300, 1))
    graph = named(graph_name(text), 6)
    models = [each for each in sent if each.kind == "model"]
    assert max(Counter(models).values()) == 1, "once a round"
    drawn = matcha(graph, 0.2 if "budget" in text else 0.5) if "matcha" in text else None
    partners = defaultdict[tuple[int, int], set[int]](set)
    for sender, to, _, number in models:
        partners[sender, number].add(to)
    gone = {each.sender: each.number for each in sent if each.kind == "leaves"}
    for (rank, number), found in partners.items():
        expected = set(graph.neighbours(rank) if drawn is None else drawn.partners(rank, 0, number))
        missing = expected - found
        assert found <= expected and all(gone[other] < number for other in missing), "but those who have gone"
    assert len(models) > 20
    leaving = Counter((each.sender, each.to) for each in sent if each.kind == "leaves")
    assert leaving == Counter({pair: 1 for edge in graph.edges for pair in (edge, edge[::-1])})


@pytest.mark.parametrize(
    "text", ["d-psgd", "d-psgd:graph=star", "d-psgd:graph=complete", "non-blocking:topology=d-psgd"]
)
def test_the_record_tells_what_each_step_has_sent(play: Play, text: str) -> None:
    played = play(create(text), (1.0,) * 5, samples=200, epochs=2)
    degrees = named(graph_name(text), 5).degrees
    for rank in range(5):
        sizes = [event["bytes"] for event in played.of_kind("step", rank)]
        assert sizes[:-2] == [degrees[rank] * MODEL_BYTES] * len(sizes[:-2]), "less only when neighbours have gone"
    assert sum(event["bytes"] for kind in ("step", "join") for event in played.of_kind(kind)) == played.run.bytes_sent


def test_matcha_sends_its_budget_of_what_d_psgd_sends() -> None:
    def bytes_of(text: str) -> int:
        return simulate(create(text), Cluster.from_speeds([1.0] * 8), micro_batch=4, seconds=6.0).bytes_sent

    everything = bytes_of("d-psgd:graph=complete")
    for budget in (0.2, 0.5):
        assert bytes_of(f"matcha:graph=complete:budget={budget}") / everything == pytest.approx(budget, rel=0.15)


@pytest.mark.parametrize("text", ALL)
def test_all_meet_once_and_hold_the_same_bits(play: Play, text: str) -> None:
    played = play(create(text), mixed(5), samples=195)
    joins = played.of_kind("join")
    assert sorted(event["rank"] for event in joins) == list(range(5)), "no other round of all is needed"
    assert {event["samples"] for event in joins} == {0} and {e["samples"] for e in played.of_kind("applied")} == {0}
    for rank in range(5):
        assert torch.equal(played.committed[rank][-1], played.committed[0][-1])
        assert torch.equal(played.learners[rank].parameters, played.committed[0][-1])


# ---- who waits for whom


def started(events: list[Event], rank: int) -> list[float]:
    return [event["t"] for event in events if event["kind"] == "compute" and event["rank"] == rank]


def test_a_worker_waits_for_its_neighbours_only() -> None:
    """Rank 0 stands still in its third round, of one second each. Who is d steps away can end d − 1 rounds more."""
    cluster = Cluster.from_speeds([1.0] * 8, micro_batch_seconds=1.0, faults=[Hang(rank=0, at=2.5, duration=100.0)])
    recorder = MemoryRecorder()
    simulate(create("d-psgd"), cluster, micro_batch=4, data=Data(4 * 8 * 12, 1), recorder=recorder)
    for rank in range(8):
        away = min(rank, 8 - rank)
        before = [t for t in started(recorder.events, rank) if t < 100.0]
        assert len(before) == 3 + away, f"rank {rank}"


def test_a_worker_that_has_no_partner_in_a_round_does_not_wait() -> None:
    """Of a star with a small budget the ends talk to the middle now and then; between they go on by themselves."""
    cluster = Cluster.from_speeds([0.2, *[1.0] * 4], micro_batch_seconds=1.0)
    often, rarely = (
        simulate(create(f"matcha:graph=star:budget={budget}"), cluster, micro_batch=4, data=Data(4 * 300, 1))
        for budget in (1.0, 0.02)
    )
    assert rarely.workers[1].waiting < 0.5 * often.workers[1].waiting


# ---- without tensors


@pytest.mark.parametrize("text", ALL)
def test_time_alone_can_be_simulated(text: str) -> None:
    recorder = MemoryRecorder()
    run = simulate(create(text), mixed(6), micro_batch=4, data=Data(203, 2), recorder=recorder)
    books = account(recorder.events)
    assert books.errors == () and books.in_flight == 0 and books.applied == run.samples_applied == 2 * 203
    assert run.samples_computed == run.samples_applied + run.samples_discarded
    assert sum(totals.applied for totals in run.workers) == 2 * 203
    assert run.bytes_sent == sum(e["bytes"] for e in recorder.events if e["kind"] in ("step", "join"))


@pytest.mark.parametrize("text", ALL)
def test_a_run_with_tensors_takes_the_same_time_as_one_without(play: Play, text: str) -> None:
    cluster = Cluster.from_speeds([1, 0.7, 0.25], micro_batch_seconds=1.0, jitter=LogNormal(0.3), seed=4)
    played = play(create(text), cluster, samples=200, epochs=1)
    alone = simulate(create(text), cluster, micro_batch=8, data=Data(200, 1))
    assert alone.seconds == played.run.seconds and alone.rounds == played.run.rounds
    assert [totals.samples for totals in alone.workers] == [totals.samples for totals in played.run.workers]


@settings(deadline=None, max_examples=30)
@given(
    text=st.sampled_from(ALL),
    speeds=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=6),
    samples=st.integers(1, 120),
    latency=st.sampled_from([0.0, 0.5, 7.0]),
)
def test_every_sample_is_used_once_however_few_there_are(
    text: str, speeds: list[float], samples: int, latency: float
) -> None:
    cluster = Cluster.from_speeds(speeds, micro_batch_seconds=1.0, network=Network(latency=latency))
    recorder = MemoryRecorder()
    run: Simulation = simulate(create(text), cluster, micro_batch=4, data=Data(samples, 2), recorder=recorder)
    books = account(recorder.events)
    assert run.samples_applied == books.applied == 2 * samples
    assert books.errors == () and books.in_flight == 0
