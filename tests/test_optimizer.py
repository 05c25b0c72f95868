"""The optimizer of the loop, and the learning rates that only the run moves."""

from __future__ import annotations

import itertools
import json
import pickle

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


class Store:
    """What the control plane's key-value store does."""

    def __init__(self):
        self.values = {}

    def store_set(self, key, value):
        self.values[key] = value

    def store_get(self, key):
        return self.values[key]

    def store_check(self, keys):
        return all(key in self.values for key in keys)

    def store_add(self, key, amount):
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]


class Data:
    """What is asked of a loader: an epoch of 80 samples in micro-batches of 4."""

    def __init__(self, samples=80):
        self.samples, self.micro_batch, self.epoch = samples, 4, 0


def rates_of(handed, ranks=2, store=None, tell=lambda: None):
    return LearningRates(handed.inner, ranks, store or Store(), tell)


def rate_of(handed):
    return handed.inner.param_groups[0]["lr"]


def halving(every=100):
    """A run's optimizer after its first step, whose rate halves for every so many samples."""
    handed = Handed()
    rates = rates_of(handed)
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
    for ranks in (1, 2):
        handed = Handed()
        rates = rates_of(handed, ranks)
        if driven:
            rates.drive(schedules.StepLR(handed.optimizer, step_size=1), 100)
        rates.find(Data())
        rates.before_step(1)
        handed.optimizer.param_groups[0]["lr"] = 0.25
        for look in (rates.check, lambda rates=rates: rates.before_step(1), lambda rates=rates: rates.advance(0, 1)):
            if ranks == 1:
                look()
            else:
                with pytest.raises(PacelineError, match=r"changed from \[1.0\] to \[0.25\] in the training loop"):
                    look()


def test_a_scheduler_that_the_run_was_given_may_be_stepped_in_the_loop_too():
    group, rates, scheduler = halving()
    for before in range(0, 300, 10):
        scheduler.step()
        rates.check()
        rates.advance(before, before + 10)
    assert group["lr"] == 0.125 and scheduler.get_last_lr() == [0.125]


def test_the_period_of_a_scheduler_can_be_given_anew():
    group, rates, scheduler = halving()
    rates.drive(scheduler, 10)
    rates.advance(0, 30)
    assert group["lr"] == 0.125


def test_the_change_that_a_scheduler_makes_when_it_is_made_is_agreed():
    for found in (True, False):
        handed = Handed()
        rates = rates_of(handed)
        scheduler = schedules.LinearLR(handed.optimizer, 0.5, total_iters=4)
        rates.find(Data()) if found else rates.drive(scheduler, 10)
        assert rate_of(handed) == 0.5
        rates.check()


def test_reduce_on_plateau_is_refused():
    handed = Handed()
    rates = rates_of(handed)
    scheduler = schedules.ReduceLROnPlateau(handed.optimizer)
    for take in (lambda: rates.drive(scheduler, 100), lambda: rates.find(Data())):
        with pytest.raises(PacelineError, match="ReduceLROnPlateau cannot be driven by samples"):
            take()


def test_without_a_scheduler_samples_move_nothing():
    handed = Handed()
    rates = rates_of(handed)
    assert rates.find(Data()) == []
    rates.advance(0, 10**9)
    rates.check()
    assert rate_of(handed) == 1.0 and rates.state_dict() == {"schedulers": []}


# ---- schedulers that nobody told us of


class Loop:
    """The loop of one rank out of `ranks`, with schedulers that the run has to find: micro-batches of 4 samples, an
    epoch of 80, and a round for each micro-batch of all ranks."""

    def __init__(self, make, over="run", ranks=2, store=None):
        self.ranks, self.applied, self.rounds, self.flagged = ranks, 0, 0, False
        self.handed = Handed()
        self.rates = rates_of(self.handed, ranks, store, self._tell)
        self.scheduler = make(self.handed.optimizer if over == "run" else self.handed.inner)
        self.data = Data()
        self.found = self.rates.find(self.data)

    def _tell(self):
        self.flagged = True

    def micro_batch(self, called=True):
        self.handed.backward()
        self.rates.before_step(1)
        self.round(self.take_flag())
        if called:
            self.scheduler.step()

    def take_flag(self):
        """What travels with the next round."""
        flagged, self.flagged = self.flagged, False
        return flagged

    def round(self, flagged):
        before, self.applied = self.applied, self.applied + 4 * self.ranks
        self.rounds += 1
        self.handed.give()
        if flagged:
            self.rates.decide(self.rounds, before)
        self.rates.advance(before, self.applied)

    @property
    def lr(self):
        return rate_of(self.handed)


