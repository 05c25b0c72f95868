"""The loops that people write: mixed precision, accumulation, workers and collate functions, leaving early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import KINDS

from paceline.run.checkpoint import read
from paceline.strategies import create
from paceline.summary import account

SAMPLES = 90
Ranks = Callable[..., Any]


def assert_alike(outcome: Any) -> None:
    """The same parameters after the same rounds; of ranks that step alone, at the end."""
    alone = outcome.facts[0]["alone"]
    assert len({tuple(fact["after_round"][-1:] if alone else fact["after_round"]) for fact in outcome.facts}) == 1
    assert len({tuple(fact["final"]) for fact in outcome.facts}) == 1


def assert_whole(outcome: Any, epochs: int = 1) -> None:
    """Every sample went to one loop, all ranks are alike, and the books are right."""
    assert outcome.seen == Counter((epoch, index) for epoch in range(epochs) for index in range(SAMPLES))
    assert_alike(outcome)
    accounts = account(outcome.events)
    assert accounts.errors == () and accounts.in_flight == 0
    assert outcome.ledger["complete"]
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (accounts.applied, accounts.discarded)


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("skipped", [0, 3])
def test_mixed_precision_and_the_steps_that_a_scaler_skips(ranks: Ranks, strategy: str, skipped: int) -> None:
    outcome = ranks("train_scaled", 2, strategy=strategy, samples=SAMPLES, skipped=skipped)
    assert_whole(outcome)
    accounts = account(outcome.events)
    skips = outcome.facts[0]["skips"]
    assert accounts.computed == SAMPLES
    assert (skips > 0) == (skipped > 0)
    expected = sum(len(indices) for _, indices in outcome.facts[0]["steps"][:skips])
    assert accounts.discarded == expected, "each skipped micro-batch, and nothing else"
    assert accounts.applied == SAMPLES - expected


@pytest.mark.parametrize("tidy", [True, False])
@pytest.mark.parametrize("strategy", KINDS)
def test_two_micro_batches_a_step_count_both(ranks: Ranks, strategy: str, tidy: bool) -> None:
    outcome = ranks("train_accumulated", 2, strategy=strategy, samples=SAMPLES, tidy=tidy)
    assert_whole(outcome)
    accounts = account(outcome.events)
    odd = [len(fact["steps"][-1][1]) for fact in outcome.facts if len(fact["steps"]) % 2]
    assert accounts.computed == SAMPLES
    assert accounts.discarded == sum(odd), "what no step came for: the last one of a rank"
    for rank, fact in enumerate(outcome.facts):
        sizes = [len(indices) for _, indices in fact["steps"]]
        pairs = [sum(sizes[first : first + 2]) for first in range(0, len(sizes), 2)]
        steps = [event for event in outcome.events if event["kind"] == "compute" and event["rank"] == rank]
        assert [event["samples"] for event in sorted(steps, key=lambda event: event["t"])] == pairs


@pytest.mark.parametrize("strategy", KINDS)
def test_batches_from_worker_processes_and_a_collate_function(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train_collated", 2, strategy=strategy, samples=SAMPLES, epochs=2)
    assert_whole(outcome, epochs=2)


@pytest.mark.parametrize("strategy", KINDS)
def test_running_statistics_are_averaged_by_samples(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train_normalised", 3, strategy=strategy, samples=SAMPLES)
    assert_whole(outcome, epochs=2)
    assert len({tuple(fact["averaged"]) for fact in outcome.facts}) == 1
    trained = [fact for fact in outcome.facts if fact["own"]]
    own = torch.tensor([fact["own"] for fact in trained])
    seen = torch.tensor([float(len(fact["seen"])) for fact in trained])
    torch.testing.assert_close(torch.tensor(outcome.facts[0]["mean"]), (own * seen[:, None]).sum(0) / seen.sum())


@pytest.mark.parametrize("strategy", KINDS)
def test_a_checkpoint_in_every_round_holds_the_averaged_statistics(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train_normalised", 2, strategy=strategy, samples=SAMPLES, saving=True)
    assert_whole(outcome, epochs=2)
    assert len({tuple(fact["averaged"]) for fact in outcome.facts}) == 1
    newest = max(outcome.folder.glob("checkpoints/round-*"))
    saved = read(newest)
    assert saved.values["rounds"] == outcome.facts[0]["rounds"]
    assert saved.tensors["model"]["0.running_mean"].tolist() == outcome.facts[0]["mean"]


@pytest.mark.parametrize("strategy", KINDS)
def test_who_has_no_data_averages_its_statistics_when_the_others_do(ranks: Ranks, strategy: str) -> None:
    """The averaging is a collective beside the strategy's own: it must come at the same place on all ranks."""
    outcome = ranks("train_normalised", 2, strategy=strategy, samples=SAMPLES, saving=True, leaver=1)
    assert_whole(outcome, epochs=2)
    assert len({tuple(fact["averaged"]) for fact in outcome.facts}) == 1


@pytest.mark.parametrize(("workers", "stops"), [(0, (0, 1, 3)), (2, (1,))])
@pytest.mark.parametrize("strategy", KINDS)
def test_who_leaves_the_loop_early_leaves_the_samples_to_the_others(
    ranks: Ranks, strategy: str, workers: int, stops: tuple[int, ...]
) -> None:
    nproc = 2 + bool(create(strategy).servers_for(1))
    for after in stops:
        outcome = ranks(
            "train_leaving", nproc, strategy=strategy, samples=SAMPLES, leavers=[0], after=after, num_workers=workers
        )
        assert_whole(outcome)
        assert outcome.facts[0]["done"] <= after
        assert account(outcome.events).applied == SAMPLES


@pytest.mark.parametrize("strategy", KINDS)
def test_all_may_leave_early(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train_leaving", 3, strategy=strategy, samples=SAMPLES, leavers=[0, 1, 2], after=2)
    accounts = account(outcome.events)
    assert accounts.errors == () and accounts.in_flight == 0
    assert accounts.applied == sum(len(fact["seen"]) for fact in outcome.facts)
    assert set(outcome.seen.values()) == {1}
    assert_alike(outcome)


def test_a_strategy_of_ones_own_sends_messages_and_signals(ranks: Ranks) -> None:
    outcome = ranks("train_chatting", 3, samples=SAMPLES)
    assert_whole(outcome)
    for fact in outcome.facts:
        for sender in range(3):
            letters = [kind for who, kind, _ in fact["heard"] if who == sender]
            assert letters == [f"letter {number}" for number in range(7)], "in order, none lost"
        assert all(same for _, _, same in fact["heard"])


def test_who_waits_for_a_message_learns_that_its_sender_is_lost(ranks: Ranks) -> None:
    outcome = ranks("wait_for_a_letter", 2, fails=True, samples=SAMPLES)
    assert outcome.codes == [1, 1]
    assert "lost rank (rank 1: RuntimeError: the postman is ill)" in outcome.outputs[0]
