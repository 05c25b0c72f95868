"""All ranks of a parameter server meet in the middle of a run, as they do to save: what each brings, and how it goes
on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from paceline.backends.simulated_node import SimulatedNode
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.summary import account

Play = Callable[..., Any]
RATE = 0.02
PLAIN = partial(torch.optim.SGD, lr=RATE)
TIMES = (9.0, 23.0)
STRATEGIES = [
    "bsp",
    "ssp",
    "ssp:overlap=always:staleness=1",
    "dssp",
    "asp:compress=top-k:ratio=0.3",
    "gssp:grouping=0-1/2-3",
    "gssp:warm_up=1:parts=2:compress=gdtopk",
    "gssp:exchange=gradient:warm_up=2",
    "gssp:grouping=0/1-2/3:exchange=global",
    "gssp:grouping=1/0+2-3:exchange=global:overlap=always",
]


@contextmanager
def meetings(times: Sequence[float]) -> Iterator[None]:
    """Somebody calls all ranks together from these moments on."""

    def called(node: SimulatedNode) -> bool:
        return node.rounds < len(times) and node.now() >= times[node.rounds]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedNode, "called_together", property(called))
        yield


def train(play: Play, text: str, **options: Any) -> Any:
    strategy = create(text)
    alone = Cluster.from_speeds(
        (1.0, 0.7, 0.25, 0.5), micro_batch_seconds=1.0, jitter=LogNormal(0.2), network=Network(latency=0.2), seed=2
    )
    with meetings(TIMES):
        return play(strategy, replace(alone, servers=strategy.servers_for(4)), pieces=2, **options)


def met_at(played: Any) -> list[float]:
    """When all had met, for the last time at the end."""
    return [event["t"] for event in played.of_kind("applied", rank=0)]


@pytest.mark.parametrize("text", STRATEGIES)
def test_all_ranks_hold_one_model_when_they_meet_and_nothing_is_lost(play: Play, text: str) -> None:
    played = train(play, text, samples=192, epochs=3, optimizer=PLAIN)
    books = account(played.events)
    assert books.errors == () and books.in_flight == 0 and books.applied == 3 * 192 and books.discarded == 0
    assert played.ledger.complete and played.ledger.used == 3 * 192
    assert len(met_at(played)) == 3
    models = [played.committed[rank] for rank in range(4)]
    for number in range(3):
        assert all(torch.equal(own[number], models[0][number]) for own in models), "workers tell of meetings alone"
    if text != "bsp":  # whose last round may be of some workers only
        for number, end in enumerate(met_at(played)):
            close_to = played.start - RATE * sum_until(played, end)
            torch.testing.assert_close(models[0][number], close_to, rtol=1e-10, atol=1e-12)


def sum_until(played: Any, end: float) -> torch.Tensor:
    """Σ x/N of all micro-batches that were computed until then: plain SGD steps with all of them, also with what a
    compressor had kept back."""
    total = torch.zeros_like(played.start)
    for worker in range(4):
        computed = zip(played.of_kind("compute", worker), played.micro_batches[worker], strict=True)
        for event, (indices, point) in computed:
            if event["end"] <= end:
                total += played.gradient(point, indices) / 4
    return total


@pytest.mark.parametrize("text", STRATEGIES)
def test_after_a_meeting_everybody_goes_on_from_its_model(play: Play, text: str) -> None:
    """The first parameters that a server sends then are the mean, or are that and what came in after it."""
    played = train(play, text, samples=192, epochs=3, optimizer=PLAIN)
    first_server, looked_at = 4, 0
    for met, model in zip(met_at(played)[:2], played.committed[0], strict=False):
        for server in range(first_server, len(played.learners)):
            after = [m for m in played.sent if m.sender == server and m.what == "parameters" and m.t >= met]
            pushed = [m for m in played.sent if m.what in ("push", "window", "rest") and m.t >= met]
            for message in after:
                if message.t < min(m.t for m in pushed):
                    size = len(message.tensors[0])
                    first = 0 if size == 4 or (server - first_server) % 2 == 0 else 2
                    assert torch.equal(message.tensors[0], model[first : first + size])
                    looked_at += 1
    assert looked_at >= 8


def test_bsp_with_meetings_is_all_reduce(play: Play) -> None:
    options = {"samples": 192, "epochs": 3, "optimizer": partial(torch.optim.Adam, lr=RATE)}
    played = train(play, "bsp", **options)
    alone = Cluster.from_speeds((1.0, 0.7, 0.25, 0.5), micro_batch_seconds=1.0)
    expected = play(create("all-reduce"), alone, **options)
    assert len(met_at(played)) == 3
    torch.testing.assert_close(played.path[-1], expected.path[-1], rtol=1e-10, atol=1e-12)
