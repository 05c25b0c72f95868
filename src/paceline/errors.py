"""Errors for people: what happened, where, the probable cause, and what to do about it."""

from __future__ import annotations


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
