"""Real ranks train the same model: bit for bit equal, every sample exactly once, equal to the equations by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import ALL_TOGETHER
from torch import Tensor, nn

from paceline.strategies import STRATEGIES
from paceline.summary import account

SAMPLES = 53  # a prime: no number of ranks or micro-batches divides it
Ranks = Callable[..., Any]
ALIKE = ("matcha", "dssp", "asp")  # to real ranks they are D-PSGD with fewer messages, and SSP with another bound
TRIED = [name for name in STRATEGIES if name not in ALIKE]
SHORT = {  # else there are fewer rounds than are waited for, or each has something of every sample
    "adaptive-sgd": "adaptive-sgd:mega_batch=48",
    "non-blocking": "non-blocking:unfinished=finish:mini_batches=2",
}


def exactly_once(samples: int, epochs: int) -> Counter[tuple[int, int]]:
    return Counter((epoch, index) for epoch in range(epochs) for index in range(samples))


def assert_alike(outcome: Any) -> None:
    """All ranks went through the same rounds with the same parameters, or, if they step alone, ended with the same; and
    all samples are accounted for."""
    first, *others = outcome.facts
    for other in others:
        if not first["alone"]:
            assert other["after_round"] == first["after_round"]
            assert other["rates"] == first["rates"]
        assert other["after_round"][-1] == first["after_round"][-1] and other["final"] == first["final"]
        assert other["applied"] == first["applied"]
    accounts = account(outcome.events)
    assert accounts.errors == ()
    assert accounts.computed == accounts.applied + accounts.discarded
    assert accounts.applied == first["applied"] or first["alone"], "see test_alone"
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (accounts.applied, accounts.discarded)


@pytest.mark.parametrize("nproc", [1, 3, 4])
@pytest.mark.parametrize("strategy", [*ALL_TOGETHER, "abs-sgd:min_micro_batches=2", "all-reduce:micro_batches=3"])
def test_all_ranks_hold_the_same_and_every_sample_is_used_once(ranks: Ranks, strategy: str, nproc: int) -> None:
    outcome = ranks("train", nproc, strategy=strategy, samples=SAMPLES, optimizer="momentum", slow={"1": 0.01})
    assert outcome.seen == exactly_once(SAMPLES, 2)
    assert_alike(outcome)
    assert len(outcome.facts[0]["after_round"]) == outcome.facts[0]["rounds"]
    assert outcome.facts[0]["applied"] == 2 * SAMPLES


@pytest.mark.parametrize("strategy", ["all-reduce:compress=int8", "abs-sgd:compress=fp16", "balanced:compress=bf16"])
def test_all_ranks_hold_the_same_when_gradients_are_rounded(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train", 3, strategy=strategy, samples=SAMPLES, optimizer="momentum", slow={"1": 0.01})
    assert outcome.seen == exactly_once(SAMPLES, 2)
    assert_alike(outcome)
    assert outcome.facts[0]["applied"] == 2 * SAMPLES, "counts are not rounded"
    plain = ranks("train", 3, strategy=strategy.partition(":")[0], samples=SAMPLES, optimizer="momentum")
    sent = [{event["bytes"] for event in each.events if event["kind"] == "join"} for each in (outcome, plain)]
    assert max(sent[0]) < min(sent[1])


def test_who_waits_for_a_round_says_so(ranks: Ranks) -> None:
    """From that follows what was idle and what communication."""
    outcome = ranks("train", 2, strategy="all-reduce", samples=SAMPLES, slow={"1": 0.01})
    joined = {event["round"] for event in outcome.events if event["kind"] == "join"}
    waited = {event["round"] for event in outcome.events if event["kind"] == "wait" and event["rank"] == 0}
    assert waited and waited <= joined


@pytest.mark.parametrize("strategy", TRIED)
def test_ranks_that_never_get_a_sample_take_part(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train", 4, strategy=strategy, samples=4, micro_batch=4, epochs=1, slow={"0": 0.02})
    assert outcome.seen == exactly_once(4, 1)
    assert_alike(outcome)


def hand_model(flat: Tensor) -> nn.Linear:
    model = nn.Linear(3, 1).double()
    nn.utils.vector_to_parameters(flat.clone(), model.parameters())
    return model


def points(samples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x, x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3


START = torch.tensor([0.1, 0.2, 0.3, 0.0], dtype=torch.float32).double()


def mean_gradient(flat: Tensor, indices: list[int], samples: int = SAMPLES) -> Tensor:
    model, (x, y) = hand_model(flat), points(samples)
    ((model(x[indices]).squeeze(-1) - y[indices]) ** 2).mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_abs_sgd_alone_is_sgd_with_a_delay_of_one_round(ranks: Ranks) -> None:
    outcome = ranks("train", 1, strategy="abs-sgd --paper", samples=SAMPLES)
    order = [index for _, index in outcome.facts[0]["seen"]]
    joined = [event["samples"] for event in outcome.events if event["kind"] == "join"]
    assert sum(joined) == len(order)
    weights, taken = [START], 0
    for count in joined:  # round r: w_{r+1} = w_r − η g(w_{r−1})
        here, taken = order[taken : taken + count], taken + count
        seen_at = weights[max(0, len(weights) - 2)]
        step = 0.05 * mean_gradient(seen_at, here) if here else 0.0
        weights.append(weights[-1] - step)
    torch.testing.assert_close(torch.tensor(outcome.facts[0]["final"], dtype=torch.float64), weights[-1])


@pytest.mark.parametrize(
    ("name", "clip_norm"), [("sgd", None), ("sgd", 0.5), ("nesterov", None), ("adam", None), ("adamw", 1.0)]
)
def test_all_reduce_is_the_optimizer_on_the_joined_batches(ranks: Ranks, name: str, clip_norm: float | None) -> None:
    outcome = ranks("train", 2, strategy="all-reduce", samples=SAMPLES, optimizer=name, clip_norm=clip_norm)
    rounds: dict[int, list[int]] = {}
    for fact in outcome.facts:
        for number, indices in fact["steps"]:
            rounds.setdefault(number, []).extend(indices)
    model = hand_model(START)
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    }[name](model.parameters())
    x, y = points(SAMPLES)
    for number in sorted(rounds):
        optimizer.zero_grad()
        ((model(x[rounds[number]]).squeeze(-1) - y[rounds[number]]) ** 2).mean().backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    by_hand = nn.utils.parameters_to_vector(model.parameters())
    for fact in outcome.facts:
        torch.testing.assert_close(torch.tensor(fact["final"], dtype=torch.float64), by_hand, rtol=1e-6, atol=1e-9)
    assert_alike(outcome)


@pytest.mark.parametrize("every", ["epoch", 20])
@pytest.mark.parametrize("strategy", TRIED)
def test_a_schedule_goes_by_samples_on_all_ranks(ranks: Ranks, strategy: str, every: int | str) -> None:
    outcome = ranks("train", 3, strategy=strategy, samples=SAMPLES, every=every, slow={"2": 0.005})
    assert_alike(outcome)
    portion = SAMPLES if every == "epoch" else every
    for fact in outcome.facts:
        for applied, rate in fact["rates"]:
            assert math.isclose(rate, 0.05 * 0.5 ** (applied // portion))
        assert fact["rates"][-1] == outcome.facts[0]["rates"][-1] and fact["rates"][-1][1] < 0.05


@pytest.mark.parametrize("strategy", [SHORT.get(name, name) for name in TRIED])
def test_gradients_that_are_no_numbers_are_dropped_and_counted(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train", 2, strategy=strategy, samples=SAMPLES, bad=5, epochs=3)
    assert_alike(outcome)
    dropped = [event for event in outcome.events if event["kind"] == "discard"]
    assert {event["reason"] for event in dropped} == {"non-finite gradient"}
    assert sum(event["samples"] for event in dropped) >= 3 * 5
    warnings = Counter(event["rank"] for event in outcome.events if event["kind"] == "warning")
    assert set(warnings) == {event["rank"] for event in dropped}
    assert set(warnings.values()) == {1}, "it is said once"
    assert all(math.isfinite(value) for value in outcome.facts[0]["final"])
    assert outcome.facts[0]["applied"] > 0
    assert outcome.seen == exactly_once(SAMPLES, 3)


@pytest.mark.parametrize("strategy", [SHORT.get(name, name) for name in TRIED if name != "local-sgd"])
def test_a_run_that_brings_nothing_but_nan_ends_on_all_ranks(ranks: Ranks, strategy: str) -> None:
    outcome = ranks("train", 3, strategy=strategy, samples=SAMPLES, bad=SAMPLES, epochs=100, fails=True)
    assert outcome.codes == [1, 1, 1]
    said = [output.strip().splitlines()[-1] for output in outcome.outputs]
    assert all("Training has diverged: no rank has brought one finite gradient" in line for line in said), said
    assert any("lost rank" not in line for line in said), "who has not seen it himself hears it from who has"
    assert not any(event["samples"] for event in outcome.events if event["kind"] == "applied")
