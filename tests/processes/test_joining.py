"""A newcomer takes the place of a lost rank in a running training: from a round on it holds the same bits as all
others, and every sample is used once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.run.checkpoint import read_latest
from paceline.summary import account

Ranks = Callable[..., Any]
SAMPLES, EPOCHS = 61, 20  # of `train_with_newcomers`
EACH_WAY_OF_ADDING_UP = (
    "all-reduce",
    "abs-sgd:delay_cure=acco",
    "rennala",
    "non-blocking:unfinished=finish:mini_batches=2",
    "local-sgd:steps=2",
    "all-reduce:compress=int8",
    "adaptive-sgd:mega_batch=24:overlap:momentum=0.5",
    "elastic-averaging:steps=2",
)
STRATEGIES = (
    *EACH_WAY_OF_ADDING_UP,
    "balanced",
    "abs-sgd",
    "abs-sgd:trigger=fastest",
    "abs-sgd:compress=fp16",
    "adaptive-sgd:mega_batch=24",
    "crossbow",
)
ALONE = ("d-psgd", "matcha:graph=star", "ad-psgd", "non-blocking:topology=d-psgd:unfinished=finish:mini_batches=2")
REPLICAS = ("local-sgd", "adaptive-sgd", "elastic-averaging", "crossbow")
"""Whose optimizers have a memory of their own on each rank."""


def check(outcome: Any, victims: list[int], own_momenta: bool = False) -> None:
    facts = outcome.facts
    assert [fact["joined"] for fact in facts] == [rank in victims for rank in range(len(facts))]
    alike = ["final", "rate", "applied"] + ["momenta"] * (not own_momenta)
    for what in alike:
        assert all(fact[what] == facts[0][what] for fact in facts), f"all end with the same {what}"
    stayed = next(rank for rank in range(len(facts)) if rank not in victims)
    for fact in facts:  # each holds what the others hold, after every round since it came
        assert fact["after_round"] == facts[stayed]["after_round"][-len(fact["after_round"]) :]
    assert all(fact["seen"] for fact in facts), "newcomers compute"
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (EPOCHS * SAMPLES, 0)
    applied = [event["samples"] for event in outcome.events if event["kind"] == "applied" and event["rank"] == stayed]
    assert sum(applied) == EPOCHS * SAMPLES, "no sample is used twice, and none is lost"
    assert not account(outcome.events).errors
    notes = [event["text"] for event in outcome.events if event["kind"] == "note"]
    assert any("takes part from round" in note for note in notes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_newcomer_takes_the_place_of_a_lost_rank(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train_with_newcomers", 3, replaced=1, strategy=strategy, victims=[1])
    check(outcome, [1], own_momenta=strategy.startswith(REPLICAS))


@pytest.mark.parametrize("strategy", EACH_WAY_OF_ADDING_UP)
def test_a_further_rank_takes_part(ranks: Ranks, strategy: str) -> None:
    """More than the run began with."""
    outcome = ranks("train_with_newcomers", 2, strategy=strategy, victims=[], further=1)
    check(outcome, [2], own_momenta=strategy.startswith(REPLICAS))


@pytest.mark.parametrize("strategy", ["all-reduce", "abs-sgd", "abs-sgd:delay_cure=acco", "d-psgd"])
def test_a_newcomer_comes_while_checkpoints_are_written(ranks: Ranks, strategy: str) -> None:
    """It may come between the wish for a checkpoint and the round after which it is taken."""
    outcome = ranks("train_with_newcomers", 3, replaced=1, strategy=strategy, victims=[1], saves=True)
    if strategy == "d-psgd":  # whose ranks' own steps cannot be compared
        assert outcome.facts[1]["joined"] and outcome.ledger["used"] == EPOCHS * SAMPLES
    else:
        check(outcome, [1])
    assert read_latest(outcome.folder / "checkpoints")


def test_rank_0_and_another_are_replaced(ranks: Ranks) -> None:
    check(ranks("train_with_newcomers", 3, replaced=2, strategy="abs-sgd", victims=[0, 2]), [0, 2])


@pytest.mark.parametrize("killed", [(1, "waiting"), (1, "entering"), (0, "giving")], ids=lambda killed: killed[1])
def test_a_kill_in_the_middle_of_joining_leaves_the_run_going(ranks: Ranks, killed: tuple[int, str]) -> None:
    """Whoever dies, and a newcomer that has lost the one who was to give it the state, is replaced in turn."""
    outcome = ranks("train_with_newcomers", 3, replaced=4, strategy="all-reduce", victims=[1], killed=killed)
    check(outcome, sorted({1, killed[0]}))


@pytest.mark.parametrize("strategy", ALONE)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_newcomer_takes_the_place_of_a_lost_neighbour(ranks: Ranks, strategy: str, victim: int) -> None:
    """It begins with the mean of the models, on a graph with it; what its predecessor had used is not used again."""
    check_alone(ranks("train_with_newcomers", 3, replaced=1, strategy=strategy, victims=[victim]), victim)


@pytest.mark.parametrize("strategy", ["d-psgd:graph=0-1", *ALONE[1:]])
def test_a_further_neighbour_takes_part(ranks: Ranks, strategy: str) -> None:
    """On a graph with it, also where the graph was given edge by edge."""
    check_alone(ranks("train_with_newcomers", 2, strategy=strategy, victims=[], further=1), 2)


def check_alone(outcome: Any, victim: int) -> None:
    """One of three has come while the others trained."""
    facts = outcome.facts
    assert [fact["joined"] for fact in facts] == [rank == victim for rank in range(3)]
    assert all(fact["final"] == facts[0]["final"] for fact in facts) and all(fact["seen"] for fact in facts)
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (EPOCHS * SAMPLES, 0)
    assert not account(outcome.events).errors
    met = [event for event in outcome.events if event["kind"] == "applied" and event["rank"] == victim]
    assert len(met) > 0, "it was at a meeting"


SERVED = {"bsp": 1, "ssp:staleness=1": 2, "gssp:warm_up=2": 2}
"""Strategies, and how many servers each has; `ssp` has its model in two parts."""


def check_served(outcome: Any, victims: list[int], servers: range, further: int = 0) -> None:
    """Whoever was killed was replaced, and as many further ones have come."""
    facts = outcome.facts
    came = [*victims, *range(len(facts) - further, len(facts))]
    assert [fact["joined"] for fact in facts] == [rank in came for rank in range(len(facts))]
    for what in ("final", "rate", "applied"):
        assert all(fact[what] == facts[0][what] for fact in facts), f"all end with the same {what}"
    assert facts[0]["applied"] == EPOCHS * SAMPLES
    assert [bool(fact["seen"]) for fact in facts] == [rank not in servers for rank in range(len(facts))]
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (EPOCHS * SAMPLES, 0)
    books = account(outcome.events)
    unwritten = tuple(f"rank {victim} computed" for victim in victims)  # what it did last it took with it
    assert not [error for error in books.errors if not error.startswith(unwritten)]
    assert books.applied == EPOCHS * SAMPLES, "no sample is used twice, and none is lost"
    notes = [event["text"] for event in outcome.events if event["kind"] == "note"]
    for rank in came:
        assert any(note.startswith(f"Rank {rank} takes part from round") for note in notes)


@pytest.mark.parametrize("strategy", SERVED)
def test_a_newcomer_takes_the_place_of_a_lost_worker(ranks: Ranks, strategy: str) -> None:
    """It begins with the model of the run at a meeting; what the one before it had used is not used again."""
    servers = SERVED[strategy]
    outcome = ranks("train_with_newcomers", 3 + servers, servers=servers, replaced=1, strategy=strategy, victims=[1])
    check_served(outcome, [1], range(3, 3 + servers))


@pytest.mark.parametrize("strategy", ["asp:compress=top-k:ratio=0.5", "gssp:warm_up=2"])
def test_a_further_worker_takes_part(ranks: Ranks, strategy: str) -> None:
    servers = SERVED.get(strategy, 1)
    outcome = ranks("train_with_newcomers", 2 + servers, servers=servers, strategy=strategy, victims=[], further=1)
    check_served(outcome, [], range(2, 2 + servers), further=1)


@pytest.mark.parametrize("killed", [(1, "waiting"), (1, "entering"), (0, "giving")], ids=lambda killed: killed[1])
def test_a_kill_in_the_middle_of_joining_leaves_the_servers_going(ranks: Ranks, killed: tuple[int, str]) -> None:
    options = {"servers": 2, "strategy": "gssp:warm_up=2", "victims": [1], "killed": killed}
    outcome = ranks("train_with_newcomers", 5, replaced=4, **options)
    check_served(outcome, sorted({1, killed[0]}), range(3, 5))


@pytest.mark.parametrize(("strategy", "goes_on"), [("gssp:grouping=0-1/2", True), ("bsp", False)])
def test_a_lost_server_is_not_replaced(ranks: Ranks, strategy: str, goes_on: bool) -> None:
    """The others go on without it, or end, as they would have done."""
    outcome = ranks("train_until_shot", 5, servers=2, replaced=1, fails=True, strategy=strategy, victim=4)
    assert "Rank 4 is a server, and a server that was lost cannot be replaced" in outcome.outputs[4]
    assert "run.resume() goes on from the last checkpoint" in outcome.outputs[4]
    assert outcome.codes == ([0, 0, 0, 0, 1] if goes_on else [1] * 5), "\n".join(outcome.outputs)
    assert outcome.ledger["complete"] is goes_on
