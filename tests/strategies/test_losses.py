"""Ranks crash, in virtual time, in strategies without servers: at every await, and at random. What one of those who are
left holds counts on all, what nobody holds is repeated, and every sample is used once."""

from __future__ import annotations

import os

import pytest

from paceline.rules.shares import among, resized
from paceline.simulator.faults import Crash
from paceline.strategies import create
from paceline.testing_losses import SURVIVORS, Losses, check_losses, check_seeds, moments

ONE_SEED = os.environ.get("PACELINE_SWARM_SEED")
SEEDS = 40  # `scripts/bench faults --swarm 10000` plays more
EVERY = 7  # of the moments; `scripts/bench faults --awaits` plays all


@pytest.mark.parametrize("text", SURVIVORS)
def test_a_rank_may_crash_at_every_await(text: str) -> None:
    """Just before something happens, and just after: in turn, and a rank in turn."""
    strategy, losses = create(text), Losses()
    for turn, moment in enumerate(moments(strategy, losses)[::EVERY]):
        at, rank = moment + (1e-9 if turn % 2 else 0.0), turn % len(losses.speeds)
        check_losses(strategy, Losses(crashes=(Crash(at=at, rank=rank),), seed=turn))


@pytest.mark.parametrize("first", [int(ONE_SEED)] if ONE_SEED else range(0, SEEDS, 10))
def test_a_swarm_of_crashes(first: int) -> None:
    check_seeds([first] if ONE_SEED else range(first, first + 10))


def test_shares_of_a_lost_rank_go_to_the_others() -> None:
    shares = resized(among((4, 4, 2, 2), (0, 2, 3)), (1.0, 0.0, 2.0, 4.0), 0.05)
    assert shares == (8, 0, 3, 1), "the lost rank gets nothing, and the speeds of the others count"
