"""ABS-SGD's mathematics: the delay, what it costs in stability, and each cure by its formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.rules.stability import largest_stable
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import AbsSgd, AllReduce, create
from paceline.summary import account

Play = Callable[..., Any]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "nesterov": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.05),
    "adamw": partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
}
ROUNDS = {  # what decides when a round closes
    "vote": {},
    "fastest": {"trigger": "fastest", "min_micro_batches": 2},
    "target": {"trigger": "target", "target": 24},
}
MIXED = Cluster.from_speeds(
    [1, 0.7, 0.25], micro_batch_seconds=1.0, jitter=LogNormal(0.3), network=Network(latency=0.3), seed=4
)


def closed_by(trigger: str, **options: Any) -> AbsSgd:
    return AbsSgd(**ROUNDS[trigger], **options)


# ---- the delay


def test_as_published_one_worker_is_sgd_exactly_one_round_late(play: Play) -> None:
    played = play(create("abs-sgd --paper"), optimizer=partial(torch.optim.SGD, lr=0.1))
    points = [played.start, played.start]  # w_1 = w_0 is the only bubble
    for [micro_batch] in played.contributions(0)[:50]:
        gradient = played.gradient(points[-2], micro_batch.indices)
        assert torch.equal(micro_batch.point, points[-2])
        points.append(torch.add(points[-1], gradient, alpha=-0.1))
    assert played.batches[:50] == [8] * 50 and len(points) == 52
    assert all(torch.equal(*pair) for pair in zip(played.path[:51], points[1:], strict=True)), "bit for bit"


@pytest.mark.parametrize("trigger", ROUNDS)
def test_every_gradient_is_exactly_one_round_late_on_unequal_workers_too(play: Play, trigger: str) -> None:
    played = play(closed_by(trigger, delay_cure="none"), MIXED, epochs=4)
    assert played.ages() == {1}


@pytest.mark.parametrize("trigger", ROUNDS)
def test_as_published_many_workers_step_with_the_mean_over_all_samples(play: Play, trigger: str) -> None:
    played = play(closed_by(trigger, delay_cure="none", lr_rule="none"), MIXED)
    path, means = played.path, played.means()
    assert len({part for part in played.batches if part}) > 2, "the batch varies"
    for number, mean in enumerate(means):
        torch.testing.assert_close(path[number + 1], path[number] - 0.1 * mean, rtol=1e-12, atol=1e-14)
    for rank in range(3):
        for number, part in enumerate(played.contributions(rank)):
            assert all(torch.equal(each.point, path[max(number - 1, 0)]) for each in part)


# ---- stability on the quadratic λw²/2


def swing(play: Play, step: float, momentum: float, cure: str, rounds: int) -> float:
    """By what |w| grows from the middle of a run with η·λ = step to its end."""
    optimizer = partial(torch.optim.SGD, lr=step / 2.0, momentum=momentum)
    options = {"optimizer": optimizer, "gradient": lambda w, _: 2.0 * w, "start": (1.0,), "micro_batch": 1}
    path = play(AbsSgd(delay_cure=cure), samples=rounds, epochs=1, **options).path
    size = [abs(float(w)) for w in path[: rounds + 1]]
    return max(size[-40:]) / max(size[rounds // 2 - 40 : rounds // 2])


@pytest.mark.parametrize(("step", "stable"), [(0.02, True), (0.97, True), (1.03, False), (-0.01, False)])
def test_the_raw_delay_is_stable_between_zero_and_one(play: Play, step: float, stable: bool) -> None:
    optimizer = partial(torch.optim.SGD, lr=abs(step))
    sign = 1.0 if step > 0 else -1.0  # torch refuses a negative learning rate; a negative curvature is the same
    options = {"optimizer": optimizer, "start": (1.0,), "micro_batch": 1}
    path = play(create("abs-sgd --paper"), gradient=lambda w, _: sign * w, samples=600, epochs=1, **options).path
    tail = max(abs(float(w)) for w in path[-20:])
    assert tail < 1e-3 if stable else tail > 100


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("cure", ["none", "extrapolate", "anticipate"])
def test_the_limit_of_stability_is_where_the_rule_says(play: Play, cure: str, momentum: float) -> None:
    limit = largest_stable(momentum, "synchronous" if cure == "anticipate" else cure)
    assert swing(play, 0.96 * limit, momentum, cure, rounds=300) < 0.8
    assert swing(play, 1.04 * limit, momentum, cure, rounds=300) > 1.25


# ---- anticipate


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_anticipating_alone_is_synchronous_training(play: Play, optimizer: str) -> None:
    """The own part of a round is all of it, so the point looked from is the next one, bit for bit."""
    late = play(AbsSgd(lr_rule="none"), optimizer=OPTIMIZERS[optimizer])
    synchronous = play(AllReduce(), optimizer=OPTIMIZERS[optimizer])
    assert late.batches[:50] == synchronous.batches[:50] == [8] * 50
    assert all(torch.equal(*pair) for pair in zip(late.path[:51], synchronous.path[:51], strict=True))


@pytest.mark.parametrize("trigger", ROUNDS)
def test_anticipating_alone_begins_each_round_where_the_last_one_leads(play: Play, trigger: str) -> None:
    played = play(closed_by(trigger, lr_rule="sqrt", reference_batch=8), optimizer=OPTIMIZERS["adam"])
    begins = [part[0].point for part in played.contributions(0) if part]
    assert all(torch.equal(*pair) for pair in zip(begins[1:], played.path[1 : len(begins)], strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_anticipating_without_noise_is_synchronous_training(play: Play, optimizer: str) -> None:
    """All samples alike: everybody's own gradient is the whole round's."""
    curvatures = torch.tensor([3.0, 1.0, 0.2], dtype=torch.float64)
    quadratic = {"gradient": lambda w, _: curvatures * w, "start": (1.0, -2.0, 4.0), "samples": 240}
    late = play(AbsSgd(micro_batches="fixed"), (1, 1, 1), **quadratic, optimizer=OPTIMIZERS[optimizer])
    parameter = torch.nn.Parameter(late.start.clone())
    reference = OPTIMIZERS[optimizer]([parameter])
    assert late.batches[:20] == [24] * 20 and sum(late.batches) == 480
    for committed in late.path[:21]:
        torch.testing.assert_close(committed, parameter.detach(), rtol=1e-9, atol=1e-12)
        parameter.grad = curvatures * parameter.detach()
        reference.step()


def ahead(played: Any, rank: int, rate: float, momentum: float) -> list[list[tuple[Tensor, Tensor]]]:
    """For each micro-batch of the rank from the second round on: where it was computed, and where by the formulas.

    y = w − u(own part of the round before): and, when a part of the round itself is there, as much further as that part
    leads, for its share of the rank's samples.
    """
    parts, velocity, pairs = played.contributions(rank), torch.zeros_like(played.start), []
    for number, mean in enumerate(played.means()[:-1]):
        own, count = played.sum_of(parts[number])
        if count == 0:
            break
        trial = momentum * velocity + own / count
        point = played.path[number] - rate * trial
        pairs.append([])
        for place, each in enumerate(parts[number + 1]):
            begun, so_far = played.sum_of(parts[number + 1][:place])
            further = rate * min(1.0, so_far / count) * (momentum * trial + begun / so_far) if so_far else 0.0
            pairs[-1].append((each.point, point - further))
        velocity = momentum * velocity + mean
        torch.testing.assert_close(played.path[number + 1], played.path[number] - rate * velocity)
    return pairs


@pytest.mark.parametrize("trigger", ROUNDS)
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_anticipating_workers_look_from_where_their_own_part_leads(play: Play, momentum: float, trigger: str) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=momentum)
    played = play(closed_by(trigger, delay_cure="anticipate", lr_rule="none"), MIXED, optimizer=optimizer)
    for rank in range(3):
        pairs = [part[0] for part in ahead(played, rank, 0.05, momentum) if part]
        assert len(pairs) > 3
        for computed, expected in pairs:
            torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_anticipating_workers_go_on_from_each_part_of_a_round(play: Play, momentum: float) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=momentum)
    played = play(AbsSgd(lr_rule="none", min_micro_batches=3), MIXED, optimizer=optimizer)
    for rank in range(3):
        pairs = [pair for part in ahead(played, rank, 0.05, momentum) for pair in part[1:]]
        assert len(pairs) > 3
        for computed, expected in pairs:
            torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-14)


def test_anticipating_takes_the_round_for_as_many_times_its_own_part_as_last_time(play: Play) -> None:
    """How far to look depends on the learning rate, and that on a batch that is not known yet."""
    constant = {"gradient": lambda w, _: torch.ones_like(w), "start": (0.0,)}
    strategy = AbsSgd(lr_rule="linear", reference_batch=10, max_lr_scale=100.0)
    played = play(strategy, MIXED, **constant, optimizer=partial(torch.optim.SGD, lr=1.0), epochs=1)
    for rank in range(3):
        parts = played.contributions(rank)
        own = [played.sum_of(part)[1] for part in parts]
        rounds = range(1, own.index(0) - 1)
        assert len(rounds) > 3
        for number in rounds:
            expected = round(own[number] * played.batches[number - 1] / own[number - 1]) / 10
            assert float(played.path[number] - parts[number + 1][0].point) == pytest.approx(expected, rel=1e-12)


# ---- extrapolate


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_extrapolation_is_its_formula_with_a_learning_rate_that_follows_the_batch(play: Play, momentum: float) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.02, momentum=momentum)
    options = {"lr_rule": "linear", "reference_batch": 16, "max_lr_scale": 3.0}
    played = play(AbsSgd(delay_cure="extrapolate", **options), MIXED, optimizer=optimizer, epochs=4)
    rates = [0.02 * min(batch / 16, 3.0) for batch in played.batches]
    assert len(set(rates)) > 2, "the batch varies"
    w, velocity, last = played.start.clone(), torch.zeros(4, dtype=torch.float64), None
    for number, mean in enumerate(played.means()):
        velocity = momentum * velocity + mean
        step = rates[number] * velocity
        change = step - rates[number] / rates[number - 1] * last if momentum and last is not None else 0.0
        w, last = w - step - change, step
        torch.testing.assert_close(played.path[number + 1], w, rtol=1e-10, atol=1e-12)


def test_extrapolation_survives_a_warm_up_from_zero(play: Play) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.0, momentum=0.9)
    played = play(AbsSgd(delay_cure="extrapolate"), optimizer=optimizer)
    assert torch.equal(played.path[-1], played.start)


# ---- all ranks, all the time


@pytest.mark.parametrize(
    ("cure", "trigger"),
    [*itertools.product(["anticipate", "extrapolate", "none"], ROUNDS), ("acco", "vote")],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_ranks_are_bitwise_equal_after_every_round(play: Play, cure: str, trigger: str, optimizer: str) -> None:
    strategy = closed_by(trigger, delay_cure=cure)
    played = play(strategy, MIXED, optimizer=OPTIMIZERS[optimizer])
    first, *others = played.committed
    assert len(first) > 5
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))
    assert all(torch.equal(learner.parameters, first[-1]) for learner in played.learners)
    run, books = played.run, account(played.events)
    assert run.samples_computed == run.samples_applied + run.samples_discarded == 2 * 200
    assert not books.errors and books.in_flight == 0 and run.samples_discarded == 0
    assert _converged(first)


def _converged(path: list[Tensor]) -> bool:
    return bool(torch.isfinite(path[-1]).all()) and float(path[-1].norm()) < 10
