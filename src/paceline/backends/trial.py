"""Steps of the user's optimizer that it is made to forget, and steps with other settings for once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.rules.learning_rate import StepScale

MOMENTA = ("momentum", "betas")
SCALED = ("lr", "weight_decay", *MOMENTA)


class OptimizerTrial:
    """A step that leaves the optimizer as it was.

        OptimizerTrial(optimizer).step(optimizer.step)

    Meanwhile the optimizer works on copies of its state, which are made once and written over in every trial. They stay
    until the next one, so that a second trial can go on where the first has ended.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state: dict[Any, dict[str, Any]] = {}

    def step(self, step: Callable[[], object], after: OptimizerTrial | None = None) -> None:
        """Make the step; `after` another trial, as if that had been no trial."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        own, own_groups = dict(state), [dict(group) for group in groups]
        begin = own if after is None else after._state
        try:
            for parameter, values in begin.items():
                copies = self._state.get(parameter, {})
                state[parameter] = {name: _copied(copies.get(name), value) for name, value in values.items()}
            step()
            self._state = dict(state)
        finally:
            state.clear()
            state.update(own)
            for group, kept in zip(groups, own_groups, strict=True):
                group.clear()
                group.update(kept)


def _copied(copy: Any, value: Any) -> Any:
    """The value in memory of its own; in that of the last copy if there is one."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(copy, Tensor) and copy.shape == value.shape and copy.dtype == value.dtype:
        return copy.copy_(value)
    return value.clone()


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, scale: StepScale) -> Iterator[None]:
    """For one step: another learning rate and, if the scale says so, another momentum and weight decay."""
    kept = [{key: group[key] for key in SCALED if key in group} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if scale.learning_rate != 1.0:
            group["lr"] = group["lr"] * scale.learning_rate
        if (scale.momentum_power, scale.size_power, scale.momentum) != (1.0, 1.0, 1.0):
            for key in MOMENTA:
                if key in group:
                    group[key] = _kept(group[key], scale)
        if scale.weight_decay != 1.0 and "weight_decay" in group:
            group["weight_decay"] = group["weight_decay"] * scale.weight_decay
    try:
        yield
    finally:
        for group, settings in zip(optimizer.param_groups, kept, strict=True):
            group.update(settings)


def _kept(value: Any, scale: StepScale) -> Any:
    """How much of what came before the step keeps: of its direction, and behind that in `betas` of its size."""
    if isinstance(value, tuple | list):
        first, *others = value
        return scale.momentum * first**scale.momentum_power, *(beta**scale.size_power for beta in others)
    return scale.momentum * value**scale.momentum_power
