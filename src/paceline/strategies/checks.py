"""Checks of a strategy's options that speak the user's language."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import PacelineError


def at_least(strategy: object, option: str, least: float) -> None:
    value = getattr(strategy, option)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        _refuse(strategy, option, f"must be a number of at least {least}")


def one_of(strategy: object, option: str, choices: Sequence[str]) -> None:
    if getattr(strategy, option) not in choices:
        _refuse(strategy, option, "must be one of " + ", ".join(choices))


def _refuse(strategy: object, option: str, rule: str) -> None:
    raise PacelineError(
        f"The option {option}={getattr(strategy, option)!r} of the strategy {getattr(strategy, 'name')} is not possible: "
        f"it {rule}.",
        remedy="`paceline strategies` lists the options.",
    )