def torch_rates(make, steps):
    """The learning rates of an ordinary loop, from the beginning on."""
    plain = Handed()
    scheduler = make(plain.inner)
    found = [rate_of(plain)]
    for _ in range(steps):
        plain.backward()
        plain.inner.step()
        scheduler.step()
        found.append(rate_of(plain))
    return found


@pytest.mark.parametrize("over", ["run", "torch"])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_stepped_in_the_loop_moves_by_samples(make, over):
    """Without a word to the run: after n · world size · micro-batch samples as after n steps of an ordinary loop."""
    loop, expected = Loop(make, over), torch_rates(make, 10)
    for step in range(10):
        assert loop.lr == expected[step if step > 1 else 0]  # the first call is known one round later
        loop.micro_batch()
    assert loop.lr == expected[10]


def test_what_the_steps_lead_to_in_figures():
    expected = {
        "step": [1.0, 0.5, 0.25, 0.125],
        "cosine": [1.0, 0.97552826, 0.90450850, 0.79389263],
        "one-cycle": [0.04, 0.52, 1.0, 0.95048463],
        "warm-up then cosine": [0.1, 0.55, 1.0, 0.96193977],
    }
    for name, rates in expected.items():
        loop = Loop(SCHEDULES[name])
        for step in range(4):
            if step != 1:
                assert loop.lr == pytest.approx(rates[step], abs=1e-8), (name, step)
            loop.micro_batch()


def test_one_that_the_loop_steps_once_an_epoch_moves_once_an_epoch():
    loop = Loop(SCHEDULES["step"])
    seen = []
    for step in range(1, 36):
        loop.micro_batch(called=step % 10 == 0)
        seen.append(loop.lr)
    # The loop's first call, after the round that ends the epoch, is known with the next round.
    assert seen == [1.0] * 10 + [0.5] * 9 + [0.25] * 10 + [0.125] * 6


