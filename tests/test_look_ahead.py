"""Computing at a point ahead: exactly where the user's optimizer would lead, and nothing of it stays."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from paceline.backends.replica import Replica
from paceline.errors import PacelineError
from paceline.node import Gradient
from paceline.rules.learning_rate import AS_SET, StepScale
from paceline.run.state import model_state

KINDS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, amsgrad=True),
}
SCALES = {"as set": AS_SET, "scaled": StepScale(0.5, 2.0, 2.0)}
LAYER = nn.Linear(3, 2).double()


def replica_of(kind="momentum", layer=LAYER, **options):
    model = copy.deepcopy(layer)
    return Replica(model, KINDS[kind](model.parameters()), **options)


def gradient_of(replica, number, count=4):
    """The number-th gradient: on any replica the same."""
    chance = torch.Generator().manual_seed(number)
    for parameter in replica.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=chance, dtype=torch.float64).to(parameter.dtype)
    return replica.take_gradients(count, [range(count)])


def after(steps, kind="momentum", **options):
    """A replica after so many steps."""
    replica = replica_of(kind, **options)
    for number in range(steps):
        replica.apply(gradient_of(replica, number))
    return replica


def state_of(optimizer):
    return copy.deepcopy([dict(values) for values in optimizer.state.values()])


def assert_same_state(optimizer, before):
    now = state_of(optimizer)
    assert [list(values) for values in now] == [list(values) for values in before]
    for one, other in zip(now, before, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_it_leads_exactly_where_the_step_would(kind, steps, scale):
    replica, twin = after(steps, kind), after(steps, kind)
    before, groups = state_of(replica.optimizer), [dict(group) for group in replica.optimizer.param_groups]
    gradient = gradient_of(replica, 10)
    replica.look_ahead(gradient, scale)
    twin.apply(gradient_of(twin, 10), scale)
    assert torch.equal(replica.parameters, twin.parameters)
    assert_same_state(replica.optimizer, before)
    assert [dict(group) for group in replica.optimizer.param_groups] == groups
    assert all(parameter.grad is None for parameter in replica.model.parameters())


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_step_starts_where_the_last_one_ended(kind, steps, scale):
    replica, twin = after(steps, kind), after(steps, kind)
    for number in (20, 30):
        replica.look_ahead(gradient_of(replica, number), scale)
        replica.look_ahead(gradient_of(replica, number + 1), scale)
        for each in (replica, twin):
            each.apply(gradient_of(each, number + 2), scale)
        assert torch.equal(replica.parameters, twin.parameters)
        assert_same_state(replica.optimizer, state_of(twin.optimizer))


def test_the_gradient_is_not_used_up():
    replica, twin = after(1), after(1)
    gradient, same = gradient_of(replica, 10), gradient_of(twin, 10)
    replica.look_ahead(gradient)
    assert (gradient.count, gradient.samples) == (4, [range(4)])
    mine, theirs = (each.contribution(own, working=True)[0] for each, own in ((replica, gradient), (twin, same)))
    assert torch.equal(mine.whole, theirs.whole)
    replica.apply(replica.total(mine)[0])
    twin.apply(twin.total(theirs)[0])
    assert torch.equal(replica.parameters, twin.parameters)


def test_a_second_look_starts_from_the_committed_point():
    replica, twin = after(2), after(2)
    replica.look_ahead(gradient_of(replica, 10))
    replica.look_ahead(gradient_of(replica, 11))
    twin.look_ahead(gradient_of(twin, 11))
    assert torch.equal(replica.parameters, twin.parameters)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_further_is_a_second_step_from_where_the_first_led(kind, steps):
    replica, twin = after(steps, kind), after(steps, kind)
    before = state_of(replica.optimizer)
    replica.look_ahead(gradient_of(replica, 10))
    replica.look_ahead(gradient_of(replica, 11), further=True)
    replica.look_ahead(gradient_of(replica, 12), StepScale(0.5), further=True)  # instead of 11, not after it
    twin.apply(gradient_of(twin, 10))
    twin.apply(gradient_of(twin, 12), StepScale(0.5))
    assert torch.equal(replica.parameters, twin.parameters)
    assert_same_state(replica.optimizer, before)
    back, plain = after(steps, kind), gradient_of(replica, 13)
    replica.apply(plain)
    back.apply(gradient_of(back, 13))
    assert torch.equal(replica.parameters, back.parameters)


def test_further_from_nowhere_is_a_look_ahead():
    replica, twin = after(1), after(1)
    replica.look_ahead(gradient_of(replica, 10), further=True)
    twin.look_ahead(gradient_of(twin, 10))
    assert torch.equal(replica.parameters, twin.parameters)
    replica.apply(gradient_of(replica, 11))
    twin.apply(gradient_of(twin, 11))
    assert torch.equal(replica.parameters, twin.parameters)


@pytest.mark.parametrize("further", [False, True])
def test_nothing_happens_for_an_empty_or_a_non_finite_gradient(further):
    replica = after(1)
    start = replica.parameters.clone()
    bad = gradient_of(replica, 10)
    bad.values.parts[0][0, 0] = math.nan
    for gradient in (Gradient(None, 0), bad):
        replica.look_ahead(gradient, further=further)
        assert torch.equal(replica.parameters, start) and torch.equal(committed(replica), start)
    replica.look_ahead(gradient_of(replica, 11))
    ahead = replica.parameters.clone()
    for gradient in (Gradient(None, 0), bad):
        replica.look_ahead(gradient, further=further)
        assert torch.equal(replica.parameters, ahead) and torch.equal(committed(replica), start)


def test_it_is_clipped_as_the_step_would_be():
    replica, twin = after(1, clip_norm=0.01), after(1, clip_norm=0.01)
    replica.look_ahead(gradient_of(replica, 10))
    twin.apply(gradient_of(twin, 10))
    assert torch.equal(replica.parameters, twin.parameters)


def test_looking_ahead_costs_a_fixed_amount_of_memory_and_tells_no_noise():
    replica, seen = after(1), set()
    for number in range(6):
        gradient = gradient_of(replica, number)
        replica.look_ahead(gradient)
        replica.look_ahead(gradient, further=True)
        flat, _ = replica.contribution(gradient, working=True)
        seen.add(flat.whole.data_ptr())
        replica.apply(replica.total(flat)[0])
    assert len(seen) <= 2 and replica.noise.value is None


def test_a_model_in_half_precision_looks_ahead_as_it_steps():
    half = nn.Linear(3, 2).bfloat16()
    replica, twin = after(1, layer=half), after(1, layer=half)
    replica.look_ahead(gradient_of(replica, 10))
    twin.apply(gradient_of(twin, 10))
    assert torch.equal(replica.parameters, twin.parameters) and replica.parameters.dtype == torch.bfloat16


def test_an_optimizer_that_cannot_step_on_trial_says_so():
    replica = replica_of()
    replica.optimizer.state[replica.model.weight] = ["no names here"]
    with pytest.raises(PacelineError, match=r"SGD cannot make a step on trial.*delay_cure=none"):
        replica.look_ahead(gradient_of(replica, 10))


# ---- steps with other settings


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sgd", {"lr": 0.2}),
        ("momentum", {"lr": 0.2, "momentum": 0.9**3}),
        ("adam", {"lr": 0.2, "betas": (0.9**3, 0.999**3)}),
    ],
)
def test_a_scaled_step_is_that_of_an_optimizer_with_other_settings(kind, settings):
    replica, twin = after(2, kind), after(2, kind)
    before = [dict(group) for group in replica.optimizer.param_groups]
    replica.apply(gradient_of(replica, 10), StepScale(2.0, 3.0, 3.0))
    assert [dict(group) for group in replica.optimizer.param_groups] == before
    twin.optimizer.param_groups[0].update(settings)
    twin.apply(gradient_of(twin, 10))
    assert torch.equal(replica.parameters, twin.parameters)
    assert_same_state(replica.optimizer, state_of(twin.optimizer))


def test_settings_come_back_after_a_step_that_fails():
    replica = after(1, "adam")
    before = [dict(group) for group in replica.optimizer.param_groups]

    def fail(optimizer, args, kwargs):
        raise ZeroDivisionError

    replica.optimizer.register_step_post_hook(fail)
    with pytest.raises(ZeroDivisionError):
        replica.apply(gradient_of(replica, 10), StepScale(2.0, 3.0, 3.0))
    assert [dict(group) for group in replica.optimizer.param_groups] == before


# ---- the committed point


def committed(replica):
    return torch.cat([part.flatten() for part in replica.committed.values()])


def test_the_committed_point_is_where_the_last_step_ended():
    replica = after(1)
    assert committed(replica).data_ptr() != replica.parameters.data_ptr()  # a copy, by `cat`
    assert list(replica.committed) == ["weight", "bias"]
    assert replica.committed["weight"].data_ptr() == replica.parameters.data_ptr(), "no copy while there is no need"
    start = replica.parameters.clone()
    replica.look_ahead(gradient_of(replica, 10))
    assert torch.equal(committed(replica), start) and not torch.equal(replica.parameters, start)
    replica.look_ahead(gradient_of(replica, 11), further=True)
    assert torch.equal(committed(replica), start)
    replica.apply(gradient_of(replica, 12))
    assert torch.equal(committed(replica), replica.parameters)


def test_a_model_that_is_adopted_is_committed():
    """A look ahead before it is over with it, and the next step starts from the models' mean."""
    replica = replica_of("sgd")
    flat, _ = replica.contribution(Gradient(replica.model_contribution(2), 2), working=True)
    flat.sums.add_(2.0)  # the other ranks' models are elsewhere
    replica.look_ahead(gradient_of(replica, 10))
    replica.adopt(replica.total(flat)[0])
    mean = replica.parameters.clone()
    torch.testing.assert_close(mean, nn.utils.parameters_to_vector(LAYER.parameters()) + 1.0)
    assert torch.equal(committed(replica), mean)
    replica.apply(Gradient(None, 0))
    assert torch.equal(replica.parameters, mean)


def test_the_state_of_a_model_that_looks_ahead_is_the_committed_one():
    layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    layers[2].requires_grad_(False)
    model = copy.deepcopy(layers)
    replica = Replica(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replica.look_ahead(gradient_of(replica, 10))
    assert not torch.equal(model.state_dict()["0.weight"], expected["0.weight"]), "it does look ahead"
    state = model_state(replica)
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    model[0].weight.data.zero_()
    assert torch.equal(state["0.weight"], expected["0.weight"]), "in memory of its own"


def test_the_state_of_tied_parameters_is_the_committed_one_under_both_names():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    model[1].weight = model[0].weight
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    start = model[0].weight.detach().clone()
    replica.look_ahead(gradient_of(replica, 10))
    state = model_state(replica)
    assert torch.equal(state["0.weight"], start) and torch.equal(state["1.weight"], start)
