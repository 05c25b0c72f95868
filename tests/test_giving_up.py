"""Leaving a forward or a backward pass between two layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.run.giving_up import LOOKS, Abortable, GivenUpError


class Layers:
    """A model of four layers that notes how far it came, and a signal that comes after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks, self.passed = looks, 0
        self.model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
        assert sum(1 for module in self.model.modules() if not list(module.children())) == LOOKS
        self.abortable = Abortable(self.model, self.over)

    def over(self) -> bool:
        self.passed += 1
        return self.passed > self.looks

    def train(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("looks", range(8))
def test_the_pass_ends_at_the_next_layer_forwards_and_backwards(looks: int) -> None:
    layers, through = Layers(looks), False
    with layers.abortable.micro_batch():
        layers.train()
        through = True
    assert not through and layers.passed == looks + 1


def test_without_a_signal_the_gradient_is_the_usual_one() -> None:
    layers = Layers(looks=100)
    with layers.abortable.micro_batch():
        layers.train()
    assert layers.passed == 8, "four layers, twice"
    found = [p.grad.clone() for p in layers.model.parameters() if p.grad is not None]
    layers.abortable.remove()
    layers.model.zero_grad()
    layers.train()
    assert layers.passed == 8, "the hooks are gone"
    for one, other in zip(found, [p.grad for p in layers.model.parameters()], strict=True):
        assert isinstance(other, Tensor) and torch.equal(one, other)


def test_outside_the_block_nothing_is_given_up() -> None:
    layers = Layers(looks=0)
    layers.train()
    layers.abortable.look()
    assert layers.passed == 0


def test_other_errors_pass() -> None:
    layers = Layers(looks=100)
    with pytest.raises(ZeroDivisionError), layers.abortable.micro_batch():
        raise ZeroDivisionError
    with layers.abortable.micro_batch():
        raise GivenUpError


def test_a_deep_model_is_looked_at_a_few_times_only() -> None:
    model, looks = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30))), 0

    def over() -> bool:
        nonlocal looks
        looks += 1
        return False

    abortable = Abortable(model, over)
    with abortable.micro_batch():
        model(torch.ones(1, 2)).sum().backward()
    assert looks == 2 * LOOKS
