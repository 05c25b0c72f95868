"""Strategies driven by hand: the test is the runtime, so every move of a coroutine can be seen."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.node import NEXT_GRADIENT, Gradient, Message, Node, Work
from paceline.strategies import AbsSgd, AllReduce, Balanced


class Number:
    """A gradient of one number, as values of a `Gradient`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def plus(self, other: Number) -> Number:
        return Number(self.value + other.value)


class InHand(Work[Any]):
    """Work that is done when the test says so."""

    def __init__(self, brings: Any) -> None:
        self.brings, self.arrived = brings, False

    @property
    def done(self) -> bool:
        return self.arrived

    def result(self) -> Any:
        return self.brings


class HandNode(Node):
    """A node whose every answer the test gives; a log tells what the strategy asked."""

    def __init__(self, world_size: int = 2, momentum: bool = False) -> None:
        self.rank, self.world_size, self.state = 0, world_size, {}
        self.log: list[str] = []
        self.flying: list[InHand] = []
        self.momentum, self.rate, self.end_after = momentum, 0.1, 10**9
        self.w = torch.zeros(1)
        self.gathered: tuple[float, ...] = ()
        self._applied = 0

    def all_reduce(self, gradient: Gradient) -> Work[Gradient]:
        value = gradient.values.value if isinstance(gradient.values, Number) else 0.0
        self.log.append(f"all-reduce {gradient.count}")
        self.flying.append(InHand(Gradient(Number(value), gradient.count)))
        return self.flying[-1]

    def all_gather(self, value: float) -> Work[tuple[float, ...]]:
        self.log.append("all-gather")
        work = InHand(self.gathered)
        work.arrived = True
        return work

    def apply(self, gradient: Gradient) -> None:
        self._applied += 1
        self.log.append(f"apply {gradient.count}")
        if isinstance(gradient.values, Number):
            self.w -= self.rate * gradient.values.value / max(gradient.count, 1)

    @property
    def finished(self) -> bool:
        return self._applied >= self.end_after

    @property
    def parameters(self) -> Tensor:
        return self.w

    @property
    def learning_rate(self) -> float:
        return self.rate

    @property
    def has_momentum(self) -> bool:
        return self.momentum

    @property
    def seconds_per_sample(self) -> float:
        return 1.0

    def send(self, to: int, kind: str, *tensors: Tensor) -> None:
        raise AssertionError("these strategies send nothing")

    def receive(self) -> Work[Message]:
        raise AssertionError("these strategies receive nothing")

    def signal(self, round_number: int) -> None:
        raise AssertionError("these strategies do not signal")

    def signalled(self, round_number: int) -> bool:
        raise AssertionError("these strategies do not signal")


class Hand:
    """Steps a coroutine."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine, self.ended = coroutine, False
        self.asked: Any = coroutine.send(None)

    def give(self, count: int = 1, value: float = 1.0) -> None:
        assert self.asked is NEXT_GRADIENT, "it did not ask for a gradient"
        self._send(Gradient(Number(value * count), count))

    def arrive(self, work: InHand) -> None:
        work.arrived = True
        if self.asked is work:
            self._send(None)

    def _send(self, answer: Any) -> None:
        try:
            self.asked = self._coroutine.send(answer)
        except StopIteration:
            self.ended = True


def test_all_reduce_computes_k_micro_batches_then_waits_for_the_sum() -> None:
    node = HandNode()
    hand = Hand(AllReduce(micro_batches=2).worker(node))
    hand.give(8)
    assert node.log == []
    hand.give(8)
    assert node.log == ["all-reduce 16"] and hand.asked is node.flying[0], "it stands still until the sum is there"
    node.end_after = 1
    hand.arrive(node.flying[0])
    assert node.log == ["all-reduce 16", "apply 16"] and hand.ended


def test_abs_sgd_computes_on_while_the_network_is_busy_and_applies_one_round_late() -> None:
    node = HandNode()
    hand = Hand(AbsSgd(delay_cure="none").worker(node))
    hand.give(8)
    assert node.log == ["all-reduce 8"], "the first round starts after one micro-batch"
    for _ in range(3):
        hand.give(8)
    assert node.log == ["all-reduce 8"], "the network is busy: micro-batches pile up"
    node.flying[0].arrived = True
    hand.give(8)
    assert node.log == ["all-reduce 8", "apply 8", "all-reduce 32"], "all of them go into the next round"
    node.end_after = 2
    node.flying[1].arrived = True
    hand.give(8)
    assert node.log[3:] == ["apply 32", "all-reduce 8"], "the end is known after the round is under way"
    hand.arrive(node.flying[2])
    assert node.log[-1] == "apply 8" and hand.ended, "what is in flight at the end is applied too"


def test_abs_sgd_votes_only_after_its_least_number_of_micro_batches() -> None:
    node = HandNode()
    hand = Hand(AbsSgd(min_micro_batches=3).worker(node))
    hand.give()
    hand.give()
    assert node.log == []
    hand.give()
    assert node.log == ["all-reduce 3"]


@pytest.mark.parametrize(("momentum", "expected"), [(False, [-0.1, -0.3]), (True, [-0.1, -0.4])])
def test_abs_sgd_extrapolates_only_with_momentum(momentum: bool, expected: list[float]) -> None:
    """Steps of 0.1 and 0.2; with momentum the second is 0.2 + (0.2 − 0.1)."""
    node = HandNode(momentum=momentum)
    hand = Hand(AbsSgd().worker(node))
    hand.give(value=1.0)
    seen = []
    for value in (2.0, 3.0):
        node.flying[-1].arrived = True
        hand.give(value=value)
        seen.append(round(node.w.item(), 6))
    assert seen == expected


def test_a_change_of_the_learning_rate_is_no_change_of_direction() -> None:
    node = HandNode(momentum=True)
    hand = Hand(AbsSgd().worker(node))
    hand.give(value=1.0)
    node.flying[-1].arrived = True
    hand.give(value=1.0)
    node.rate = 0.05
    node.flying[-1].arrived = True
    hand.give(value=1.0)
    assert node.w.item() == pytest.approx(-0.1 - 0.05), "the same gradient at half the rate: half the step, no more"


def test_balanced_gives_itself_its_share_by_speed() -> None:
    node = HandNode()
    node.gathered = (1.0, 3.0)  # this rank is three times as fast as the other
    hand = Hand(Balanced(micro_batches=2).worker(node))
    hand.give()
    hand.give()
    assert node.log == ["all-gather", "all-reduce 2"]
    hand.arrive(node.flying[0])
    for _ in range(3):
        hand.give()
    assert node.log[-1] == "all-reduce 3", "three of the four micro-batches are its own now"


def test_balanced_waits_for_everybodys_speed_before_it_changes_anything() -> None:
    node = HandNode()
    node.gathered = (1.0, 0.0)  # the other has had no data yet
    hand = Hand(Balanced(micro_batches=2).worker(node))
    hand.give()
    hand.give()
    hand.arrive(node.flying[0])
    hand.give()
    hand.give()
    assert node.log[-1] == "all-reduce 2"
