"""The optimizer of the loop, and the learning rates that only the run moves."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from paceline.backends.replica import Replica
from paceline.errors import PacelineError
from paceline.run.optimizer import LearningRates, RunOptimizer


class Handed:
    """A run optimizer whose strategy applies every gradient at once, and what was asked of it."""

    def __init__(self, make=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)):
        self.model = nn.Linear(2, 1)
        self.inner = make(self.model.parameters())
        self.replica = Replica(self.model, self.inner)
        self.calls = []
        self.optimizer = RunOptimizer(self.inner, self.replica, self.give, lambda: self.calls.append("zeroed"))

    def give(self):
        self.calls.append("given")
        self.replica.apply(self.replica.take_gradients(1, []))

    def backward(self):
        loss = self.model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss


# ---- looks like the user's optimizer


def test_a_step_hands_the_gradient_in_and_no_more():
    handed = Handed()
    before = handed.replica.parameters.clone()
    handed.optimizer.zero_grad()
    handed.backward()
    assert handed.optimizer.step() is None
    assert handed.calls == ["zeroed", "given"] and handed.model.weight.grad is None
    assert torch.equal(handed.replica.parameters, before - 1.0)


def test_zeroing_drops_the_gradients_either_way():
    handed = Handed()
    for set_to_none in (True, False):
        handed.backward()
        handed.optimizer.zero_grad(set_to_none=set_to_none)
        assert handed.model.weight.grad is None and handed.model.bias.grad is None
    assert handed.calls == ["zeroed"] * 2


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned():
    handed = Handed()
    with torch.no_grad():
        loss = handed.optimizer.step(handed.backward)
    assert loss.requires_grad and handed.calls == ["given"]


def test_it_is_an_optimizer_with_the_inner_ones_groups_state_and_defaults():
    handed = Handed()
    optimizer = handed.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is handed.inner.param_groups and optimizer.state is handed.inner.state
    assert optimizer.defaults is handed.inner.defaults and "SGD" in repr(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    assert handed.inner.param_groups[0]["lr"] == 0.25


def test_the_state_passes_through():
    handed, other = Handed(), Handed()
    handed.backward()
    handed.optimizer.step()
    state = handed.optimizer.state_dict()
    assert state["param_groups"] == handed.inner.state_dict()["param_groups"]
    other.optimizer.load_state_dict(state)
    momentum = [other.inner.state[p]["momentum_buffer"] for p in other.model.parameters()]
    assert [m.tolist() for m in momentum] == [[[1.0, 1.0]], [1.0]]


def test_parameters_cannot_be_added():
    handed = Handed()
    with pytest.raises(PacelineError, match=r"cannot be added after run.optimizer"):
        handed.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(handed.inner.param_groups) == 1


SCHEDULES = {
    "step": lambda o: schedules.StepLR(o, step_size=1, gamma=0.5),
    "milestones": lambda o: schedules.MultiStepLR(o, milestones=[1, 3], gamma=0.5),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, T_max=10),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "one-cycle": lambda o: schedules.OneCycleLR(o, max_lr=1.0, total_steps=10),
    "cyclic": lambda o: schedules.CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=2),
    "warm-up then milestones": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.MultiStepLR(o, milestones=[1, 4])], milestones=[2]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.1, total_iters=6), schedules.MultiStepLR(o, milestones=[1, 7])]
    ),
    "warm-up then cosine": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.CosineAnnealingLR(o, T_max=8)], milestones=[2]
    ),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_torch_schedulers_take_it_and_move_the_rate_as_ever(make):
    handed, plain = Handed(), Handed()
    mine, theirs = make(handed.optimizer), make(plain.inner)
    for _ in range(6):
        for each, optimizer, scheduler in ((handed, handed.optimizer, mine), (plain, plain.inner, theirs)):
            each.backward()
            optimizer.step()
            scheduler.step()
        assert handed.inner.param_groups[0]["lr"] == plain.inner.param_groups[0]["lr"]


def test_a_grad_scaler_takes_it():
    handed = Handed(lambda p: torch.optim.SGD(p, lr=1.0))
    before = handed.replica.parameters.clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(handed.model(torch.ones(1, 2)).sum()).backward()
    scaler.step(handed.optimizer)
    scaler.update()
    assert torch.equal(handed.replica.parameters, before - 1.0) and handed.calls == ["given"]


def test_a_grad_scaler_skips_what_is_not_finite():
    handed = Handed(lambda p: torch.optim.SGD(p, lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(handed.model(torch.full((1, 2), float("inf"))).sum()).backward()
    scaler.step(handed.optimizer)
    scaler.update()
    assert handed.calls == [] and scaler.get_scale() == 4.0


# ---- learning rates


def halving(alone=False, every=100):
    """A run's optimizer after its first step, whose rate halves for every so many samples."""
    handed = Handed()
    rates = LearningRates(handed.inner, alone=alone)
    scheduler = schedules.StepLR(handed.optimizer, step_size=1, gamma=0.5)
    rates.drive(scheduler, every)
    handed.backward()
    handed.optimizer.step()
    return handed.inner.param_groups[0], rates, scheduler


