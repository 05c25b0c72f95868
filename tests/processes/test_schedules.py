"""An ordinary torch scheduler in an ordinary loop: moved by samples, at the same round on all ranks, without a word."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import TOGETHER
from torch.optim import lr_scheduler as schedules

from paceline.run.checkpoint import read

SAMPLES, MICRO_BATCH, EPOCHS, START = 120, 4, 3, 0.05
Ranks = Callable[..., Any]
Rates = list[tuple[int, float]]
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, gamma=0.9),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, T_max=60),
    "one-cycle": lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=60),
    "warm-up": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=10), schedules.StepLR(optimizer, 9, gamma=0.5)],
        milestones=[10],
    ),
}


def torch_rates(schedule: str, steps: int) -> list[float]:
    """The learning rates of an ordinary loop, from the beginning on."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=START, momentum=0.9)
    scheduler = SCHEDULES[schedule](optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def assert_by_samples(rates: Rates, schedule: str, every: int) -> None:
    """After so many samples each rate is that of an ordinary loop after so many steps; only in the rounds before the
    loop's first call was known it is still the first."""
    steps = [applied // every for applied, _ in rates]
    expected = torch_rates(schedule, max(steps))
    moved = next(number for number, (_, rate) in enumerate(rates) if rate != expected[0])
    assert all(rate == expected[0] for _, rate in rates[:moved])
    for step, (applied, rate) in list(zip(steps, rates, strict=True))[moved:]:
        assert rate == expected[step], (applied, step)


def assert_alike(outcome: Any) -> None:
    first, *others = outcome.facts
    for other in others:
        assert other["after_round"] == first["after_round"]
        assert other["rates"] == first["rates"]
        assert other["last"] == first["last"]
    assert first["rates"][-1] == [first["applied"], first["last"][0]]
    assert outcome.ledger["complete"]


@pytest.mark.parametrize("stepped", ["micro-batch", "epoch"])
@pytest.mark.parametrize("strategy", TOGETHER)
def test_a_schedule_stepped_in_the_loop_moves_by_samples(ranks: Ranks, strategy: str, stepped: str) -> None:
    options = {"samples": SAMPLES, "epochs": EPOCHS, "stepped": stepped, "slow": {"1": 0.01}}
    outcome = ranks("train_scheduled", 2, strategy=strategy, **options)
    assert_alike(outcome)
    rates = outcome.facts[0]["rates"]
    assert_by_samples(rates, "exponential", SAMPLES if stepped == "epoch" else 2 * MICRO_BATCH)
    if strategy == "abs-sgd":
        fast, slow = (len(fact["steps"]) for fact in outcome.facts)
        assert fast > slow, "the loops have called it unequally often"


@pytest.mark.parametrize(
    ("schedule", "over", "first"),
    [
        *((schedule, "torch", "scheduler") for schedule in SCHEDULES),
        ("one-cycle", "torch", "optimizer"),
        ("one-cycle", "run", "optimizer"),
    ],
)
def test_whatever_it_is_and_wherever_it_was_made(ranks: Ranks, schedule: str, over: str, first: str) -> None:
    options = {"samples": SAMPLES, "epochs": EPOCHS, "stepped": "micro-batch", "slow": {"0": 0.003}}
    made = {"schedule": schedule, "over": over, "first": first}
    outcome = ranks("train_scheduled", 2, strategy="all-reduce", **options, **made)
    assert_alike(outcome)
    rates = outcome.facts[0]["rates"]
    assert_by_samples(rates, schedule, 2 * MICRO_BATCH)
    later = [applied for applied, rate in rates if rate != rates[0][1]]
    assert later[0] <= 4 * 2 * MICRO_BATCH, "it begins to move in the first rounds"
    assert all(fact["afterwards"] != fact["last"] for fact in outcome.facts), "after the run it is the user's again"


@pytest.mark.parametrize("nproc", [1, 4])
def test_alone_and_with_ranks_that_get_no_sample(ranks: Ranks, nproc: int) -> None:
    options = {"samples": SAMPLES, "epochs": EPOCHS, "stepped": "micro-batch", "slow": {"2": 0.2, "3": 0.2}}
    outcome = ranks("train_scheduled", nproc, strategy="abs-sgd", **options)
    assert_alike(outcome)
    assert_by_samples(outcome.facts[0]["rates"], "exponential", nproc * MICRO_BATCH)


def test_one_step_for_two_micro_batches_is_one_of_the_schedule(ranks: Ranks) -> None:
    outcome = ranks("train_scheduled", 2, strategy="all-reduce", samples=SAMPLES, epochs=EPOCHS, stepped="twos")
    assert_alike(outcome)
    assert_by_samples(outcome.facts[0]["rates"], "exponential", 2 * 2 * MICRO_BATCH)


def test_a_schedule_that_nobody_steps_stands_still(ranks: Ranks) -> None:
    outcome = ranks("train_scheduled", 2, strategy="abs-sgd", samples=SAMPLES, epochs=1, stepped="never")
    assert_alike(outcome)
    assert {rate for _, rate in outcome.facts[0]["rates"]} == {START}


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("strategy", TOGETHER)
def test_a_resumed_run_goes_on_with_the_schedule(ranks: Ranks, strategy: str, after: int) -> None:
    """Also with another number of ranks: what a step of the schedule stands for is as it was."""
    options = {"strategy": strategy, "samples": SAMPLES, "epochs": 4, "told": False}
    first = ranks("train_saving", 2, **options, save_at=[2])
    (path,) = (first.folder / "checkpoints").glob("round-*")
    saved = read(path).values
    (kept,) = saved["scheduler"]["schedulers"]
    assert kept["every"] == 2 * MICRO_BATCH
    assert kept["state"]["last_epoch"] == saved["samples_applied"] // kept["every"]
    second = ranks("train_saving", after, **options, resume=True)
    for fact in second.facts:
        assert fact["rates"] == second.facts[0]["rates"]
        assert fact["after_round"] == second.facts[0]["after_round"]
    for applied, rate in second.facts[0]["rates"]:
        assert math.isclose(rate, START * 0.9 ** (applied // kept["every"])), applied
    assert second.facts[0]["applied"] == 4 * SAMPLES
