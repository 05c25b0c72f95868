"""Every strategy, by name. A new one joins by one line in `STRATEGIES`."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from paceline.errors import PacelineError
from paceline.strategies.abs_sgd import AbsSgd
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.balanced import Balanced
from paceline.strategies.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in (AllReduce, Balanced, AbsSgd)}

__all__ = ["STRATEGIES", "AbsSgd", "AllReduce", "Balanced", "Strategy", "create", "options"]


def create(text: str) -> Strategy:
    """A strategy from its name and, behind colons, its options.

    >>> create("abs-sgd:delay_cure=none:min_micro_batches=2")
    AbsSgd(delay_cure='none', min_micro_batches=2)
    """
    name, *settings = text.strip().split(":")
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.4)
        raise PacelineError(
            f"There is no strategy {name!r}.",
            cause=f"Did you mean {near[0]!r}?" if near else "",
            remedy=f"Strategies: {', '.join(STRATEGIES)}.",
        )
    kind = STRATEGIES[name]
    return kind(**dict(_setting(kind, each) for each in settings))


def options(kind: type[Strategy]) -> dict[str, Any]:
    """A strategy's options and their defaults.

    >>> options(AllReduce)
    {'micro_batches': 1}
    """
    return {field.name: field.default for field in dataclasses.fields(kind)}


def _setting(kind: type[Strategy], text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    known = options(kind)
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
        raise PacelineError(
            f"The strategy {kind.name} has no option {key!r}.",
            cause=f"Did you mean {near[0]!r}?" if near else "",
            remedy=f"Options: {', '.join(known)}. Write them as {kind.name}:option=value.",
        )
    try:
        return key, type(known[key])(value)
    except ValueError:
        raise PacelineError(
            f"The option {key} of the strategy {kind.name} cannot be {value!r}.",
            remedy=f"Give a {type(known[key]).__name__}, as in {kind.name}:{key}={known[key]}.",
        ) from None
