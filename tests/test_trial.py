"""Steps that an optimizer forgets, and steps with other settings for once: afterwards it is as it was, bit for bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from pytest import approx

from paceline.backends.trial import OptimizerTrial, scaled
from paceline.rules.learning_rate import AS_SET, StepScale

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
KINDS = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd, one by one": partial(SGD, lr=0.1, momentum=0.9, foreach=False),
    "adam": partial(Adam, lr=0.1),
    "adam, fused": partial(Adam, lr=0.1, fused=True),
    "adamw": partial(AdamW, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "rprop": partial(torch.optim.Rprop, lr=0.1),
}
LAYERS = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).double()


def trained(kind, steps):
    """A model and its optimizer after so many steps."""
    model = copy.deepcopy(LAYERS)
    optimizer = KINDS[kind]([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.02}])
    for number in range(steps):
        give(model, number)
        optimizer.step()
    return model, optimizer


def give(model, number):
    """The number-th gradient, on any model the same."""
    chance = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=chance, dtype=parameter.dtype)


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def contents(optimizer):
    """All that an optimizer holds: where, its name, and the object."""
    held = [*optimizer.state.items(), *((id(group), group) for group in optimizer.param_groups)]
    return [(place, name, value) for place, values in held for name, value in values.items()]


def bits(optimizer):
    """The same as plain numbers, to compare with those of another time or of another optimizer."""
    settings_and_state = [(name, value) for _, name, value in contents(optimizer) if name != "params"]
    return [(name, value.tolist() if torch.is_tensor(value) else value) for name, value in settings_and_state]


class Memory:
    """What an optimizer holds, and whether it is the very same later: the same objects with the same bits."""

    def __init__(self, optimizer):
        self._optimizer, self._objects, self._bits = optimizer, contents(optimizer), bits(optimizer)

    def is_the_same(self):
        def which(objects):
            return [(id(place) if torch.is_tensor(place) else place, name, id(value)) for place, name, value in objects]

        return which(contents(self._optimizer)) == which(self._objects) and bits(self._optimizer) == self._bits


# ---- trials


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_moves_the_parameters_as_a_step_would_and_the_optimizer_forgets_it(kind, before):
    (model, optimizer), (twin, real) = trained(kind, before), trained(kind, before)
    memory, trial = Memory(optimizer), OptimizerTrial(optimizer)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for number in (10, 11):  # the second in the memory of the first
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.data.copy_(value)
        give(model, number)
        trial.step(optimizer.step)
        assert memory.is_the_same()
    give(twin, 11)
    real.step()
    assert torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_after_another_goes_on_as_if_that_had_been_none(kind, before):
    (model, optimizer), (twin, real) = trained(kind, before), trained(kind, before)
    memory, first, second = Memory(optimizer), OptimizerTrial(optimizer), OptimizerTrial(optimizer)
    give(model, 10)
    first.step(optimizer.step)
    between = [parameter.detach().clone() for parameter in model.parameters()]
    for number in (11, 12):  # both from where the first has ended
        for parameter, value in zip(model.parameters(), between, strict=True):
            parameter.data.copy_(value)
        give(model, number)
        second.step(optimizer.step, after=first)
        assert memory.is_the_same()
    for number in (10, 12):
        give(twin, number)
        real.step()
    assert torch.equal(flat(model), flat(twin))


@pytest.mark.parametrize("before", [0, 3])
def test_a_trial_that_fails_is_forgotten_too(before):
    model, optimizer = trained("adam", before)
    memory = Memory(optimizer)

    def fail():
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.param_groups[1]["more"] = 1
        raise ZeroDivisionError

    give(model, 10)
    with pytest.raises(ZeroDivisionError):
        OptimizerTrial(optimizer).step(fail)
    assert memory.is_the_same()


def test_the_copies_are_made_once():
    _, optimizer = trained("momentum", 1)
    trial, seen = OptimizerTrial(optimizer), []

    def look():
        seen.append([state["momentum_buffer"].data_ptr() for state in optimizer.state.values()])

    for _ in range(3):
        trial.step(look)
    assert seen[0] == seen[1] == seen[2]
    own = {state["momentum_buffer"].data_ptr() for state in optimizer.state.values()}
    assert own.isdisjoint(seen[0])


def test_training_goes_on_between_trials():
    (model, optimizer), (twin, real) = trained("adamw", 0), trained("adamw", 0)
    trial = OptimizerTrial(optimizer)
    for number in range(4):
        point = [parameter.detach().clone() for parameter in model.parameters()]
        give(model, 100 + number)
        trial.step(optimizer.step)
        for parameter, value in zip(model.parameters(), point, strict=True):
            parameter.data.copy_(value)
        for each, its_optimizer in ((model, optimizer), (twin, real)):
            give(each, number)
            its_optimizer.step()
    assert torch.equal(flat(model), flat(twin))
    assert bits(optimizer) == bits(real)


# ---- other settings for once


def settings(optimizer):
    return [
        {key: group[key] for key in ("lr", "momentum", "betas") if key in group} for group in optimizer.param_groups
    ]


@pytest.mark.parametrize(
    ("kind", "scale", "within"),
    [
        ("momentum", StepScale(3.0), [{"lr": 0.3, "momentum": 0.9}, {"lr": 0.06, "momentum": 0.9}]),
        ("momentum", StepScale(1.0, 2.0), [{"lr": 0.1, "momentum": 0.81}, {"lr": 0.02, "momentum": 0.81}]),
        ("adam", StepScale(2.0, 0.5, 0.25), [{"lr": 0.2, "betas": (0.9**0.5, 0.999**0.25)}, {"lr": 0.04}]),
        ("momentum", StepScale(momentum=0.0), [{"lr": 0.1, "momentum": 0.0}, {"lr": 0.02, "momentum": 0.0}]),
        ("adam", StepScale(momentum=0.0), [{"lr": 0.1, "betas": (0.0, 0.999)}, {"lr": 0.02}]),
        ("adam", StepScale(1.0, 2.0, 2.0, 0.5), [{"lr": 0.1, "betas": (0.405, 0.999**2)}, {"lr": 0.02}]),
        ("adagrad", StepScale(0.5, 3.0), [{"lr": 0.05}, {"lr": 0.01}]),
        ("momentum", AS_SET, [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.02, "momentum": 0.9}]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_settings_are_others_within_and_as_before_afterwards(kind, scale, within, fails):
    _, optimizer = trained(kind, 1)
    memory, inside = Memory(optimizer), []
    try:
        with scaled(optimizer, scale):
            inside = settings(optimizer)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    for found, expected in zip(inside, within, strict=True):
        assert {key: found[key] for key in expected} == {key: approx(value) for key, value in expected.items()}
    assert memory.is_the_same()


def test_as_set_touches_nothing_at_all():
    _, optimizer = trained("adam", 1)
    before = [dict(group) for group in optimizer.param_groups]
    with scaled(optimizer, AS_SET):
        for group, kept in zip(optimizer.param_groups, before, strict=True):
            assert all(group[key] is value for key, value in kept.items())


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor():
    model = copy.deepcopy(LAYERS)
    rate = torch.tensor(0.1)
    optimizer = Adam(model.parameters(), lr=rate, capturable=False, foreach=False)
    with scaled(optimizer, StepScale(2.0)):
        assert float(optimizer.param_groups[0]["lr"]) == approx(0.2)
    assert optimizer.param_groups[0]["lr"] is rate and rate == torch.tensor(0.1)
