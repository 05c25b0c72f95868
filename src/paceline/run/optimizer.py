"""The user's optimizer, as the run drives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.backends.replica import Replica
from paceline.errors import PacelineError


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


class LearningRates:
    """Keeps the learning rates equal on all ranks: only the run moves them, by samples and not by local steps.

    Ranks of unequal speed call their loops unequally often. A scheduler stepped in the loop would give every rank
    another learning rate, and the models would drift apart without a word.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, alone: bool) -> None:
        self._optimizer, self._alone = optimizer, alone
        self._scheduler: Any = None
        self._every = 0
        self._agreed = self._present()

    def _present(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def drive(self, scheduler: Any, every: int) -> None:
        """Step the scheduler once for every so many samples that were applied, over all ranks."""
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise PacelineError(
                "ReduceLROnPlateau cannot be driven by samples.",
                cause="It needs a metric, which every rank would measure at another moment.",
                remedy="Take a schedule that depends only on progress (cosine, step, one-cycle).",
            )
        self._scheduler, self._every = scheduler, every
        self._agreed = self._present()

    def check(self) -> None:
        """Before a step: has somebody else changed a learning rate?"""
        if not self._alone and self._present() != self._agreed:
            raise PacelineError(
                f"The learning rate was changed from {self._agreed} to {self._present()} in the training loop.",
                cause="Ranks of unequal speed go through their loops unequally often, so their learning rates and "
                "then their models would differ.",
                remedy="Give the scheduler to run.scheduler(scheduler, every=...) and do not call its step().",
            )

    def advance(self, before: int, after: int) -> None:
        """Samples applied went from `before` to `after`."""
        if self._scheduler is not None:
            for _ in range(after // self._every - before // self._every):
                self._scheduler.step()
            self._agreed = self._present()

    def state_dict(self) -> dict[str, Any]:
        """Only plain numbers: what a manifest can hold."""
        if self._scheduler is None:
            return {}
        return _plain(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scheduler is not None and state:
            self._scheduler.load_state_dict(state)
        self._agreed = self._present()


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """What comes back from JSON as it was, also of schedulers inside a scheduler. A table with numbers as keys
    (milestones) would not; a scheduler is made with it anyway."""
    return {
        key: [_plain(each) if isinstance(each, dict) else each for each in value] if isinstance(value, list) else value
        for key, value in state.items()
        if (value is None or isinstance(value, (int, float, str, list))) and not key.startswith("_get_lr")
    }
