"""LB-BSP: the round's batch is fixed, the shares are in samples, and all finish together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from paceline.backends.simulated import Data, simulate
from paceline.errors import PacelineError
from paceline.record import MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import Balanced, create

Play = Callable[..., Any]
SPEEDS = (1.0, 1.0, 0.5, 0.25)


@pytest.mark.parametrize("jitter", [None, LogNormal(0.3)], ids=["even", "jitter"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_batch_of_a_round_is_exactly_what_it_should_be(play: Play, micro_batches: int, jitter: Any) -> None:
    cluster = Cluster.from_speeds(SPEEDS, micro_batch_seconds=1.0, jitter=jitter, seed=2)
    played = play(Balanced(micro_batches=micro_batches), cluster, epochs=10)
    rounds = [samples for samples in played.batches if samples]
    last = sum(1 for samples in itertools.accumulate(rounds) if samples <= 2000 - 2 * 32 * micro_batches)
    assert last > 8 and set(rounds[:last]) == {32 * micro_batches} and sum(rounds) == 2000
    shares = {event["own"] for event in played.of_kind("applied", rank=3)[1:last]}
    assert jitter is None or any(share % 8 for share in shares), "shares are in samples, not in micro-batches"


@pytest.mark.parametrize("latency", [0.0, 0.01])
def test_a_round_takes_its_batch_over_the_sum_of_speeds(latency: float) -> None:
    """128 samples at 2.75 · 32 a second, and no worker more than a sample off; then all wait for the network."""
    recorder = MemoryRecorder()
    cluster = Cluster.from_speeds(SPEEDS, micro_batch_seconds=1.0, network=Network(latency=latency))
    simulate(Balanced(), cluster, seconds=60.0, recorder=recorder)
    applied = [event for event in recorder.events if event["kind"] == "applied" and event["rank"] == 0]
    lengths = [after["t"] - before["t"] for before, after in itertools.pairwise(applied)][1:-2]
    ideal, a_sample_of_the_slowest = 4 / 2.75, 4 / 32
    assert len(lengths) > 20
    assert all(ideal <= each - 6 * latency + 1e-9 < ideal + a_sample_of_the_slowest for each in lengths)
    own = {e["rank"]: e["own"] for e in recorder.events if e["kind"] == "applied" and e["round"] == 5}
    assert own == {0: 47, 1: 47, 2: 23, 3: 11}


def test_a_round_is_plain_sgd_on_the_joined_batch(play: Play) -> None:
    cluster = Cluster.from_speeds(SPEEDS, jitter=LogNormal(0.3), seed=2)
    played = play(Balanced(), cluster, optimizer=partial(torch.optim.SGD, lr=0.1))
    for number, mean in enumerate(played.means()):
        expected = played.path[number] - 0.1 * mean
        torch.testing.assert_close(played.path[number + 1], expected, rtol=1e-12, atol=1e-14)
    assert played.ages() == {0}


def test_within_the_dead_band_shares_stay_equal(play: Play) -> None:
    played = play(Balanced(dead_band=0.9), SPEEDS)
    assert {event["own"] for event in played.of_kind("applied")[:40]} == {8}


def test_a_run_without_data_ends_at_once() -> None:
    assert simulate(Balanced(), Cluster.from_speeds(SPEEDS), data=Data(10, epochs=0)).rounds == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("balanced:micro_batches=0", "micro_batches=0.*at least 1"),
        ("balanced:micro_batches=-2", "micro_batches=-2.*at least 1"),
        ("balanced:dead_band=-0.1", "dead_band=-0.1.*at least 0"),
        ("balanced:dead_band=nan", "dead_band=nan.*at least 0"),
    ],
)
def test_wrong_options_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(PacelineError, match=complaint):
        create(text)
