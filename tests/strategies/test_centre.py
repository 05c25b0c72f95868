"""Elastic averaging and CROSSBOW: replicas and their centre, by the papers' equations."""

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
from paceline.strategies import Crossbow, ElasticAveraging, create
from paceline.summary import account

Play = Callable[..., Any]
MIXED = Cluster.from_speeds(
    [1, 0.7, 0.25], micro_batch_seconds=1.0, jitter=LogNormal(0.3), network=Network(latency=0.1), seed=4
)
SLOWLY = partial(torch.optim.SGD, lr=0.02)
NEAR = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize(("steps", "elasticity"), [(1, 0.9), (3, 0.6), (4, 1.0)])
def test_elastic_averaging_is_its_equations(play: Play, steps: int, elasticity: float) -> None:
    played = play(ElasticAveraging(steps=steps, elasticity=elasticity), MIXED, optimizer=SLOWLY)
    parts = [played.contributions(rank) for rank in range(3)]
    centre, replicas = played.start, [played.start] * 3
    rho = elasticity / 3
    for number, committed in enumerate(played.committed[0]):
        for rank in range(3):
            for indices, point in parts[rank][number]:
                torch.testing.assert_close(point, replicas[rank], **NEAR)
                replicas[rank] = replicas[rank] - 0.02 * played.gradient(point, indices)
        moved = centre + rho * sum(replica - centre for replica in replicas)
        replicas = [replica - rho * (replica - centre) for replica in replicas]
        centre = moved
        torch.testing.assert_close(committed, centre, **NEAR)
    assert len(played.committed[0]) >= 5 and not torch.allclose(replicas[0], replicas[2], rtol=1e-3)
    assert all(
        torch.equal(*pair) for other in played.committed for pair in zip(played.committed[0], other, strict=True)
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_crossbow_is_its_equations(play: Play, momentum: float) -> None:
    played = play(Crossbow(momentum=momentum), MIXED, optimizer=SLOWLY)
    centre = before = played.start
    replicas = [played.start] * 3
    *committed, last = played.committed[0]
    for number, found in enumerate(committed):
        corrections = [(replica - centre) / 3 for replica in replicas]
        for rank in range(3):
            step = torch.zeros_like(centre)
            if number < len(played.micro_batches[rank]):
                indices, point = played.micro_batches[rank][number]
                torch.testing.assert_close(point, replicas[rank], **NEAR)
                step = 0.02 * played.gradient(point, indices)
            replicas[rank] = replicas[rank] - step - corrections[rank]
        centre, before = centre + sum(corrections) + momentum * (centre - before), centre
        torch.testing.assert_close(found, centre, **NEAR)
    torch.testing.assert_close(last, centre, **NEAR)
    assert len(committed) > 16
    assert all(
        torch.equal(*pair) for other in played.committed for pair in zip(played.committed[0], other, strict=True)
    )


def test_crossbows_average_travels_while_the_gradient_is_computed(play: Play) -> None:
    slow = Cluster.from_speeds([1, 1], micro_batch_seconds=1.0, network=Network(latency=0.4))
    played = play(Crossbow(), slow)
    assert sum(event["end"] - event["t"] for event in played.of_kind("wait", rank=0)) < 3.0, "25 rounds of 0.8 s"


@pytest.mark.parametrize("text", ["elastic-averaging", "elastic-averaging:steps=1000", "crossbow"])
def test_all_samples_count_and_the_end_is_common(play: Play, text: str) -> None:
    played = play(create(text), MIXED)
    books = account(played.events)
    assert not books.errors and books.in_flight == 0 and books.applied == 400 and played.run.samples_discarded == 0


def test_a_replica_that_is_lost_to_infinity_begins_again_from_the_centre(play: Play) -> None:
    """Its model overflows in a step, is left out of the mean, and its next gradients count again."""

    def steep(point: torch.Tensor, indices: Any) -> torch.Tensor:
        return torch.full_like(point, 1e308 if 17 in indices else 0.5)

    played = play(ElasticAveraging(steps=2), (1, 1), gradient=steep, optimizer=partial(torch.optim.SGD, lr=10.0))
    assert all(torch.isfinite(model).all() for model in played.path)
    assert played.run.samples_discarded > 0 and played.run.samples_applied > 300


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("elastic-averaging:steps=0", "steps=0.*at least 1"),
        ("elastic-averaging:elasticity=1.5", "elasticity=1.5.*at most 1"),
        ("crossbow:momentum=-1", "momentum=-1.0.*at least 0"),
    ],
)
def test_wrong_options_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(PacelineError, match=complaint):
        create(text)
