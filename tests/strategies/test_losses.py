"""Ranks crash, in virtual time, in strategies without servers: at every await, and at random. What one of those who are
left holds counts on all, what nobody holds is repeated, and every sample is used once."""

from __future__ import annotations

import os

import pytest

from paceline.control.membership import ON_NOTICE
from paceline.errors import PacelineError
from paceline.rules.shares import among, resized
from paceline.simulator.faults import Crash, Join, Leave
from paceline.strategies import create
from paceline.strategies.all_reduce import AllReduce
from paceline.testing_losses import SURVIVORS, Losses, check_losses, check_seeds, moments, play, starts

ONE_SEED = os.environ.get("PACELINE_SWARM_SEED")
SEEDS = 40  # `scripts/bench faults --swarm 10000` plays more
EVERY = 7  # of the moments; `scripts/bench faults --awaits` plays all


def admits(text: str) -> bool:
    return create(text).admits


@pytest.mark.parametrize("text", SURVIVORS)
def test_a_rank_may_crash_at_every_await(text: str) -> None:
    """Just before something happens, and just after: in turn, and a rank in turn."""
    strategy, losses = create(text), Losses()
    for turn, moment in enumerate(moments(strategy, losses)[::EVERY]):
        at, rank = moment + (1e-9 if turn % 2 else 0.0), turn % len(losses.speeds)
        check_losses(strategy, Losses(crashes=(Crash(at=at, rank=rank),), seed=turn))


@pytest.mark.parametrize("text", SURVIVORS)
def test_a_rank_may_be_told_to_leave_at_every_await(text: str) -> None:
    """It hands in its work and goes: nothing is dropped or lost, and the others hold the same bits."""
    strategy, losses = create(text), Losses()
    went = 0
    for turn, moment in enumerate(moments(strategy, losses)[:: 2 * EVERY]):
        at, rank = moment + (1e-9 if turn % 2 else 0.0), turn % len(losses.speeds)
        told = Losses(leaves=(Leave(at=at, rank=rank),), seed=turn)
        check_losses(strategy, told)
        _, events, _ = play(strategy, told)
        gone = [event for event in events if event["kind"] == "lost"]
        went += [(event["rank"], event["reason"]) for event in gone] == [(rank, ON_NOTICE)]
        computed = [event["t"] for event in events if event["kind"] == "compute" and event["rank"] == rank]
        assert max(computed, default=0.0) <= at, "after the notice it begins no micro-batch"
    assert went


def test_all_but_one_may_leave_and_one_crash_meanwhile() -> None:
    leaves = (Leave(at=0.3, rank=0), Leave(at=0.3, rank=2))
    for seed in range(10):
        crash = Crash(at=0.3 + 0.02 * seed, rank=3)
        check_losses(create("abs-sgd"), Losses((1.0, 0.7, 0.5, 0.25), (crash,), leaves, seed))


@pytest.mark.parametrize("text", [text for text in SURVIVORS if admits(text)])
def test_a_newcomer_takes_the_place_of_a_crashed_rank(text: str) -> None:
    """From a round on, with the same bits; nothing is lost, and nothing used twice."""
    strategy = create(text)
    came = 0
    for turn, moment in enumerate(moments(strategy, Losses())[:: 6 * EVERY]):
        at, rank = moment + (1e-9 if turn % 2 else 0.0), turn % 3
        joins = (Join(at=at + 0.03 * (turn % 4), rank=rank),)
        losses = Losses(crashes=(Crash(at=at, rank=rank),), seed=turn, epochs=2, joins=joins)
        check_losses(strategy, losses)
        _, events, parameters = play(strategy, losses)
        if starts(events, rank) > 1:
            came += 1
            assert all(parameters[each].equal(parameters[rank]) for each in range(3))
    assert came


@pytest.mark.parametrize("text", [text for text in SURVIVORS if admits(text)])
def test_a_further_rank_takes_part(text: str) -> None:
    """More than the run began with, from a round on and with the same bits; it may also be lost again."""
    strategy, speeds = create(text), (1.0, 0.7, 0.25)
    for turn, at in enumerate((0.1, 0.2)):
        crashes = (Crash(at=at + 0.2, rank=2),) if turn == 1 else ()
        losses = Losses(speeds, crashes, seed=turn, epochs=2, joins=(Join(at=at, rank=2),))
        check_losses(strategy, losses)
        _, events, parameters = play(strategy, losses)
        assert starts(events, 2) == 1 and {event["rank"] for event in events if event["t"] < at} == {0, 1}
        assert any(event["kind"] == "compute" and event["rank"] == 2 for event in events)
        assert crashes or all(each.equal(parameters[0]) for each in parameters)


