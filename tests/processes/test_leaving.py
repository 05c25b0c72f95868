"""A rank is told to leave: it finishes its micro-batch, hands in its work, gives back its leases and goes. The others
go on with the same bits, and every sample is used once."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from paceline.control.membership import ON_NOTICE
from paceline.run import checkpoint
from paceline.summary import account

Ranks = Callable[..., Any]
SAMPLES, EPOCHS = 61, 3  # of `train_until_told`
STRATEGIES = (
    "all-reduce",
    "abs-sgd",
    "non-blocking:unfinished=finish:mini_batches=2",
    "local-sgd:steps=2",
    "adaptive-sgd:mega_batch=24:overlap",
    "elastic-averaging:steps=2",
    "ssp",
)


def check(outcome: Any, told: list[int], stay: list[int]) -> None:
    assert [fact["left"] for fact in outcome.facts] == [rank in told for rank in range(len(outcome.facts))]
    assert all(len(outcome.facts[rank]["steps"]) == 5 for rank in told), "no micro-batch comes after the notice"
    assert len({tuple(outcome.facts[rank]["final"]) for rank in stay}) == 1, "those who stay hold the same bits"
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (EPOCHS * SAMPLES, 0)
    assert outcome.seen == Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES)), (
        "nothing is computed twice: what was computed by who has left is used"
    )
    assert not account(outcome.events).errors
    gone = sorted((event["rank"], event["reason"]) for event in outcome.events if event["kind"] == "lost")
    assert gone == [(rank, ON_NOTICE) for rank in told]
    assert not [event for event in outcome.events if event["kind"] == "warning"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_run_goes_on_without_a_rank_that_was_told_to_leave(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train_until_told", 4 if strategy == "ssp" else 3, strategy=strategy, told=[1])
    check(outcome, [1], [rank for rank in range(len(outcome.facts)) if rank != 1])


def test_rank_0_and_another_may_leave_by_their_own_will(ranks: Ranks) -> None:
    check(ranks("train_until_told", 3, strategy="abs-sgd", told=[0, 2], by_hand=True), [0, 2], [1])


def test_the_handler_of_the_script_is_called_too(ranks: Ranks) -> None:
    outcome = ranks("train_until_told", 2, strategy="all-reduce", told=[1], handler=True)
    check(outcome, [1], [0])
    assert [fact["heard"] for fact in outcome.facts] == [[], [signal.SIGTERM]]
    assert all(fact["restored"] for fact in outcome.facts)


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_last_one_to_leave_leaves_a_checkpoint(ranks: Ranks, nproc: int) -> None:
    """With all that was computed: a resumed run has nothing to compute again."""
    outcome = ranks("train_until_told", nproc, strategy="all-reduce", told=list(range(nproc)))
    assert all(fact["left"] for fact in outcome.facts)
    found = checkpoint.newest([outcome.folder], must_exist=True)
    assert found is not None
    used = sum(stop - start for start, stop in found[1].values["used"])
    assert used == sum(outcome.seen.values()) == found[1].values["samples_applied"]
    weight = found[1].tensors["model"]["weight"].flatten().tolist()
    assert any(fact["final"][: len(weight)] == weight for fact in outcome.facts)


def test_who_is_needed_cannot_leave(ranks: Ranks) -> None:
    outcome = ranks("train_until_told", 2, servers=0, strategy="frail", told=[1], by_hand=True, fails=True)
    assert outcome.codes == [1, 1]
    assert "Rank 1 cannot leave the run." in outcome.outputs[1]
    assert "The strategy frail would need one of the ranks." in outcome.outputs[1]
