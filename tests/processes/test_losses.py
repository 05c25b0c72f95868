"""A rank is killed, in strategies without servers: the others go on from the last round that counts, with the same
bits, and every sample is used once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.summary import account

Ranks = Callable[..., Any]
SAMPLES, MICRO_BATCH = 3 * 61, 4  # of `train_until_shot`
STRATEGIES = (
    "all-reduce",
    "all-reduce:compress=int8",
    "balanced",
    "abs-sgd",
    "abs-sgd:compress=fp16",
    "abs-sgd:delay_cure=acco",
    "rennala",
    "non-blocking:unfinished=finish:mini_batches=2",
    "local-sgd:steps=2",
    "adaptive-sgd:mega_batch=24",
    "adaptive-sgd:mega_batch=24:overlap",
    "elastic-averaging:steps=2",
    "crossbow",
)
ALONE = (
    "d-psgd",
    "matcha:graph=star",
    "ad-psgd",
    "non-blocking:topology=d-psgd:unfinished=finish:mini_batches=2",
    "non-blocking:topology=matcha:unfinished=finish:mini_batches=2",
)
"""Whose ranks step alone."""


def check(outcome: Any, victims: tuple[int, ...], nproc: int) -> None:
    check_end(outcome, victims, nproc)
    for rank in range(nproc):
        if rank not in victims:
            applied = [event for event in outcome.events if event["kind"] == "applied" and event["rank"] == rank]
            assert sum(event["samples"] for event in applied) == SAMPLES, "no sample is used twice, and none is lost"


def check_end(outcome: Any, victims: tuple[int, ...], nproc: int) -> None:
    assert outcome.codes == [-9 if rank in victims else 0 for rank in range(nproc)], "\n".join(outcome.outputs)
    living = [rank for rank in range(nproc) if rank not in victims]
    assert len({tuple(outcome.facts[rank]["final"]) for rank in living}) == 1, (
        "those who are left end with the same bits"
    )
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (SAMPLES, 0)
    assert not account(outcome.events).errors
    warned = [event["text"] for event in outcome.events if event["kind"] == "warning"]
    for victim in victims:
        assert sum(text.startswith(f"Rank {victim} was lost (") for text in warned) == 1, warned


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_run_goes_on_without_a_killed_rank(ranks: Ranks, strategy: str, victim: int) -> None:
    check(ranks("train_until_shot", 3, fails=True, strategy=strategy, victim=victim), (victim,), 3)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("strategy", ALONE)
def test_neighbours_go_on_without_a_killed_rank(ranks: Ranks, strategy: str, victim: int) -> None:
    """It dies in its fifth micro-batch: of its four steps those count that somebody has heard of. The others make the
    steps with all else, each once."""
    outcome = ranks("train_until_shot", 3, fails=True, strategy=strategy, victim=victim)
    check_end(outcome, (victim,), 3)
    steps = [event for event in outcome.events if event["kind"] == "step"]
    left = sum(event["samples"] for event in steps if event["rank"] != victim)
    assert SAMPLES - 4 * MICRO_BATCH <= left <= SAMPLES, "what counts of the lost rank is what it had stepped with"
    if strategy == "d-psgd":  # nobody is more than a round ahead of a neighbour
        assert left <= SAMPLES - 2 * MICRO_BATCH, "what its neighbours have heard of is not done again"
    assert len({event["round"] for event in outcome.events if event["kind"] == "applied"}) > 1, (
        "they met after the loss"
    )
