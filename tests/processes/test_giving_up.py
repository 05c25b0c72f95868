"""Micro-batches that are given up on real ranks: nothing of them counts, and their samples come again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from paceline.node import GIVEN_UP
from paceline.summary import account

SAMPLES, WAITS = 60, 3
Ranks = Callable[..., Any]


@pytest.mark.parametrize("abortable", [True, False])
def test_what_is_given_up_comes_again_and_counts_once(ranks: Ranks, abortable: bool) -> None:
    outcome = ranks("train_given_up", 2, samples=SAMPLES, abortable=abortable, waits=WAITS)
    first, second = outcome.facts
    assert second["waited"] == WAITS, "the fast rank had enough data to end so many rounds"
    assert first["after_round"] == second["after_round"] and first["applied"] == SAMPLES
    given_up = [event for event in outcome.events if event["kind"] == "discard"]
    assert {event["reason"] for event in given_up} == {GIVEN_UP}
    assert len([event for event in given_up if event["rank"] == 1]) >= WAITS
    extra = sum(outcome.seen.values()) - SAMPLES
    assert extra == sum(event["samples"] for event in given_up), "handed to a loop once more for each time given up"
    assert set(outcome.seen) == set(Counter((0, index) for index in range(SAMPLES)))
    books = account(outcome.events)
    assert books.errors == () and books.in_flight == 0
    assert (books.applied, books.computed, books.discarded) == (SAMPLES, SAMPLES + extra, extra)
    assert outcome.ledger["complete"]
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (SAMPLES, 0), "for the ledger they were never lost"
    ended_early = len(second["steps"]) - second["through"]
    assert ended_early >= WAITS if abortable else ended_early == 0, "between two layers, or not"
