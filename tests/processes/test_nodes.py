"""What a strategy asks of a real rank's node: every size of micro-batch, every verb, and the state that others see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kinds import ALL_TOGETHER

from paceline.node import GIVEN_UP
from paceline.summary import account

Ranks = Callable[..., Any]
REPLICAS = "local-sgd", "adaptive-sgd", "elastic-averaging", "crossbow"  # each rank has a model between two rounds
SAMPLES = 90


def assert_whole(outcome: Any, epochs: int) -> None:
    """Every sample went to one loop in each epoch, and record and ledger agree on what became of it."""
    assert outcome.seen == Counter((epoch, index) for epoch in range(epochs) for index in range(SAMPLES))
    books = account(outcome.events)
    assert books.errors == () and books.in_flight == 0
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (books.applied, books.discarded)


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_of_any_size(ranks: Ranks, workers: int) -> None:
    outcome = ranks("train_cut", 3, samples=SAMPLES, normalised=False, num_workers=workers)
    assert_whole(outcome, epochs=2)
    for fact in outcome.facts:
        assert fact["divisible"]
        for asked, indices in fact["asked"]:
            assert 1 <= len(indices) <= (8 if workers else min(8, asked)), "workers fetch ahead, of an earlier size"
    assert len({len(indices) for fact in outcome.facts for _, indices in fact["asked"]}) > 2


def test_a_model_with_batch_norm_keeps_whole_micro_batches(ranks: Ranks) -> None:
    outcome = ranks("train_cut", 3, samples=SAMPLES, normalised=True)
    assert_whole(outcome, epochs=2)
    assert not any(fact["divisible"] for fact in outcome.facts)
    sizes = Counter(len(indices) for fact in outcome.facts for _, indices in fact["asked"])
    assert sizes == {8: 22, SAMPLES % 8: 2}, "shorter only at the end of an epoch"
    assert {asked for fact in outcome.facts for asked, _ in fact["asked"]} == {8}


@pytest.mark.parametrize("nproc", [2, 3])
def test_the_ledger_of_a_run_that_asks_for_everything(ranks: Ranks, nproc: int) -> None:
    outcome = ranks("train_probed", nproc, samples=SAMPLES, epochs=8)
    assert set(outcome.seen) == {(epoch, index) for epoch in range(8) for index in range(SAMPLES)}
    books = account(outcome.events)
    assert books.errors == () and books.in_flight == 0 and outcome.ledger["complete"]
    given_up = [event["samples"] for event in outcome.events if event.get("reason") == GIVEN_UP]
    assert sum(outcome.seen.values()) == 8 * SAMPLES + sum(given_up), "what is given up comes again, and nothing else"
    assert books.computed == 8 * SAMPLES + sum(given_up)
    discarded = books.discarded - sum(given_up)
    assert discarded > 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (books.applied, discarded)


@pytest.mark.parametrize("strategy", [*ALL_TOGETHER, "abs-sgd:delay_cure=acco", "abs-sgd:min_micro_batches=3"])
def test_the_state_in_the_middle_of_training_is_the_committed_one(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train_looking", 2, strategy=strategy, samples=SAMPLES)
    first, *_ = outcome.facts
    after = [first["start"], *first["after_round"]]
    moved = 0
    for fact in outcome.facts:
        for rounds, state, parameters in fact["states"]:
            moved += parameters != after[rounds]
            if strategy not in REPLICAS:
                assert state == after[rounds], "also while the rank computes elsewhere"
    assert (moved > 0) == strategy.startswith(("abs-sgd", *REPLICAS))
