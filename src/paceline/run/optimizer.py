"""The user's optimizer and its schedulers, as the run drives them."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch

from paceline.backends.replica import Replica
from paceline.control.client import ControlClient
from paceline.errors import PacelineError
from paceline.run.loader import Loader

REPLACED = ("step", "state_dict")  # of a scheduler, while the run makes its steps
LONGEST_WORDS = 1000  # in which ranks tell each other of a scheduler


class RunOptimizer(torch.optim.Optimizer):
    """Looks like the user's optimizer; `step()` hands the micro-batch's gradient to the strategy.

    The user's own optimizer makes its step when the strategy says so, with the mean gradient of a whole round. It
    is a `torch.optim.Optimizer`, so schedulers and `GradScaler` take it.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        replica: Replica,
        give_gradient: Callable[[], None],
        gradients_zeroed: Callable[[], None],
    ) -> None:
        # Deliberately without super().__init__(): groups, state and defaults are the inner optimizer's own.
        self.inner, self._replica = inner, replica
        self._give_gradient, self._gradients_zeroed = give_gradient, gradients_zeroed

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # the base class has plain attributes
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # as above
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # as above
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients. A gradient that is not there counts as zero, so `set_to_none` makes no difference."""
        self._gradients_zeroed()
        self._replica.drop_gradients()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand in the gradient of the micro-batch. The parameters move when the strategy ends a round."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._give_gradient()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise PacelineError(
            "Parameters cannot be added after run.optimizer(...).",
            cause="They lie in one flat buffer whose layout all ranks have agreed on.",
            remedy="Give all parameter groups to the torch optimizer before run.optimizer(...).",
        )

    def __repr__(self) -> str:
        return f"RunOptimizer({self.inner!r})"


class TakenOver:
    """A scheduler whose steps the run makes. The loop may call its `step()`, which only says that it was called.

    Args:
        scheduler: any with a `step()` that needs no argument.
        every: samples over all ranks for one step of it; None while that is not known, and nothing happens until then.
        called: what to do when the loop calls `step()`.
    """

    def __init__(self, scheduler: Any, every: int | None, called: Callable[[TakenOver], None]) -> None:
        self.scheduler, self.every, self._called = scheduler, every, called
        self._asked_for = every is not None
        self.said = False  # that the loop calls it
        self.kind, self.settings = type(scheduler).__name__, _in_words(scheduler)
        self._step, self._state_dict = scheduler.step, getattr(scheduler, "state_dict", dict)
        self._replaced = {name: vars(scheduler)[name] for name in REPLACED if name in vars(scheduler)}
        # torch's state_dict() gives whatever lies in the object: ours would be in the user's own checkpoints.
        scheduler.step, scheduler.state_dict = self._note, self.state_dict

    def give_back(self) -> None:
        """From now on the scheduler is the user's again."""
        for name in REPLACED:
            vars(self.scheduler).pop(name, None)
        vars(self.scheduler).update(self._replaced)

    def _note(self, epoch: Any = None) -> None:
        if epoch is not None:
            raise PacelineError(
                f"{self.kind}.step({epoch}) was called with an argument.",
                cause="The run steps schedulers by samples over all ranks; every rank would ask for another epoch.",
                remedy="Call step() without one. run.scheduler(scheduler, every=...) sets another period.",
            )
        self._called(self)

    def advance(self, before: int, after: int) -> None:
        """Samples applied went from `before` to `after`."""
        if self.every is None:
            return
        for _ in range(after // self.every - before // self.every):
            if self._has_ended():
                return
            optimizer = getattr(self.scheduler, "optimizer", None)
            if isinstance(optimizer, torch.optim.Optimizer):
                # torch warns when no step of this very object came before. The run knows that one has been made, but
                # a rank without data makes none by itself, and after a resume it may have been made by another process.
                vars(optimizer).update(_opt_called=True)
            self._step()

    def _has_ended(self) -> bool:
        """OneCycleLR raises when it is stepped too often. How many whole batches there are in all epochs together may
        be a few more than there are in each."""
        one_cycle = isinstance(self.scheduler, torch.optim.lr_scheduler.OneCycleLR)
        return one_cycle and bool(self.scheduler.last_epoch >= self.scheduler.total_steps)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own."""
        return {name: value for name, value in self._state_dict().items() if name not in REPLACED}

    def load(self, saved: dict[str, Any]) -> None:
        """Go on where an earlier run was; a period that the script gives is taken from the script."""
        if saved["state"]:
            self.scheduler.load_state_dict(saved["state"])
        if not self._asked_for:
            self.every = saved["every"]


class LearningRates:
    """Keeps the learning rates equal on all ranks: only the run moves them, by samples and not by local steps.

    Ranks of unequal speed call their loops unequally often. A scheduler stepped in the loop would give every rank
    another learning rate, and the models would drift apart without a word. So the run takes the schedulers over, and
    makes the steps that the loop calls for itself: by samples applied, after the same round on all ranks.

    Args:
        optimizer: the user's.
        world_size: how many ranks there are.
        store: where the ranks tell each other what their loops do.
        tell: makes the next round's total say, on all ranks, that there is something new in the store.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, world_size: int, store: ControlClient, tell: Callable[[], None]
    ) -> None:
        self._optimizer, self._world_size, self._store, self._tell = optimizer, world_size, store, tell
        self._schedulers: list[TakenOver] = []
        self._steps = self._micro_batches = 0
        self._first_epoch = 0
        self._loader: Loader  # from `find` on
        self._agreed = self._present()

    def _present(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    # ---- which schedulers

    def drive(self, scheduler: Any, every: int | str) -> None:
        """Step the scheduler once for every so many samples that were applied, over all ranks."""
        if not isinstance(every, int) or every < 1:
            raise PacelineError(f"every={every!r} is neither 'epoch' nor a number of samples above zero.")
        for known in self._schedulers:
            if known.scheduler is scheduler:
                known.every = every
                return
        self._take_over(scheduler, every)

    def find(self, loader: Loader) -> list[str]:
        """Take over the schedulers of the optimizer that nobody told us of. Just before training begins: what they
        have done to the learning rates until now is agreed.

        Args:
            loader: of the loop that may step them.

        Returns:
            all schedulers with their settings, in words and in the same order on all ranks.
        """
        self._loader = loader
        if self._unknown():
            gc.collect()  # a scheduler that was given up, and that only the collector has not seen yet, is none
        unknown = sorted(self._unknown(), key=_in_words)
        for one, other in itertools.pairwise(unknown):
            if _in_words(one) == _in_words(other):
                raise PacelineError(
                    f"Two schedulers of the optimizer cannot be told apart: {_in_words(one)}.",
                    cause="The ranks must agree on which of them it is that the loop steps.",
                    remedy="Give each to run.scheduler(scheduler, every=...), or join them in a ChainedScheduler.",
                )
        for scheduler in unknown:
            self._take_over(scheduler, None)
        self._agreed = self._present()
        return [f"{each.settings} every {each.every}" if each.every else each.settings for each in self._schedulers]

    def _take_over(self, scheduler: Any, every: int | None) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise PacelineError(
                "ReduceLROnPlateau cannot be driven by samples.",
                cause="It needs a metric, which every rank would measure at another moment.",
                remedy="Take a schedule that depends only on progress (cosine, step, one-cycle).",
            )
        self._schedulers.append(TakenOver(scheduler, every, self._called))
        self._agreed = self._present()

    def _unknown(self) -> list[Any]:
        """Among all objects there are: schedulers of this optimizer, the outermost of those that hold others. They are
        told by their type alone: to ask anything of a stranger (a proxy, a lazy module) may wake it."""
        ours = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.lr_scheduler.LRScheduler)]
        ours = [scheduler for scheduler in ours if self._moves_our_rates(vars(scheduler).get("optimizer"))]
        known = [each.scheduler for each in self._schedulers]
        left_out = {id(each) for each in known} | {id(part) for each in [*ours, *known] for part in _parts(each)}
        return [scheduler for scheduler in ours if id(scheduler) not in left_out]

    def _moves_our_rates(self, optimizer: Any) -> bool:
        return (optimizer.inner if issubclass(type(optimizer), RunOptimizer) else optimizer) is self._optimizer

    def give_back(self) -> None:
        """The run is over: the schedulers are the user's again."""
        for each in self._schedulers:
            each.give_back()
        self._schedulers.clear()

    # ---- how often they are stepped

    def before_step(self, micro_batches: int) -> None:
        """The loop makes a step with so many micro-batches."""
        if not self._steps:
            self._first_epoch = self._loader.epoch
        self._steps += 1
        self._micro_batches += micro_batches
        self.check()

    def check(self) -> None:
        """Has somebody else changed a learning rate?"""
        if self._world_size > 1 and self._present() != self._agreed:
            raise PacelineError(
                f"The learning rate was changed from {self._agreed} to {self._present()} in the training loop.",
                cause="Ranks of unequal speed go through their loops unequally often, so their learning rates and "
                "then their models would differ.",
                remedy="Use a torch scheduler that is made before the first micro-batch: the run then steps it by "
                "samples. Any other can be given to run.scheduler(scheduler, every=...).",
            )

    def _called(self, each: TakenOver) -> None:
        """The loop has called a scheduler's `step()`. Calls before its first step mean nothing: some loops step their
        schedulers at the beginning of an epoch."""
        if each.every is None and self._steps and not each.said:
            each.said = True
            # Loops that add up several micro-batches before a step call the scheduler once for all of them.
            micro_batches = max(1, round(self._micro_batches / self._steps))
            an_epoch_is_over = self._loader.epoch > self._first_epoch
            said = json.dumps((micro_batches, an_epoch_is_over)).encode()
            self._store.store_set(_name_of(self._schedulers.index(each)), said)
            self._tell()

    def decide(self, round_number: int, before: int) -> None:
        """A loop has called a scheduler for the first time: is it one for every step, or one for every epoch?

        A loop that calls it after every step does so soon. One that calls it after every epoch does so when the first
        is over for this loop, or, if it counts its steps, when most of it is over for all. The steps of the scheduler
        that were due until now are made up for.

        Args:
            round_number: the round whose total says that there was a call.
            before: samples applied before it, as far as this rank knows.
        """
        undecided = {number: each for number, each in enumerate(self._schedulers) if each.every is None}
        if undecided:
            step, epoch = self._world_size * self._loader.micro_batch, self._loader.samples
            applied, said = self._said_until(round_number, list(undecided), before)
            for number, (micro_batches, an_epoch_is_over) in said:
                each = undecided[number]
                each.every = epoch if an_epoch_is_over or 2 * applied >= epoch else step * micro_batches
                each.advance(0, before)
            self._agreed = self._present()

    def _said_until(
        self, round_number: int, numbers: list[int], before: int
    ) -> tuple[int, list[tuple[int, tuple[int, bool]]]]:
        """What loops have said of these schedulers, and after how many samples. The first rank to ask finds it out for
        all: those who ask later might find more, and would have other learning rates for a round."""
        store, key = self._store, f"schedulers called until round {round_number}"
        if store.store_add(f"{key}: asked", 1) == 1:
            called = [number for number in numbers if store.store_check([_name_of(number)])]
            found = [(number, json.loads(store.store_get(_name_of(number)))) for number in called]
            store.store_set(key, json.dumps((before, found)).encode())
        answer: tuple[int, list[tuple[int, tuple[int, bool]]]] = json.loads(store.store_get(key))
        return answer

    def advance(self, before: int, after: int) -> None:
        """Samples applied went from `before` to `after`."""
        self.check()
        for each in self._schedulers:
            each.advance(before, after)
        self._agreed = self._present()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Only plain numbers: what a manifest can hold."""
        kept = [{"kind": e.kind, "every": e.every, "state": _plain(e.state_dict())} for e in self._schedulers]
        return {"schedulers": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Each scheduler goes on from the saved one of its kind; of several, in their order."""
        saved = list(state["schedulers"])
        for each in self._schedulers:
            same = next((one for one in saved if one["kind"] == each.kind), None)
            if same is not None:
                saved.remove(same)
                each.load(same)
        self._agreed = self._present()


