"""A rank is killed, in strategies without servers: the others go on from the last round that counts, with the same
bits, and every sample is used once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.summary import account

Ranks = Callable[..., Any]
SAMPLES = 3 * 61  # of `train_until_shot`
STRATEGIES = (
    "all-reduce",
    "balanced",
    "abs-sgd",
    "abs-sgd:delay_cure=acco",
    "rennala",
    "non-blocking:unfinished=finish:mini_batches=2",
    "local-sgd:steps=2",
    "adaptive-sgd:mega_batch=24",
    "adaptive-sgd:mega_batch=24:overlap",
    "elastic-averaging:steps=2",
    "crossbow",
)


def check(outcome: Any, victims: tuple[int, ...], nproc: int) -> None:
    assert outcome.codes == [-9 if rank in victims else 0 for rank in range(nproc)], "\n".join(outcome.outputs)
    living = [rank for rank in range(nproc) if rank not in victims]
    assert len({tuple(outcome.facts[rank]["final"]) for rank in living}) == 1, (
        "those who are left end with the same bits"
    )
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (SAMPLES, 0)
    for rank in living:
        applied = [event for event in outcome.events if event["kind"] == "applied" and event["rank"] == rank]
        assert sum(event["samples"] for event in applied) == SAMPLES, "no sample is used twice, and none is lost"
    assert not account(outcome.events).errors
    warned = [event["text"] for event in outcome.events if event["kind"] == "warning"]
    for victim in victims:
        assert sum(text.startswith(f"Rank {victim} was lost (") for text in warned) == 1, warned


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_run_goes_on_without_a_killed_rank(ranks: Ranks, strategy: str, victim: int) -> None:
    check(ranks("train_until_shot", 3, fails=True, strategy=strategy, victim=victim), (victim,), 3)
