"""Local SGD: steps alone, averages by samples, and as many steps as the speed allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import AllReduce, LocalSgd, create
from paceline.summary import account

Play = Callable[..., Any]
MIXED = Cluster.from_speeds(
    [1, 0.7, 0.25], micro_batch_seconds=1.0, jitter=LogNormal(0.3), network=Network(latency=0.1), seed=4
)


@pytest.mark.parametrize("workers", [1, 4])
def test_averaging_after_every_step_of_plain_sgd_is_all_reduce(play: Play, workers: int) -> None:
    local, together = (play(strategy, (1,) * workers) for strategy in (LocalSgd(steps=1), AllReduce()))
    rounds = 2 * 200 // (8 * workers)
    for one, other in zip(local.path[: rounds + 1], together.path[: rounds + 1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("by_speed", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_models_are_averaged_by_samples_and_momentum_stays_where_it_is(
    play: Play, momentum: float, by_speed: bool
) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.02, momentum=momentum)
    played = play(LocalSgd(steps=3, by_speed=by_speed), MIXED, optimizer=optimizer, samples=195)
    parts = [played.contributions(rank) for rank in range(3)]
    velocities = [torch.zeros(4, dtype=torch.float64) for _ in range(3)]
    common, weights_seen = played.start, set()
    for number, committed in enumerate(played.committed[0]):
        models, weights = [], []
        for rank in range(3):
            own = common
            for indices, point in parts[rank][number]:
                torch.testing.assert_close(point, own, rtol=1e-11, atol=1e-13)
                velocities[rank] = momentum * velocities[rank] + played.gradient(own, indices)
                own = own - 0.02 * velocities[rank]
            models.append(own)
            weights.append(sum(len(indices) for indices, _ in parts[rank][number]))
        if sum(weights):
            common = sum(w * model for w, model in zip(weights, models, strict=True)) / sum(weights)
        weights_seen.add(tuple(weights))
        torch.testing.assert_close(committed, common, rtol=1e-11, atol=1e-13)
    assert len(weights_seen) > 1, "a short micro-batch at the end of an epoch weighs less"
    for other in played.committed[1:]:
        assert all(torch.equal(*pair) for pair in zip(played.committed[0], other, strict=True))


def steps_of(played: Any, rank: int) -> list[int]:
    return [len(part) for part in played.contributions(rank)]


def test_everybody_makes_the_same_number_of_steps(play: Play) -> None:
    played = play(LocalSgd(steps=4), (1, 1, 0.5, 0.25), epochs=4, samples=320)
    assert all(steps_of(played, rank)[:9] == [4] * 9 for rank in range(4))


def test_by_speed_steps_are_in_proportion_to_it_and_nobody_waits(play: Play) -> None:
    played = play(LocalSgd(steps=8, by_speed=True), (1, 1, 0.5, 0.25), epochs=8, samples=320)
    for rank, expected in enumerate((8, 8, 4, 2)):
        steps = steps_of(played, rank)
        assert steps[0] == 8, "speeds are not known yet"
        assert steps[1:13] == [expected] * 12
    joins = [{event["t"] for event in played.of_kind("join") if event["round"] == number} for number in range(1, 13)]
    assert all(max(times) - min(times) < 1e-9 for times in joins)


def test_who_is_very_slow_makes_one_step(play: Play) -> None:
    played = play(LocalSgd(steps=3, by_speed=True), (1, 0.05), epochs=4)
    assert set(steps_of(played, 1)[1:5]) == {1}


@pytest.mark.parametrize("text", ["local-sgd", "local-sgd:steps=3:by_speed", "local-sgd:steps=1000"])
def test_all_samples_count_and_the_end_is_common(play: Play, text: str) -> None:
    played = play(create(text), MIXED)
    books = account(played.events)
    assert not books.errors and books.in_flight == 0 and books.applied == 400 and played.run.samples_discarded == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("local-sgd:steps=0", "steps=0.*at least 1"),
        ("local-sgd:steps=-3", "steps=-3.*at least 1"),
        ("local-sgd:steps=2.5", "steps.*cannot be '2.5'"),
        ("local-sgd:by_speed=perhaps", "by_speed.*cannot be 'perhaps'"),
    ],
)
def test_wrong_options_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(PacelineError, match=complaint):
        create(text)
