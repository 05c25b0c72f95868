"""Real ranks that step alone: every sample once, the same bits at the end, and meetings to save in the middle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.rules.order import order
from paceline.run.checkpoint import Checkpoint, read
from paceline.summary import account

SAMPLES, EPOCHS, RATE = 61, 2, 0.05
Ranks = Callable[..., Any]
AHEAD = "samples that were handed out before this rank's newest count as applied, though others still compute them"


def everything() -> Counter[tuple[int, int]]:
    return Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))


def assert_ended_alike(outcome: Any, used_before: int = 0) -> None:
    """The same bits on all ranks, and books that are right."""
    assert len({tuple(fact["final"]) for fact in outcome.facts}) == 1
    books = account(outcome.events)
    assert books.errors == () and books.in_flight == 0
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (used_before + books.applied, books.discarded)


def gradient(flat: list[float], indices: list[int]) -> Tensor:
    """Of the mean squared error, by hand."""
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3
    x = torch.cat([x, torch.ones(SAMPLES, 1, dtype=torch.float64)], dim=1)[indices]
    return 2 * x.T @ (x @ torch.tensor(flat, dtype=torch.float64) - y[indices]) / len(indices)


# ---- to the end


@pytest.mark.parametrize(
    ("strategy", "optimizer", "nproc"),
    [
        ("d-psgd", "sgd", 3),
        ("d-psgd:graph=star:momentum=quasi-global", "momentum", 4),
        ("matcha", "momentum", 4),
        ("matcha:graph=0-1/1-2:budget=0.7:micro_batches=2", "sgd", 3),
        ("ad-psgd", "momentum", 3),
        ("ad-psgd:graph=ring:momentum=acid", "sgd", 4),
        ("non-blocking:topology=d-psgd:unfinished=finish", "momentum", 3),
        ("non-blocking:topology=matcha:unfinished=finish:mini_batches=2:carry", "sgd", 4),
        ("d-psgd", "sgd", 1),
        ("ad-psgd", "adamw", 2),
    ],
)
def test_every_sample_is_used_once_and_all_end_with_the_same_bits(
    ranks: Ranks, strategy: str, optimizer: str, nproc: int
) -> None:
    outcome = ranks("train_meeting", nproc, strategy=strategy, optimizer=optimizer, slow={"1": 0.008})
    assert outcome.seen == everything()
    assert_ended_alike(outcome)
    assert {fact["applied"] for fact in outcome.facts} == {EPOCHS * SAMPLES}
    assert {fact["after_round"][-1] for fact in outcome.facts} == {outcome.facts[0]["after_round"][-1]}
    joins = [event for event in outcome.events if event["kind"] == "join"]
    assert [event["samples"] for event in joins] == [0] * nproc, "one meeting, at the end, and no other round of all"
    last = outcome.facts[0]["final"]
    before = torch.tensor([fact["meetings"][-1] for fact in outcome.facts if "meetings" in fact], dtype=torch.float64)
    assert nproc == 1 or len({fact["after_round"][0] for fact in outcome.facts}) > 1, "until then the models differ"
    if len(before) == nproc:  # on a busy machine a rank may come to its first micro-batch too late
        torch.testing.assert_close(torch.tensor(last, dtype=torch.float64), before.mean(0), rtol=1e-12, atol=1e-13)


def test_what_is_given_up_comes_again_and_counts_once(ranks: Ranks) -> None:
    """The default of Non-blocking SGD: a loop may see samples twice, the ledger counts them once."""
    outcome = ranks("train_meeting", 3, strategy="non-blocking:topology=d-psgd:mini_batches=3", slow={"1": 0.02})
    assert set(outcome.seen) == set(everything())
    assert len({tuple(fact["final"]) for fact in outcome.facts}) == 1
    books = account(outcome.events)
    assert books.errors == () and books.in_flight == 0 and books.applied == EPOCHS * SAMPLES
    assert outcome.ledger["complete"] and outcome.ledger["discarded"] == 0
    assert sum(outcome.seen.values()) == books.computed == EPOCHS * SAMPLES + books.discarded


def test_d_psgd_is_its_equation_on_real_ranks(ranks: Ranks) -> None:
    """Three ranks in a ring are all neighbours, each with the weight ⅓: x_i ← ⅓ Σ_j x_j − γ g_i(x_i)."""
    outcome = ranks("train_meeting", 3, strategy="d-psgd", slow={"0": 0.004, "2": 0.008})
    paths = [[fact["start"], *fact["path"]] for fact in outcome.facts]
    rounds = min(len(fact["steps"]) for fact in outcome.facts)
    assert rounds >= 5
    for number in range(rounds):
        mean = torch.tensor([path[number] for path in paths], dtype=torch.float64).mean(0)
        for fact, path in zip(outcome.facts, paths, strict=True):
            made_at, indices = fact["steps"][number]
            assert made_at == number, "one micro-batch a round"
            expected = mean - RATE * gradient(path[number], indices)
            found = torch.tensor(path[number + 1], dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_record_tells_steps_and_what_they_sent(ranks: Ranks) -> None:
    outcome = ranks("train_meeting", 3, strategy="d-psgd", epochs=1)
    for rank, fact in enumerate(outcome.facts):
        steps = [event for event in outcome.events if event["kind"] == "step" and event["rank"] == rank]
        assert [event["round"] for event in steps] == list(range(len(steps)))
        assert sum(event["samples"] for event in steps) == len(fact["seen"])
        assert {event["bytes"] for event in steps[:-3]} <= {2 * 4 * 8}, "four numbers to two neighbours"


def test_what_is_dropped_does_not_count_as_applied(ranks: Ranks) -> None:
    outcome = ranks("train", 2, strategy="ad-psgd", samples=SAMPLES, bad=5)
    applied = account(outcome.events).applied
    assert applied < EPOCHS * SAMPLES and {fact["applied"] for fact in outcome.facts} == {applied}


# ---- saving in the middle


def used_by(path: Path) -> list[tuple[int, int]]:
    """The (epoch, sample) pairs that a checkpoint says are used."""
    positions = [position for start, stop in read(path).values["used"] for position in range(start, stop)]
    orders = [order(0, epoch, SAMPLES) for epoch in range(EPOCHS)]
    return [(position // SAMPLES, int(orders[position // SAMPLES][position % SAMPLES])) for position in positions]


def flat(saved: Checkpoint) -> Tensor:
    return torch.cat([saved.tensors["model"]["weight"].flatten(), saved.tensors["model"]["bias"]])


@pytest.mark.parametrize(
    ("strategy", "before", "after"),
    [
        ("d-psgd", 3, 2),
        ("ad-psgd", 3, 4),
        ("matcha:momentum=quasi-global", 2, 3),
        ("non-blocking:topology=d-psgd:unfinished=finish:mini_batches=2", 3, 1),
    ],
)
def test_a_checkpoint_in_the_middle_is_the_mean_and_the_next_run_does_exactly_the_rest(
    ranks: Ranks, strategy: str, before: int, after: int
) -> None:
    slow = {"0": 0.01, "1": 0.015, "2": 0.01}  # so that each has some data, also on a busy machine
    options = {"strategy": strategy, "optimizer": "momentum", "slow": slow}
    first = ranks("train_meeting", before, **options, save_after={"0": 3})
    assert first.seen == everything() and {len(fact["meetings"]) for fact in first.facts} == {2}
    assert_ended_alike(first)
    [path] = (first.folder / "checkpoints").glob("round-*")
    saved = read(path)
    models = torch.tensor([fact["meetings"][0] for fact in first.facts], dtype=torch.float64)
    assert len({tuple(row) for row in models.tolist()}) == before
    torch.testing.assert_close(flat(saved), models.mean(0), rtol=1e-12, atol=1e-13)
    used = used_by(path)
    assert 0 < len(used) == len(set(used)) < EPOCHS * SAMPLES and set(used) <= set(first.seen)
    assert saved.values["rounds"] == first.facts[0]["met_at"][0] + 1, "of the rank that has written it"

    second = ranks("train_meeting", after, **options, resume=True)
    assert {fact["taken"] for fact in second.facts} == {str(path)}
    assert Counter(used) + second.seen == everything()
    assert_ended_alike(second, len(used))
    for fact in second.facts:
        if "start" in fact and fact["start_applied"] == saved.values["samples_applied"]:
            assert fact["start"] == flat(saved).tolist()
    if "quasi-global" in strategy:
        assert saved.tensors["strategy"]["quasi_global"].shape == (4,), "rank 0's: the others go on from it too"


def test_a_checkpoint_and_its_resumed_run_count_samples_exactly(ranks: Ranks) -> None:
    """A slow rank has early samples in its hands when the others are far ahead: they are not applied yet."""
    options = {"strategy": "ad-psgd", "slow": {"1": 0.2}}
    first = ranks("train_meeting", 3, **options, save_after={"0": 8})
    [path] = (first.folder / "checkpoints").glob("round-*")
    second = ranks("train_meeting", 2, **options, resume=True)
    assert {fact["applied"] for fact in second.facts} == {EPOCHS * SAMPLES}
    assert read(path).values["samples_applied"] == len(used_by(path))


def test_whoever_saves_and_however_often_all_meet(ranks: Ranks) -> None:
    """Two ranks ask, at their own times; the third learns of it by a signal."""
    outcome = ranks("train_meeting", 3, strategy="ad-psgd", save_after={"0": 2, "2": 5}, slow={"1": 0.01})
    assert outcome.seen == everything()
    assert_ended_alike(outcome)
    met = [len(fact["meetings"]) for fact in outcome.facts]
    assert len(set(met)) == 1 and 2 <= met[0] <= 3, "two at the same time may share a meeting"
    newest = read(max((outcome.folder / "checkpoints").glob("round-*")))
    assert newest.values["strategy_name"] == "ad-psgd"


# ---- schedules


@pytest.mark.parametrize(
    ("strategy", "scheduled"), [("ad-psgd", "micro-batch"), ("ad-psgd", "epoch"), ("d-psgd", "epoch")]
)
def test_a_schedule_stepped_in_the_loop_moves_by_samples(ranks: Ranks, strategy: str, scheduled: str) -> None:
    """Of so many samples that the first call of a loop is known long before half an epoch is over."""
    options = {"samples": 240, "epochs": 3, "scheduled": scheduled, "slow": {"1": 0.01}}
    outcome = ranks("train_meeting", 3, strategy=strategy, **options)
    assert outcome.seen == Counter((epoch, index) for epoch in range(3) for index in range(240))
    assert_ended_alike(outcome)
    portion = 240 if scheduled == "epoch" else 3 * 4
    for fact in outcome.facts:
        rates = fact["rates"]
        moved = next(number for number, (_, rate) in enumerate(rates) if rate != RATE)
        furthest = 0  # what a rank guesses between meetings may be too much; schedules do not go back
        for number, (applied, rate) in enumerate(rates):
            furthest = max(furthest, applied)
            if number >= moved:
                assert math.isclose(rate, RATE * 0.9 ** (furthest // portion)), "by what it knows to be applied"
        assert rates[-1] == outcome.facts[0]["rates"][-1], "and all the same in the end"


# ---- losses


def test_who_never_waits_learns_soon_that_a_rank_is_lost(ranks: Ranks) -> None:
    """Rank 1 is killed in its fifth micro-batch; there is data for some three hundred rounds of each of the others.
    They meet without it long before."""
    outcome = ranks("train_until_killed", 3, fails=True, strategy="ad-psgd", victim=1)
    assert outcome.codes == [0, -9, 0], outcome.outputs
    for rank in (0, 2):
        events = [event for event in outcome.events if event["rank"] == rank]
        met = next(number for number, event in enumerate(events) if event["kind"] == "applied")
        assert sum(event["kind"] == "step" for event in events[:met]) < 200


# ---- races


def test_a_race_reports_means_of_all_ranks(ranks: Ranks) -> None:
    outcome = ranks("race", 3, strategy="ad-psgd", seconds=2.0)
    metrics = [event for event in outcome.events if event["kind"] == "metric"]
    assert len(metrics) >= 2 and {event["rank"] for event in metrics} == {0}
    assert metrics[-1]["loss"] < math.log(3), "better than a guess among three classes"
    applied = account(outcome.events).applied
    last = max(metrics, key=lambda event: event["t"])
    assert applied <= last["samples"] < 1.1 * applied, "leases that went back at the end count too: see above"