def test_samples_drive_the_schedule():
    group, rates, _ = halving()
    seen = []
    for before, after in ((0, 99), (99, 100), (100, 180), (180, 450), (450, 450), (450, 499), (499, 501)):
        rates.advance(before, after)
        rates.check()
        seen.append(group["lr"])
    assert seen == [1.0, 0.5, 0.5, 0.0625, 0.0625, 0.0625, 0.03125]


def test_how_the_rounds_cut_the_samples_makes_no_difference():
    ends = []
    for cuts in ([0, 700], [0, 1, 99, 100, 101, 650, 700], list(range(0, 701, 7))):
        group, rates, _ = halving()
        for before, after in itertools.pairwise(cuts):
            rates.advance(before, after)
        ends.append(group["lr"])
    assert ends == [0.5**7] * 3


@pytest.mark.parametrize("driven", [True, False])
def test_a_change_in_the_loop_is_refused_unless_alone(driven):
    for alone in (True, False):
        handed = Handed()
        rates = LearningRates(handed.inner, alone=alone)
        if driven:
            rates.drive(schedules.StepLR(handed.optimizer, step_size=1), 100)
        rates.check()
        handed.optimizer.param_groups[0]["lr"] = 0.25
        if alone:
            rates.check()
        else:
            with pytest.raises(PacelineError, match=r"changed from \[1.0\] to \[0.25\] in the training loop"):
                rates.check()


def test_a_scheduler_that_the_loop_steps_is_refused():
    _, rates, scheduler = halving()
    scheduler.step()
    with pytest.raises(PacelineError, match=r"changed from \[1.0\] to \[0.5\]"):
        rates.check()


def test_the_change_that_a_scheduler_makes_when_it_is_made_is_agreed():
    handed = Handed()
    rates = LearningRates(handed.inner, alone=False)
    rates.drive(schedules.LinearLR(handed.optimizer, 0.5, total_iters=4), 10)
    assert handed.inner.param_groups[0]["lr"] == 0.5
    rates.check()


def test_reduce_on_plateau_is_refused():
    handed = Handed()
    rates = LearningRates(handed.inner, alone=False)
    with pytest.raises(PacelineError, match="ReduceLROnPlateau cannot be driven by samples"):
        rates.drive(schedules.ReduceLROnPlateau(handed.optimizer), 100)


def test_without_a_scheduler_samples_move_nothing():
    handed = Handed()
    rates = LearningRates(handed.inner, alone=False)
    rates.advance(0, 10**9)
    rates.check()
    assert handed.inner.param_groups[0]["lr"] == 1.0 and rates.state_dict() == {}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_resumed_schedule_goes_on_exactly(make):
    """As a checkpoint does it: the optimizer's groups and the scheduler's numbers, through JSON."""

    def started():
        handed = Handed()
        rates = LearningRates(handed.inner, alone=False)
        rates.drive(make(handed.optimizer), 10)
        handed.backward()
        handed.optimizer.step()
        return handed, rates

    whole, rates = started()
    rates.advance(0, 45)
    saved = json.loads(json.dumps(rates.state_dict()))
    groups = whole.inner.state_dict()
    resumed, again = started()
    resumed.inner.load_state_dict(groups)
    again.load_state_dict(saved)
    again.check()
    for before, after in ((45, 50), (50, 61), (61, 75)):
        rates.advance(before, after)
        again.advance(before, after)
        assert resumed.inner.param_groups[0]["lr"] == whole.inner.param_groups[0]["lr"]
