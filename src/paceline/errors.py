"""Errors for people: what happened, where, the probable cause, and what to do about it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from types import TracebackType


class PacelineError(Exception):
    """An error that a user can act on.

    The command line prints it as one paragraph without a traceback; in a program it is an ordinary exception.

    Args:
        what: what happened, as one sentence.
        where: rank, round, file and line, option: whatever leads to the place.
        cause: the probable cause.
        remedy: what to do.

    >>> print(PacelineError("The port 29500 is in use.", remedy="Give another one with --port."))
    The port 29500 is in use. Give another one with --port.
    """

    def __init__(self, what: str, *, where: str = "", cause: str = "", remedy: str = "") -> None:
        self.what, self.where, self.cause, self.remedy = what, where, cause, remedy
        parts = [what, f"Where: {where}." if where else "", cause, remedy]
        super().__init__(" ".join(part for part in parts if part))


def no_such(what: str, name: str, choices: Iterable[str], hint: str = "") -> PacelineError:
    """The error for a name that is none of the choices; it suggests the nearest.

    >>> print(no_such("strategy", "abs-sdg", ["all-reduce", "abs-sgd"]))
    There is no strategy 'abs-sdg'. Did you mean 'abs-sgd'? Possible: all-reduce, abs-sgd.
    """
    choices = list(choices)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return PacelineError(
        f"There is no {what} {name!r}.",
        cause=f"Did you mean {near[0]!r}?" if near else "",
        remedy=f"Possible: {', '.join(choices)}." + (f" {hint}" if hint else ""),
    )


def print_as_paragraph() -> None:
    """From now on a `PacelineError` that nobody catches ends the program with its text alone: a traceback through our
    code tells the user nothing. All other errors are shown as before."""
    before = sys.excepthook
    if getattr(before, "prints_paragraphs", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, PacelineError):
            print(f"Error: {error}", file=sys.stderr)
        else:
            before(kind, error, trace)

    hook.prints_paragraphs = True  # type: ignore[attr-defined]  # a mark on our own function
    sys.excepthook = hook