def test_one_that_is_called_early_in_the_next_epoch_was_due_at_its_beginning():
    """A fast rank is through with its part of the epoch before all of it is applied."""
    for first_call in (6, 9, 11, 14):
        loop = Loop(SCHEDULES["step"])
        for step in range(1, 26):
            loop.micro_batch(called=step == first_call)
            if step > first_call:
                assert loop.lr == 0.5 ** (step // 10)


def test_who_sees_the_next_epoch_when_little_of_the_first_is_applied_means_an_epoch():
    """Ranks hold leases ahead: with few samples a fast one is in the next epoch when most are still to be computed."""
    loop = Loop(SCHEDULES["step"])
    for step in range(1, 26):
        if step == 3:
            loop.data.epoch = 1
        loop.micro_batch(called=step == 3)
        assert loop.lr == 0.5 ** (step // 10)


def test_who_is_never_stepped_stays():
    loop = Loop(SCHEDULES["step"])
    for _ in range(25):
        loop.micro_batch(called=False)
    assert loop.lr == 1.0


def test_several_micro_batches_a_step_are_one_step_of_the_schedule():
    loop = Loop(SCHEDULES["step"])
    for number in range(1, 10):
        loop.rates.before_step(3)
        for _ in range(3):
            loop.round(loop.take_flag())
        loop.scheduler.step()
        if number > 1:
            assert loop.lr == 0.5**number


def test_ranks_agree_whatever_each_of_them_has_called():
    """Rank 1 has no data and calls nothing; rank 2 calls its second scheduler just after rank 0 has looked."""

    def both(optimizer):
        return [schedules.StepLR(optimizer, 1, gamma=0.5), schedules.ExponentialLR(optimizer, gamma=0.9)]

    store = Store()
    loops = [Loop(both, ranks=3, store=store) for _ in range(3)]
    flagged, seen = False, []
    for number in range(6):
        for loop in (loops[0], loops[2]):
            loop.rates.before_step(1)
        loops[0].round(flagged)
        loops[0].scheduler[0].step()
        if number == 0:
            loops[2].scheduler[0].step()
        if number == 1:
            loops[2].scheduler[1].step()
        loops[1].round(flagged)
        loops[2].round(flagged)
        flags = [loop.take_flag() for loop in loops]
        flagged = any(flags)
        seen.append({loop.lr for loop in loops})
    assert all(len(rates) == 1 for rates in seen)
    last = [rates.pop() for rates in seen]
    assert last == pytest.approx([1.0, 0.5**2, 0.5**3 * 0.9**3, *(0.45**n for n in (4, 5, 6))])


def test_a_call_before_the_first_step_tells_nothing():
    """Some loops step their schedulers at the beginning of an epoch."""
    loop = Loop(SCHEDULES["step"])
    for step in range(30):
        if step % 10 == 0:
            loop.scheduler.step()
        loop.micro_batch(called=False)
        assert loop.lr == (1.0 if step < 10 else 0.5 ** ((step + 1) // 10))


def test_schedulers_called_one_after_the_other_are_told_apart():
    def both(optimizer):
        return [schedules.StepLR(optimizer, 1, gamma=0.5), schedules.ExponentialLR(optimizer, gamma=0.9)]

    loop = Loop(both)
    assert [words.split("(")[0] for words in loop.found] == ["ExponentialLR", "StepLR"]
    steps, exponential = loop.scheduler
    loop.scheduler = exponential
    for step in range(1, 31):
        loop.micro_batch()
        if step % 10 == 0:
            steps.step()
        expected = 0.9**step * 0.5 ** (step // 10 if step > 10 else 0)
        assert step == 1 or loop.lr == pytest.approx(expected)


def test_only_the_outermost_is_found_and_only_of_this_optimizer():
    class Around(schedules.LRScheduler):
        """As people write them: a warm-up that steps another scheduler afterwards."""

        def __init__(self, optimizer, after):
            self.after = after
            super().__init__(optimizer)

        def get_lr(self):
            return self.base_lrs

    others = [schedules.StepLR(Handed().inner, 1), schedules.StepLR(Handed().optimizer, 1)]
    for make in (SCHEDULES["warm-up then cosine"], SCHEDULES["chained"], lambda o: Around(o, SCHEDULES["step"](o))):
        loop = Loop(make)
        assert [words.split("(")[0] for words in loop.found] == [type(loop.scheduler).__name__]
    for other in others:
        assert "step" not in vars(other)


def test_one_that_was_given_is_not_found_again_and_neither_are_its_parts():
    handed = Handed()
    rates = rates_of(handed)
    scheduler = SCHEDULES["warm-up then cosine"](handed.inner)
    rates.drive(scheduler, 10)
    (words,) = rates.find(Data())
    assert words.startswith("SequentialLR(") and words.endswith(" every 10")


def test_a_scheduler_that_was_given_up_is_not_found():
    handed = Handed()
    lost = schedules.StepLR(handed.inner, 1)
    lost.myself = lost  # only the collector gets rid of it
    kept = schedules.StepLR(handed.inner, 2)
    del lost
    (words,) = rates_of(handed).find(Data())
    assert "step_size=2" in words and kept.step_size == 2


def test_two_that_cannot_be_told_apart_are_refused():
    handed = Handed()
    both = [schedules.StepLR(handed.inner, 1), schedules.StepLR(handed.optimizer, 1)]
    with pytest.raises(PacelineError, match=r"Two schedulers of the optimizer cannot be told apart: StepLR\(.*gamma"):
        rates_of(handed).find(Data())
    assert len(both) == 2


def test_the_words_tell_what_ranks_must_have_in_common():
    handed, other = Handed(), Handed()
    kept = [make(handed.inner) for make in SCHEDULES.values()]
    same = [make(other.inner) for make in SCHEDULES.values()]
    different = schedules.CosineAnnealingLR(other.inner, T_max=11)
    words, again = rates_of(handed).find(Data()), rates_of(other).find(Data())
    assert len(words) == len(kept) and len(again) == len(same) + 1
    assert set(again) - set(words) == {text for text in again if "T_max=11" in text}
    assert different.T_max == 11


def test_a_step_to_an_epoch_is_refused():
    loop = Loop(lambda o: schedules.CosineAnnealingWarmRestarts(o, T_0=2))
    loop.scheduler.step(None)
    with pytest.raises(PacelineError, match=r"CosineAnnealingWarmRestarts.step\(1.5\) was called with an argument"):
        loop.scheduler.step(1.5)


def test_one_cycle_stays_at_its_end():
    loop = Loop(lambda o: schedules.OneCycleLR(o, max_lr=1.0, total_steps=5))
    for _ in range(8):
        loop.micro_batch()
    assert (
        loop.scheduler.last_epoch == 5
        and loop.lr == torch_rates(lambda o: schedules.OneCycleLR(o, max_lr=1.0, total_steps=5), 5)[-1]
    )


def test_the_users_own_checkpoint_of_a_scheduler_holds_nothing_of_ours():
    loop = Loop(SCHEDULES["step"])
    for _ in range(3):
        loop.micro_batch()
    saved = loop.scheduler.state_dict()
    assert "step" not in saved and "state_dict" not in saved and saved["last_epoch"] == 3
    other = SCHEDULES["step"](Handed().inner)
    other.load_state_dict(pickle.loads(pickle.dumps(saved)))
    assert other.last_epoch == 3


def test_after_the_run_the_scheduler_is_the_users_again():
    loop = Loop(SCHEDULES["step"])
    loop.micro_batch()
    assert loop.lr == 1.0
    loop.rates.give_back()
    assert "step" not in vars(loop.scheduler) and "state_dict" not in vars(loop.scheduler)
    loop.handed.optimizer.step()
    loop.scheduler.step()
    assert loop.lr == 0.5 and loop.rates.state_dict() == {"schedulers": []}


# ---- resuming


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_resumed_schedule_goes_on_exactly(make, given):
    """As a checkpoint does it: the optimizer's groups and the scheduler's numbers, through JSON."""

    def started():
        handed = Handed()
        rates = rates_of(handed)
        scheduler = make(handed.optimizer)
        if given:
            rates.drive(scheduler, 8)
        rates.find(Data())
        handed.backward()
        rates.before_step(1)
        handed.optimizer.step()
        return handed, rates, scheduler

    whole, rates, scheduler = started()
    if not given:
        scheduler.step()
        rates.decide(1, 0)
    rates.advance(0, 45)
    saved = json.loads(json.dumps(rates.state_dict()))
    groups = whole.inner.state_dict()
    resumed, again, scheduler = started()
    resumed.inner.load_state_dict(groups)
    again.load_state_dict(saved)
    again.check()
    for before, after in ((45, 50), (50, 61), (61, 75)):
        scheduler.step()
        rates.advance(before, after)
        again.advance(before, after)
        assert rate_of(resumed) == rate_of(whole)


def test_a_schedule_that_was_not_stepped_yet_is_decided_after_the_resume():
    loop = Loop(SCHEDULES["step"])
    for _ in range(8):
        loop.micro_batch(called=False)
    saved = json.loads(json.dumps(loop.rates.state_dict()))
    again = Loop(SCHEDULES["step"])
    again.rates.load_state_dict(saved)
    again.applied = loop.applied
    for step in range(9, 25):
        again.micro_batch(called=step == 10)
    assert again.lr == 0.25, "once an epoch: most of one was applied before the first call"


def test_a_period_in_the_script_counts_more_than_that_of_the_checkpoint():
    _, rates, _ = halving(every=10)
    rates.advance(0, 20)
    group, again, _ = halving(every=100)
    again.load_state_dict(json.loads(json.dumps(rates.state_dict())))
    again.advance(20, 200)
    assert group["lr"] == 0.25


def test_schedulers_that_a_checkpoint_does_not_know_begin_at_their_beginning():
    _, rates, _ = halving(every=10)
    rates.advance(0, 20)
    handed = Handed()
    again = rates_of(handed)
    scheduler = schedules.ExponentialLR(handed.inner, gamma=0.5)
    again.drive(scheduler, 10)
    again.load_state_dict(json.loads(json.dumps(rates.state_dict())))
    assert scheduler.last_epoch == 0
