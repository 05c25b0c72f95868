"""Real ranks train on sparse rows with sparse gradients: the same model as dense gradients give by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scenarios_sparse import Table, bags
from torch import nn

SAMPLES = 53  # a prime: no number of ranks or micro-batches divides it
Ranks = Callable[..., Any]


@pytest.mark.parametrize("workers", [0, 1])
def test_all_reduce_with_sparse_gradients_is_the_optimizer_on_the_joined_batches(ranks: Ranks, workers: int) -> None:
    outcome = ranks("train_sparse", 3, strategy="all-reduce", samples=SAMPLES, num_workers=workers)
    assert outcome.seen == Counter((epoch, index) for epoch in range(2) for index in range(SAMPLES))
    rounds: dict[int, list[int]] = {}
    for fact in outcome.facts:
        for number, indices in fact["steps"]:
            rounds.setdefault(number, []).extend(indices)
    model, data = Table(sparse=False), bags(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in sorted(rounds):
        optimizer.zero_grad()
        model.loss(*data[torch.tensor(rounds[number])]).backward()
        optimizer.step()
    by_hand = nn.utils.parameters_to_vector(model.parameters())
    for fact in outcome.facts:
        torch.testing.assert_close(torch.tensor(fact["final"], dtype=torch.float64), by_hand, rtol=1e-6, atol=1e-9)
    warnings = [event["text"] for event in outcome.events if event["kind"] == "warning"]
    assert len(warnings) == 1 and "Sparse gradients become dense" in warnings[0]


def test_abs_sgd_keeps_all_ranks_alike_with_sparse_gradients(ranks: Ranks) -> None:
    outcome = ranks("train_sparse", 3, strategy="abs-sgd", samples=SAMPLES)
    assert outcome.seen == Counter((epoch, index) for epoch in range(2) for index in range(SAMPLES))
    assert all(fact["after_round"] == outcome.facts[0]["after_round"] for fact in outcome.facts)
    assert outcome.facts[0]["applied"] == 2 * SAMPLES


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("strategy", ["all-reduce", "balanced", "abs-sgd", "d-psgd"])
def test_every_sample_is_used_once_in_micro_batches_of_equal_cost(ranks: Ranks, strategy: str, workers: int) -> None:
    options = {"strategy": strategy, "samples": 211, "micro_batch": 8, "num_workers": workers}
    outcome = ranks("train_sparse", 3, cost=True, **options)
    assert outcome.seen == Counter((epoch, index) for epoch in range(2) for index in range(211))
    assert outcome.ledger["complete"] and (outcome.ledger["used"], outcome.ledger["discarded"]) == (422, 0)
    assert max(len(indices) for fact in outcome.facts for _, indices in fact["steps"]) <= 8


def test_micro_batches_of_equal_cost_are_more_alike(ranks: Ranks) -> None:
    spread = {}
    for cost in (False, True):
        [fact] = ranks("train_sparse", 1, strategy="all-reduce", samples=211, micro_batch=8, cost=cost).facts
        found = torch.tensor(fact["nonzeros"], dtype=torch.float64)
        spread[cost] = float(found.std() / found.mean())
    assert spread[True] < 0.6 * spread[False], spread
