"""Steps of the user's optimizer that it is made to forget, and steps with other settings for once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from paceline.rules.learning_rate import StepScale

MOMENTA = ("momentum", "betas")


class OptimizerTrial:
    """Within it the optimizer works on copies of its state; afterwards it has its own again.

        with OptimizerTrial(optimizer):
            optimizer.step()

    The copies are made once and written over in every trial.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state: dict[Any, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        self._copies: dict[tuple[Any, str], Tensor] = {}

    def __enter__(self) -> None:
        state = self._optimizer.state
        self._state = {parameter: state[parameter] for parameter in state}
        self._groups = [dict(group) for group in self._optimizer.param_groups]
        for parameter, values in self._state.items():
            state[parameter] = {name: self._copy(parameter, name, value) for name, value in values.items()}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = self._optimizer.state
        for parameter in list(state):
            if parameter in self._state:
                state[parameter] = self._state[parameter]
            else:
                del state[parameter]
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(kept)

    def _copy(self, parameter: Any, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copy = self._copies.get((parameter, name))
        if copy is None or copy.shape != value.shape:
            copy = self._copies[parameter, name] = value.clone()
        return copy.copy_(value)


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, scale: StepScale) -> Iterator[None]:
    """For one step: another learning rate and, if the scale says so, another momentum."""
    kept = [{key: group[key] for key in ("lr", *MOMENTA) if key in group} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if scale.learning_rate != 1.0:
            group["lr"] = group["lr"] * scale.learning_rate
        if scale.momentum_power != 1.0:
            for key in MOMENTA:
                if key in group:
                    group[key] = _powered(group[key], scale.momentum_power)
    try:
        yield
    finally:
        for group, settings in zip(optimizer.param_groups, kept, strict=True):
            group.update(settings)


def _powered(value: Any, power: float) -> Any:
    return tuple(beta**power for beta in value) if isinstance(value, tuple | list) else value**power
