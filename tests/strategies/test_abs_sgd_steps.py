"""The steps of ABS-SGD: how the learning rate follows the batch, what noise is measured, and who is warned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import AbsSgd, create

Play = Callable[..., Any]
MIXED = Cluster.from_speeds(
    [1, 0.7, 0.25], micro_batch_seconds=1.0, jitter=LogNormal(0.3), network=Network(latency=0.3), seed=4
)


def zeros() -> Tensor:
    return torch.zeros(4, dtype=torch.float64)


# ---- the learning rate follows the batch


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"lr_rule": "none"}, lambda batch: 1.0),
        ({"lr_rule": "linear", "reference_batch": 20}, lambda batch: min(batch / 20, 4.0)),
        ({"lr_rule": "linear", "reference_batch": 20, "max_lr_scale": 1.5}, lambda batch: min(batch / 20, 1.5)),
        ({"lr_rule": "sqrt", "reference_batch": 20}, lambda batch: sqrt(min(batch / 20, 4.0))),
        ({"lr_rule": "auto"}, lambda batch: min(batch / 24, 1.0)),  # three workers with micro-batches of eight
        ({"lr_rule": "auto", "reference_batch": 40}, lambda batch: min(batch / 40, 4.0)),
    ],
    ids=["none", "linear", "capped", "sqrt", "auto", "auto from a reference"],
)
def test_a_step_is_as_long_as_its_batch_says(play: Play, options: dict, factor: Callable[[int], float]) -> None:
    played = play(AbsSgd(delay_cure="none", **options), MIXED, optimizer=partial(torch.optim.SGD, lr=0.05))
    path, means = played.path, played.means()
    assert len(set(played.batches[: len(means)])) > 3, "the batch varies"
    for number, mean in enumerate(means):
        expected = path[number] - 0.05 * factor(played.batches[number]) * mean
        torch.testing.assert_close(path[number + 1], expected, rtol=1e-12, atol=1e-14)


def test_the_square_root_rule_forgets_momentum_by_samples(play: Play) -> None:
    """β → β^κ: a step over twice the samples forgets as much as two."""
    optimizer = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    played = play(AbsSgd(delay_cure="none", lr_rule="sqrt", reference_batch=30), MIXED, optimizer=optimizer)
    w, velocity = played.start, zeros()
    for number, mean in enumerate(played.means()):
        kappa = min(played.batches[number] / 30, 4.0)
        velocity = 0.9**kappa * velocity + mean
        w = w - 0.02 * sqrt(kappa) * velocity
        torch.testing.assert_close(played.path[number + 1], w, rtol=1e-11, atol=1e-13)
    assert played.learners[0].replica.optimizer.param_groups[0]["momentum"] == 0.9, "only for the step"


def test_adam_follows_the_square_root_by_itself(play: Play) -> None:
    optimizer = partial(torch.optim.Adam, lr=0.02, betas=(0.9, 0.99))
    played = play(AbsSgd(delay_cure="none"), MIXED, optimizer=optimizer)
    w, first, second = played.start, zeros(), zeros()
    for number, mean in enumerate(played.means()):
        kappa = min(played.batches[number] / 24, 1.0)
        beta1, beta2, t = 0.9**kappa, 0.99**kappa, number + 1
        first = beta1 * first + (1 - beta1) * mean
        second = beta2 * second + (1 - beta2) * mean**2
        w = w - 0.02 * sqrt(kappa) * (first / (1 - beta1**t)) / ((second / (1 - beta2**t)).sqrt() + 1e-8)
        torch.testing.assert_close(played.path[number + 1], w, rtol=1e-10, atol=1e-12)


def test_adascale_goes_by_the_noise_measured_before_the_step(play: Play) -> None:
    strategy = AbsSgd(delay_cure="none", lr_rule="adascale", reference_batch=10)
    played = play(strategy, MIXED, optimizer=partial(torch.optim.SGD, lr=0.05), epochs=4)
    path, known = played.path, [None, *played.noise]
    factors = []
    for number, mean in enumerate(played.means()):
        kappa, noise = min(played.batches[number] / 10, 4.0), known[number]
        factors.append(kappa if noise is None else (noise / 10 + 1) / (noise / 10 / kappa + 1))
        expected = path[number] - 0.05 * factors[-1] * mean
        torch.testing.assert_close(path[number + 1], expected, rtol=1e-12, atol=1e-14)
    assert known[0] is None and sum(noise is not None for noise in known) > 10
    assert 1.0 < min(factors[1:-3]) < 2.0 < max(factors), "between constant and linear"


# ---- the noise scale


FEATURES, SIGMA = 20, 1.0


def noisy(features: int) -> Callable[[Tensor, NDArray[np.int64]], Tensor]:
    """The gradient of (x·w − ε)²/2 with normal x and ε: its mean is w, its covariance (|w|² + σ²)·1 + w wᵀ."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(4000, features, dtype=torch.float64, generator=generator)
    noise = SIGMA * torch.randn(4000, dtype=torch.float64, generator=generator)

    def gradient(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
        x = inputs[indices]
        return x.T @ (x @ w - noise[indices]) / len(indices)

    return gradient


@pytest.mark.parametrize(
    "text", ["all-reduce", "abs-sgd:micro_batches=fixed", "abs-sgd:delay_cure=acco:micro_batches=fixed"]
)
def test_the_noise_scale_of_a_run_is_that_of_the_data(play: Play, text: str) -> None:
    """At parameters that stay where they are."""
    start = [0.25] * FEATURES
    squared_norm = sum(each**2 for each in start)
    variance = FEATURES * (squared_norm + SIGMA**2) + squared_norm
    played = play(
        create(text),
        MIXED,
        gradient=noisy(FEATURES),
        start=start,
        samples=4000,
        epochs=3,
        micro_batch=16,
        optimizer=partial(torch.optim.SGD, lr=0.0, momentum=0.9),
    )
    assert torch.equal(played.path[-1], played.start)
    measured = [noise for noise in played.noise[20:] if noise is not None]
    assert len(measured) > 60
    assert sum(measured) / len(measured) == pytest.approx(variance / squared_norm, rel=0.1)
    recorded = played.of_kind("noise", rank=0)[1:]
    for name, expected in (("variance", variance), ("squared_norm", squared_norm)):
        assert sum(event[name] for event in recorded) / len(recorded) == pytest.approx(expected, rel=0.1)


# ---- the guard


def warned(play: Play, strategy: AbsSgd, step: float, rounds: int = 36, momentum: float = 0.9, workers: int = 1) -> Any:
    """What is said about the unstable region on the quadratic 2·w²/2 with η·2 = step."""
    optimizer = partial(torch.optim.SGD, lr=step / 2, momentum=momentum)
    quadratic = {"gradient": lambda w, _: 2.0 * w, "start": (1.0,), "micro_batch": 1}
    played = play(strategy, (1,) * workers, **quadratic, samples=rounds * workers, epochs=1, optimizer=optimizer)
    return played.warnings("unstable region")


@pytest.mark.parametrize("workers", [1, 3])
def test_a_learning_rate_that_the_delay_does_not_allow_is_told_once_with_numbers_and_remedy(
    play: Play, workers: int
) -> None:
    [text] = warned(play, create("abs-sgd --paper"), 0.3, workers=workers)
    assert "learning rate 0.15 (times 1 for the batch) and the curvature 2 " in text
    assert "give 0.3; one round late, with momentum 0.9 and delay_cure=none, at most 0.1 is stable" in text
    assert "(synchronous: 3.8)" in text
    assert "Take delay_cure=anticipate, or a learning rate below 0.05." in text


def test_a_learning_rate_that_the_delay_allows_is_not_told(play: Play) -> None:
    assert warned(play, create("abs-sgd --paper"), 0.05, rounds=300) == []


def test_who_looks_ahead_is_not_warned_of_the_delay(play: Play) -> None:
    assert warned(play, AbsSgd(delay_cure="anticipate"), 0.3, rounds=100) == []
    assert warned(play, AbsSgd(delay_cure="acco"), 0.3, rounds=100) == []


@pytest.mark.parametrize(
    ("cure", "momentum", "limit"), [("none", 0.0, 1.0), ("none", 0.5, 0.5), ("extrapolate", 0.9, 0.2702)]
)
def test_the_guard_knows_the_limit_of_each_cure(play: Play, cure: str, momentum: float, limit: float) -> None:
    strategy = AbsSgd(delay_cure=cure, lr_rule="none")
    assert len(warned(play, strategy, 1.05 * limit, momentum=momentum)) == 1
    assert warned(play, strategy, 0.95 * limit, rounds=100, momentum=momentum) == []


def test_extrapolation_without_momentum_has_the_limit_of_the_raw_delay(play: Play) -> None:
    assert warned(play, AbsSgd(delay_cure="extrapolate"), 0.9, rounds=100, momentum=0.0) == []


def test_the_guard_counts_the_learning_rate_as_it_is_for_the_batch(play: Play) -> None:
    """η·λ = 0.06 is stable; four times that, for a batch of four times the reference, is not."""
    strategy = AbsSgd(delay_cure="none", lr_rule="linear", reference_batch=1)
    assert len(warned(play, strategy, 0.06, workers=4)) == 1
    assert warned(play, strategy, 0.06, workers=1, rounds=100) == []


def test_noise_in_many_directions_does_not_set_the_guard_off(play: Play) -> None:
    """At the minimum there is nothing but noise: changes of it must not be taken for curvature."""
    strategy = AbsSgd(delay_cure="none", lr_rule="none", micro_batches="fixed")
    for rate in (0.001, 0.03):
        optimizer = partial(torch.optim.SGD, lr=rate, momentum=0.9)
        data = {"gradient": noisy(20), "start": [0.0] * 20, "samples": 4000, "micro_batch": 16}
        played = play(strategy, MIXED, **data, epochs=2, optimizer=optimizer)
        assert played.warnings("unstable") == [] and played.warnings("diverge") == []


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_optimizers_that_normalise_are_not_judged_by_a_rule_for_sgd(play: Play, optimizer: Any) -> None:
    played = play(AbsSgd(delay_cure="none"), MIXED, optimizer=partial(optimizer, lr=0.5))
    assert played.warnings("unstable region") == []