@pytest.mark.parametrize("text", ["d-psgd:graph=0-1+1-2+2-3", "matcha:graph=0-1+2-3/1-2+0-3", "d-psgd:graph=torus"])
def test_a_further_rank_takes_part_where_the_graph_has_no_place_for_it(text: str) -> None:
    """Edges that were given by hand name no further rank, and five ranks are no torus."""
    losses = Losses((1.0, 1.0, 0.5, 0.5, 0.5), epochs=2, joins=(Join(at=0.1, rank=4),))
    check_losses(create(text), losses)
    assert starts(play(create(text), losses)[1], 4) == 1


def test_a_further_rank_in_the_place_of_a_lost_one_is_not_on_its_edges() -> None:
    """As many are here as before, and matchings that were given for those before are void."""
    joins, speeds = (Join(at=0.2, rank=4),), (1.0, 1.0, 0.5, 0.5, 0.5)
    losses = Losses(speeds, (Crash(at=0.1, rank=1),), epochs=2, joins=joins)
    check_losses(create("matcha:graph=0-1+2-3/1-2+0-3"), losses)


@pytest.mark.parametrize("seed", [719, 3596])
def test_nobody_is_let_in_when_the_others_have_finished(seed: int) -> None:
    """One of them leaves on notice while the last round is in flight, and so keeps the run open for rounds that nobody
    will begin any more."""
    check_seeds([seed])


def test_a_newcomer_may_crash_and_another_may_come() -> None:
    faults = {"crashes": (Crash(at=0.3, rank=1), Crash(at=0.8, rank=1)), "joins": (Join(at=0.4, rank=1),) * 2}
    for seed in range(3):
        check_losses(create("abs-sgd"), Losses(seed=seed, epochs=2, **faults))


class Closed(AllReduce):
    """All strategies that there are take newcomers."""

    admits = False


def test_a_strategy_that_takes_no_newcomers_says_so() -> None:
    with pytest.raises(PacelineError, match="The strategy all-reduce cannot take a newcomer into a running training"):
        play(Closed(), Losses(crashes=(Crash(at=0.1, rank=1),), joins=(Join(at=0.1, rank=1),)))


class Frail(AllReduce):
    """All strategies that there are go on without a rank."""

    survives = False


def test_nobody_can_leave_a_strategy_that_needs_all() -> None:
    with pytest.raises(PacelineError, match="Rank 1 cannot leave: the strategy all-reduce needs it"):
        play(Frail(), Losses(leaves=(Leave(at=0.1, rank=1),)))


@pytest.mark.parametrize("first", [int(ONE_SEED)] if ONE_SEED else range(0, SEEDS, 10))
def test_a_swarm_of_crashes(first: int) -> None:
    check_seeds([first] if ONE_SEED else range(first, first + 10))


def test_what_all_who_are_left_hold_counts_when_another_is_lost() -> None:
    """Seed 410 of a swarm: two had applied a round when the third crashed, and the simulator took it back."""
    crashes = Crash(at=0.8501, rank=1), Crash(at=0.47886, rank=0), Crash(at=0.4773, rank=3)
    losses = Losses(speeds=(0.5, 1.0, 0.5, 0.5), crashes=crashes, seed=410, latency=0.03)
    check_losses(create("all-reduce:micro_batches=2"), losses)


def test_what_those_who_are_through_hold_counts_when_another_is_lost() -> None:
    """Seed 850: two were through with the last meeting when a third crashed, and the simulator had it repeated."""
    crashes = Crash(at=0.98891, rank=0), Crash(at=0.97275, rank=1)
    losses = Losses(speeds=(1.0, 1.0, 0.25, 1.0, 1.0), crashes=crashes, seed=850, epochs=2, latency=0.03)
    check_losses(create("d-psgd"), losses)


def test_a_newcomer_gets_a_share_like_the_others() -> None:
    assert among((6, 0, 3), (0, 1, 2)) == (4, 3, 2)
    assert among((4, 4, 4), (0, 1, 2)) == (4, 4, 4)


def test_shares_of_a_lost_rank_go_to_the_others() -> None:
    shares = resized(among((4, 4, 2, 2), (0, 2, 3)), (1.0, 0.0, 2.0, 4.0), 0.05)
    assert shares == (8, 0, 3, 1), "the lost rank gets nothing, and the speeds of the others count"
