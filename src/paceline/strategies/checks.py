"""Checks of a strategy's options that speak the user's language."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import PacelineError
from paceline.strategies.strategy import Strategy


def at_least(strategy: Strategy, option: str, least: float) -> None:
    value = getattr(strategy, option)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        _refuse(strategy, option, f"must be a number of at least {least}")


def one_of(strategy: Strategy, option: str, choices: Sequence[str]) -> None:
    if getattr(strategy, option) not in choices:
        _refuse(strategy, option, "must be one of " + ", ".join(choices))


def _refuse(strategy: Strategy, option: str, rule: str) -> None:
    raise PacelineError(
        f"The option {option}={getattr(strategy, option)!r} of the strategy {strategy.name} is not possible: "
        f"it {rule}.",
        remedy="`paceline strategies` lists the options.",
    )
