"""Options behind a name, as in `local-sgd:steps=4:by_speed`: for strategies and for workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import PacelineError, no_such


def split_name(text: str) -> tuple[str, list[str]]:
    """A name, and behind colons or dashes its options.

    >>> split_name("abs-sgd --paper:min_micro_batches=2")
    ('abs-sgd', ['paper', 'min_micro_batches=2'])
    """
    name, *settings = (part.strip() for part in text.replace(" --", ":").split(":"))
    return name, settings


def read_options(settings: Sequence[str], known: Mapping[str, Any], what: str, name: str) -> dict[str, Any]:
    """The options' values, each of the type of its default. One without a value is switched on.

    Args:
        settings: as they were written, `key=value`.
        known: all options and their defaults.
        what, name: whose options they are, for the error.

    >>> read_options(["steps=4", "by_speed"], {"steps": 8, "by_speed": False}, "strategy", "local-sgd")
    {'steps': 4, 'by_speed': True}
    """
    return dict(_read(each, known, what, name) for each in settings)


def _read(text: str, known: Mapping[str, Any], what: str, name: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    if key not in known:
        raise no_such(f"option of the {what} {name} called", key, known, f"Write {name}:option=value.")
    try:
        return key, _value(value, type(known[key]))
    except ValueError:
        raise PacelineError(
            f"The option {key} of the {what} {name} cannot be {value!r}.",
            remedy=f"Write it as in {name}:{key}={known[key]}.",
        ) from None


def _value(text: str, kind: type) -> Any:
    """
    >>> _value("", bool), _value("false", bool), _value("3", int)
    (True, False, 3)
    """
    if kind is not bool:
        return kind(text)
    if text.lower() not in ("", "true", "false"):
        raise ValueError(text)
    return text.lower() != "false"
