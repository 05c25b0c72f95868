"""A neighbour is lost, in virtual time: what the others mix in that round, and on which graph they go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.rules.graphs import ring
from paceline.rules.mixing import mixing_weights
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Crash
from paceline.strategies import create

Play = Callable[..., Any]
LEARNING_RATE, MICRO_BATCH = 0.1, 8  # of `play`


def crashing(rank: int, at: float, workers: int = 4) -> Cluster:
    """Workers alike, a second for a micro-batch, of which one crashes."""
    return Cluster.from_speeds([1.0] * workers, micro_batch_seconds=1.0, faults=[Crash(rank=rank, at=at)])


def test_those_left_of_a_ring_take_their_mean_and_close_it(play: Play) -> None:
    """Rank 1 dies in the middle of its sixth micro-batch. Its model of that round is with its neighbours already: they
    mix it in. Then all meet, and go on as a ring of three."""
    starts = [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0]]
    played = play(create("d-psgd"), crashing(rank=1, at=5.5), start=starts, epochs=2)
    models, left = list(torch.tensor(starts, dtype=torch.float64)), (0, 2, 3)
    parts = {rank: played.own_steps(rank) for rank in left}
    parts[1] = [[each] for each in played.micro_batches[1]]

    def step(number: int, rank: int, mixed: torch.Tensor) -> torch.Tensor:
        total, count = played.sum_of(parts[rank][number])
        return mixed - LEARNING_RATE * total / count

    whole = torch.tensor(mixing_weights(ring(4)))
    for number in range(6):
        mixed = list(whole @ torch.stack(models))
        models = [
            model if (number, rank) == (5, 1) else step(number, rank, mixed[rank]) for rank, model in enumerate(models)
        ]
        for rank in left:
            torch.testing.assert_close(played.committed[rank][number], models[rank], rtol=1e-10, atol=1e-12)
    mean = torch.stack([models[rank] for rank in left]).mean(0)
    for rank in left:
        torch.testing.assert_close(played.committed[rank][6], mean, rtol=1e-10, atol=1e-12)
    models = [mean] * 3
    for number in range(6, 8):
        mixed = list(torch.tensor(mixing_weights(ring(3))) @ torch.stack(models))
        models = [step(number, rank, mixed[place]) for place, rank in enumerate(left)]
        for place, rank in enumerate(left):
            torch.testing.assert_close(played.committed[rank][number + 1], models[place], rtol=1e-10, atol=1e-12)
    assert played.ledger.complete and played.ledger.used == 400


@pytest.mark.parametrize("strategy", ["d-psgd:graph=star", "matcha:graph=star:budget=1.0", "ad-psgd:graph=star"])
def test_the_leaves_of_a_star_without_its_centre_mix_with_each_other(play: Play, strategy: str) -> None:
    played = play(create(strategy), crashing(rank=0, at=3.5), epochs=2)
    models = [sent for sent in played.sent if sent.what in ("model", "average")]
    assert all(0 in (sent.sender, sent.to) for sent in models if sent.t < 3.5)
    pairs = {frozenset((sent.sender, sent.to)) for sent in models if sent.t > 5.0}
    assert pairs == {frozenset(pair) for pair in ((1, 2), (2, 3), (1, 3))}
    assert played.ledger.complete and played.ledger.used == 400
    assert all(torch.equal(played.committed[rank][-1], played.committed[1][-1]) for rank in (2, 3))


def test_a_neighbour_does_not_wait_for_the_answer_of_a_lost_one(play: Play) -> None:
    """Of two, one dies with an answer due: the other goes on alone, and makes all steps that are left."""
    played = play(create("ad-psgd"), crashing(rank=1, at=2.5, workers=2), epochs=1)
    asked = [sent for sent in played.sent if sent.what == "average" and sent.sender == 0]
    assert asked and all(sent.t <= 3.0 for sent in asked), "whoever is alone asks nobody"
    steps = played.of_kind("step", rank=0)
    assert sum(event["samples"] for event in steps) == 200 - 2 * MICRO_BATCH
    assert [event["round"] for event in played.of_kind("applied", rank=0)] == [0, 1], (
        "they meet at the loss and at the end"
    )
