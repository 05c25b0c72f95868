"""Checks of a described cluster, made where the values live, so that code and files get the same protest.

A `WrongValueError` knows the key that it is about; the reader of cluster files adds the file and the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from paceline.errors import PacelineError


class WrongValueError(PacelineError):
    """A value of a described cluster is not possible."""

    def __init__(self, key: str, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.key = key


def number(
    owner: object, key: str, *, above: float | None = None, least: float | None = None, finite: bool = False
) -> None:
    """The attribute is a number above or at least something; `inf` is one unless it must be finite, NaN is none."""
    value = getattr(owner, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise WrongValueError(key, f"{key} = {value!r} is not a number.")
    if finite and value in (inf, -inf):
        raise WrongValueError(key, f"{key} = {value} is not possible: it must be finite.")
    if above is not None and not value > above:
        raise WrongValueError(key, f"{key} = {value} is not possible: it must be above {above:g}.")
    if least is not None and not value >= least:
        raise WrongValueError(key, f"{key} = {value} is not possible: it must be at least {least:g}.")


def whole(owner: object, key: str, least: int) -> None:
    """The attribute is an integer of at least something."""
    value = getattr(owner, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise WrongValueError(key, f"{key} = {value!r} is not possible: it must be a whole number of at least {least}.")


def one_of(owner: object, key: str, choices: Sequence[object]) -> None:
    value = getattr(owner, key)
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        possible = ", ".join(map(repr, choices))
        raise WrongValueError(key, f"{key} = {value!r} is not possible: it must be one of {possible}.")
