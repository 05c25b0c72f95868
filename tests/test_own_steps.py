"""A rank's step with its own fresh gradient: straight from the backward pass, and the same as through a sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paceline.backends.replica import Replica
from paceline.node import Gradient

OPTIMIZERS = {
    "plain": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


class Table(nn.Module):
    """A table of rows and a layer that some backward passes do not reach."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.rows = nn.EmbeddingBag(40, 3, mode="sum", sparse=sparse)
            self.output, self.other = nn.Linear(3, 2), nn.Linear(3, 2)
        self.double()

    def backward(self, indices: torch.Tensor, other: bool) -> None:
        layer = self.other if other else self.output
        layer(self.rows(indices)).square().mean().backward()


def stepped(
    make: Callable[..., Any], sparse: bool, through_a_sum: bool, clip_norm: float | None = None
) -> torch.Tensor:
    model = Table(sparse)
    replica = Replica(model, make(model.parameters()), clip_norm)
    chance = torch.Generator().manual_seed(5)
    for number in range(6):
        model.backward(torch.randint(40, (4, 5), generator=chance), other=number % 2 == 1)
        gradient = replica.take_gradients(4, [range(4)])
        if through_a_sum:
            gradient += Gradient(None, 0)
            assert gradient.values is not None
            gradient.values = gradient.values.flat()  # type: ignore[attr-defined]  # of a fresh one
        replica.apply(gradient)
    assert not any(p.grad is not None for p in model.parameters())
    return replica.parameters


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_it_is_the_step_with_the_sum(name: str, sparse: bool, clip_norm: float | None) -> None:
    make = OPTIMIZERS[name]
    expected = stepped(make, sparse=False, through_a_sum=True, clip_norm=clip_norm)
    torch.testing.assert_close(stepped(make, sparse, False, clip_norm), expected, rtol=1e-12, atol=1e-12)


def test_plain_sgd_needs_no_buffer_and_touches_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "buffer", lambda self: pytest.fail("a buffer as large as the model"))
    model = Table(sparse=True)
    replica, before = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1)), model.rows.weight.detach().clone()
    model.backward(torch.tensor([[7, 7, 9]]), other=False)
    norm = replica.apply(replica.take_gradients(1, [range(1)]))
    moved = (model.rows.weight != before).any(1).nonzero().flatten()
    assert moved.tolist() == [7, 9] and 0 < norm < 100


def test_a_gradient_that_is_not_finite_makes_no_step() -> None:
    model = Table(sparse=True)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = replica.parameters.clone()
    model.backward(torch.tensor([[1]]), other=False)
    assert model.output.bias.grad is not None
    model.output.bias.grad[0] = torch.nan
    assert not torch.isfinite(torch.tensor(replica.apply(replica.take_gradients(1, [range(1)]))))
    assert torch.equal(replica.parameters, before)
