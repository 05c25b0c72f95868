"""Checks of a strategy's options that speak the user's language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from paceline.errors import PacelineError
from paceline.strategies.strategy import Strategy


def at_least(strategy: Strategy, option: str, least: float) -> None:
    """A number, and a whole one where the default is one."""
    value, whole = getattr(strategy, option), isinstance(_default(strategy, option), int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not value >= least:
        _refuse(strategy, option, f"must be a {'whole ' if whole else ''}number of at least {least}")


def share_of_one(strategy: Strategy, option: str) -> None:
    value = getattr(strategy, option)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        _refuse(strategy, option, "must be a number above 0 and at most 1")


def one_of(strategy: Strategy, option: str, choices: Sequence[str]) -> None:
    if getattr(strategy, option) not in choices:
        _refuse(strategy, option, "must be one of " + ", ".join(choices))


def yes_or_no(strategy: Strategy, option: str) -> None:
    if not isinstance(getattr(strategy, option), bool):
        _refuse(strategy, option, "must be True or False")


def batch_target(strategy: Strategy, option: str, needed: bool) -> None:
    """A number of samples or `auto`; a number in text, as the command line has it, becomes one."""
    value: Any = getattr(strategy, option)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
        object.__setattr__(strategy, option, value)
    if value == "" and not needed:
        return
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        trigger = "trigger=target:" if hasattr(strategy, "trigger") else ""
        missing = "" if value else f" (it is missing: write {strategy.name}:{trigger}{option}=512)"
        _refuse(strategy, option, f"must be a number of samples or auto{missing}")
    if not needed:
        _refuse(strategy, option, "is of use only with trigger=target")


def check_reference(strategy: Strategy) -> None:
    """A learning-rate rule that is named needs the batch that it starts from."""
    at_least(strategy, "reference_batch", 0)
    rule, reference = getattr(strategy, "lr_rule"), getattr(strategy, "reference_batch")  # noqa: B009  (not every strategy has them)
    if rule in ("linear", "sqrt", "adascale") and reference == 0:
        raise PacelineError(
            f"The strategy {strategy.name} has lr_rule={rule} and no reference_batch.",
            cause="The rule scales the learning rate from the batch that it was tuned for.",
            remedy=f"Give that, as in {strategy.name}:lr_rule={rule}:reference_batch=128, or lr_rule=auto, which takes "
            "a micro-batch times the number of workers.",
        )


def only_as_default(strategy: Strategy, options: Sequence[str], because_of: str) -> None:
    """Options that have no meaning together with another one."""
    for option in options:
        if getattr(strategy, option) != _default(strategy, option):
            _refuse(strategy, option, f"has no meaning with {because_of}: leave one of them out")


def as_published(strategy: Strategy, published: Mapping[str, Any]) -> None:
    """Set the options to what a paper says; one that was given otherwise contradicts it."""
    for option, value in published.items():
        if getattr(strategy, option) not in (_default(strategy, option), value):
            _refuse(strategy, option, f"is {value} in the paper: leave it out, or leave out `paper`")
        object.__setattr__(strategy, option, value)


def target_of_a_round(strategy: Strategy, target: int | str, micro_batch: int) -> None:
    """Before the first round: a target below a micro-batch is a mistake."""
    if isinstance(target, int) and target < micro_batch:
        raise PacelineError(
            f"The target of {target} samples a round is smaller than a micro-batch of {micro_batch}.",
            where=f"strategy {strategy.name}",
            remedy=f"Give a target of at least {micro_batch}, or smaller micro-batches.",
        )


def _default(strategy: Strategy, option: str) -> Any:
    return next(field.default for field in fields(strategy) if field.name == option)


def _refuse(strategy: Strategy, option: str, rule: str) -> NoReturn:
    raise PacelineError(
        f"The option {option}={getattr(strategy, option)!r} of the strategy {strategy.name} is not possible: "
        f"it {rule}.",
        remedy="`paceline strategies` lists the options.",
    )
