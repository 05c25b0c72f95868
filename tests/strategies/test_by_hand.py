"""Strategies driven by hand: the test is the runtime, so every move of a coroutine can be seen."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.node import NEXT_GRADIENT, Gradient, Node, Work
from paceline.rules.learning_rate import AS_SET, Steps, StepScale
from paceline.strategies import AbsSgd, AllReduce, Balanced


class Number:
    """A gradient of one number, as values of a `Gradient`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def plus(self, other: Number) -> Number:
        return Number(self.value + other.value)

    def tensor(self) -> Tensor:
        return torch.tensor([self.value])


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

    divisible, noise_scale = True, None
    seconds_per_sample, overhead_samples = 1.0, 0.0

    def __init__(self, world_size: int = 2, micro_batch: int = 8, momentum: float = 0.0) -> None:
        self.rank, self.world_size, self.state = 0, world_size, {}
        self.micro_batch = self.at_most = micro_batch
        self.log: list[str] = []
        self.flying: list[InHand] = []
        self.beta, self.rate, self.end_after = momentum, 0.1, 10**9
        self.w = torch.zeros(1)
        self.notes: tuple[float, ...] = ()  # that come with the next total
        self._applied = 0

    def all_reduce(self, gradient: Gradient, note: float = 0.0) -> Work[Gradient]:
        value = gradient.values.value if isinstance(gradient.values, Number) else 0.0
        self.log.append(f"all-reduce {gradient.count}")
        total = Gradient(Number(value), gradient.count)
        total.notes = self.notes
        self.flying.append(InHand(total))
        return self.flying[-1]

    def apply(self, gradient: Gradient, scale: StepScale = AS_SET) -> None:
        self._applied += 1
        self.log.append(f"apply {gradient.count}")
        if isinstance(gradient.values, Number):
            self.w -= self.rate * scale.learning_rate * gradient.values.value / max(gradient.count, 1)

    def look_ahead(self, gradient: Gradient, scale: StepScale = AS_SET, further: bool = False) -> None:
        self.log.append(f"look {'further' if further else 'ahead'} {gradient.count}")

    @property
    def finished(self) -> bool:
        return self._applied >= self.end_after

    @property
    def parameters(self) -> Tensor:
        return self.w

    @property
    def steps(self) -> Steps:
        return Steps(learning_rate=self.rate, momentum=self.beta)

    def warn(self, text: str) -> None:
        self.log.append(text)

    def _unasked(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("these strategies do not ask for it")

    all_gather = send = receive = signal = signalled = count = discard = model = adopt = _unasked
    settle = mean_model = hand_in = take_back = step = settle_for = learned = now = tell = movement = _unasked
    sizes, epoch = (1,), 0
    called_together = False


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
    hand = Hand(AbsSgd(min_micro_batches=3, delay_cure="none").worker(node))
    hand.give()
    hand.give()
    assert node.log == []
    hand.give()
    assert node.log == ["all-reduce 3"]


def test_abs_sgd_computes_where_its_own_part_leads_while_that_travels() -> None:
    node = HandNode()
    hand = Hand(AbsSgd().worker(node))
    hand.give(8)
    assert node.log == ["look ahead 8", "all-reduce 8"], "before the part leaves and its memory with it"
    hand.give(8)
    hand.give(8)
    assert node.log[2:] == ["look further 8", "look further 16"], "and on from there, as far as the next part leads"
    node.log.clear()
    node.flying[0].arrived = True
    hand.give(8)
    assert node.log == ["apply 8", "look ahead 24", "all-reduce 24"], "a step first: the look starts where it ended"


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, [-0.1, -0.3]), (0.5, [-0.1, -0.4])])
def test_abs_sgd_extrapolates_only_with_momentum(momentum: float, expected: list[float]) -> None:
    """Steps of 0.1 and 0.2; with momentum the second is 0.2 + (0.2 − 0.1)."""
    node = HandNode(momentum=momentum)
    hand = Hand(AbsSgd(delay_cure="extrapolate", lr_rule="none").worker(node))
    hand.give(value=1.0)
    seen = []
    for value in (2.0, 3.0):
        node.flying[-1].arrived = True
        hand.give(value=value)
        seen.append(round(node.w.item(), 6))
    assert seen == expected


def test_a_change_of_the_learning_rate_is_no_change_of_direction() -> None:
    node = HandNode(momentum=0.5)
    hand = Hand(AbsSgd(delay_cure="extrapolate", lr_rule="none").worker(node))
    hand.give(value=1.0)
    node.flying[-1].arrived = True
    hand.give(value=1.0)
    node.rate = 0.05
    node.flying[-1].arrived = True
    hand.give(value=1.0)
    assert node.w.item() == pytest.approx(-0.1 - 0.05), "the same gradient at half the rate: half the step, no more"


def test_balanced_gives_itself_its_share_by_speed() -> None:
    node = HandNode(micro_batch=4)
    node.notes = (1.0, 3.0)  # this rank is three times as fast as the other
    hand = Hand(Balanced(micro_batches=2).worker(node))
    hand.give(4)
    assert node.log == [] and node.at_most == 4
    hand.give(4)
    assert node.log == ["all-reduce 8"]
    hand.arrive(node.flying[0])
    for _ in range(3):
        assert node.log[-1] == "apply 8" and node.at_most == 4
        hand.give(4)
    assert node.log[-1] == "all-reduce 12", "three quarters of the sixteen samples are its own now"


def test_balanced_asks_for_the_rest_of_a_share_that_is_no_whole_number_of_micro_batches() -> None:
    node = HandNode(micro_batch=4)
    node.notes = (1.0, 1.7)  # 10.07 of sixteen samples
    hand = Hand(Balanced(micro_batches=2).worker(node))
    hand.give(4)
    hand.give(4)
    hand.arrive(node.flying[0])
    hand.give(4)
    hand.give(3)  # the end of a lease
    assert node.at_most == 3
    hand.give(3)
    assert node.log[-1] == "all-reduce 10"


def test_balanced_waits_for_everybodys_speed_before_it_changes_anything() -> None:
    node = HandNode(micro_batch=1)
    node.notes = (1.0, 0.0)  # the other has had no data yet
    hand = Hand(Balanced(micro_batches=2).worker(node))
    hand.give()
    hand.give()
    hand.arrive(node.flying[0])
    hand.give()
    hand.give()
    assert node.log[-1] == "all-reduce 2"
