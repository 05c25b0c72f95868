"""ACCO against its two formulas, written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import AbsSgd

Play = Callable[..., Any]
MIXED = Cluster.from_speeds(
    [1, 0.7, 0.25], micro_batch_seconds=1.0, jitter=LogNormal(0.3), network=Network(latency=0.3), seed=4
)


class Momentum:
    """v ← βv + g; the step is ηv."""

    torch_optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

    def __init__(self) -> None:
        self.velocity: Tensor | float = 0.0

    def step(self, gradient: Tensor, trial: bool = False) -> Tensor:
        velocity = 0.9 * self.velocity + gradient
        if not trial:
            self.velocity = velocity
        return 0.05 * velocity


class Adam:
    """m ← β₁m + (1−β₁)g, s ← β₂s + (1−β₂)g²; the step is η·m̂/(√ŝ + ε)."""

    torch_optimizer = partial(torch.optim.Adam, lr=0.05)

    def __init__(self) -> None:
        self.state: tuple[Any, Any, int] = (0.0, 0.0, 0)

    def step(self, gradient: Tensor, trial: bool = False) -> Tensor:
        first, second, t = self.state
        state = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2, t + 1
        if not trial:
            self.state = state
        first, second, t = state
        return 0.05 * (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)


def check(played: Any, optimizer: Momentum | Adam) -> None:
    """x_{t+1} = x_t − Opt((G_a(x̃_t) + G_b(x_t))/n) and x̃_{t+1} = x_t − Opt_trial(G_a(x̃_t)/n_a), on all workers."""
    parts = [played.contributions(rank) for rank in range(len(played.learners))]
    halves = [[each for part in joined for each in part] for joined in zip(*parts, strict=True)]
    x = estimate = played.start
    steps = 0
    while len(halves) > 1 and halves[1]:
        first, second = halves.pop(0), halves.pop(0)
        for point, half in ((estimate, first), (x, second)):
            for each in half:
                torch.testing.assert_close(each.point, point, rtol=1e-10, atol=1e-12)
        (sum_a, count_a), (sum_b, count_b) = played.sum_of(first), played.sum_of(second)
        estimate = x - optimizer.step(sum_a / count_a, trial=True)
        x = x - optimizer.step((sum_a + sum_b) / (count_a + count_b))
        steps += 1
        torch.testing.assert_close(played.path[steps], x, rtol=1e-10, atol=1e-12)
    rest, count = played.sum_of([each for half in halves for each in half])
    if count:
        x = x - optimizer.step(rest / count)
    assert steps > 10
    torch.testing.assert_close(played.path[-1], x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [Momentum, Adam])
def test_one_worker_does_what_the_formulas_say(play: Play, kind: type) -> None:
    strategy = AbsSgd(delay_cure="acco", lr_rule="none", micro_batches="fixed")
    played = play(strategy, optimizer=kind.torch_optimizer)
    check(played, kind())
    assert {len(each.indices) for each in played.micro_batches[0]} == {4}, "half a micro-batch each"


@pytest.mark.parametrize("kind", [Momentum, Adam])
def test_unequal_workers_do_what_the_formulas_say_with_halves_of_any_size(play: Play, kind: type) -> None:
    played = play(AbsSgd(delay_cure="acco", lr_rule="none"), MIXED, optimizer=kind.torch_optimizer, epochs=4)
    check(played, kind())
    assert len(set(played.batches)) > 3, "the clock decides their size"


def test_a_step_takes_two_collectives_and_all_samples_count(play: Play) -> None:
    played = play(AbsSgd(delay_cure="acco"), MIXED)
    applied = played.of_kind("applied", rank=0)
    times = [event["t"] for event in applied]
    assert times[0:10:2] == times[1:10:2] and len(set(times)) < 2 / 3 * len(times), "both halves in one step"
    run = played.run
    assert run.samples_computed == run.samples_applied == 400 and run.samples_discarded == 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_stable_up_to_two_whatever_the_momentum(play: Play, momentum: float) -> None:
    """Between one round late (0.1 with momentum 0.9) and synchronous (3.8): half of the samples look ahead. Samples
    that differ a little excite every direction of the state."""

    def swing(step: float) -> float:
        optimizer = partial(torch.optim.SGD, lr=step, momentum=momentum)
        quadratic = {"gradient": lambda w, indices: w + 1e-3 * np.cos(indices).mean(), "start": (0.0,)}
        strategy = AbsSgd(delay_cure="acco", lr_rule="none", micro_batches="fixed")
        path = play(strategy, **quadratic, optimizer=optimizer, micro_batch=2, samples=600, epochs=1).path
        sizes = [abs(float(w)) for w in path[:280]]
        return max(sizes[-40:]) / max(sizes[60:100])

    assert swing(1.9) < 3 and swing(2.1) > 100