def _name_of(number: int) -> str:
    """Where ranks say in the store that their loops call a scheduler."""
    return f"scheduler {number} is called"


def _parts(scheduler: Any) -> list[Any]:
    """The schedulers that a scheduler holds, and steps by itself (SequentialLR, ChainedScheduler, …)."""
    values = list(vars(scheduler).values())
    listed = [each for value in values if isinstance(value, list | tuple) for each in value]
    return [each for each in values + listed if isinstance(each, torch.optim.lr_scheduler.LRScheduler)]


def _in_words(scheduler: Any) -> str:
    """A scheduler's kind and settings, the same for those that were made in the same way.

    Functions are left out: two processes cannot compare them. A long table is told by its beginning and its checksum.
    """
    settings = [f"{name}={value}" for name, value in sorted(vars(scheduler).items()) if _is_plain(value)]
    words = f"{type(scheduler).__name__}({', '.join([*map(_in_words, _parts(scheduler)), *settings])})"
    checksum = hashlib.sha256(words.encode()).hexdigest()
    return words if len(words) <= LONGEST_WORDS else f"{words[:LONGEST_WORDS]}… ({checksum[:16]})"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """What comes back from JSON as it was, also of schedulers inside a scheduler. A table with numbers as keys
    (milestones) would not; a scheduler is made with it anyway."""
    return {
        key: [_plain(each) if isinstance(each, dict) else each for each in value] if isinstance(value, list) else value
        for key, value in state.items()
        if (value is None or isinstance(value, (int, float, str, list))) and not key.startswith("_get_lr")
    }
