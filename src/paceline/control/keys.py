"""The key-value store in the service: what torch's process groups need to find each other.

torch's own TCPStore listens on every interface and lets anybody read and overwrite keys; this one is behind the run's
secret.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.control.messages import integer
from paceline.control.waiting import Later
from paceline.control.wire import Frame
from paceline.errors import PacelineError

GENERATION = "generation-"
"""Before the number of the membership that forms a group, in the keys of that group."""


def is_of_the_past(key: str, generation: int) -> bool:
    """Whether the key belongs to a group of an older membership: who is missing there will never come.

    >>> is_of_the_past("generation-3/0/address", 4), is_of_the_past("generation-4/0", 4), is_of_the_past("resumed", 4)
    (True, False, False)
    """
    number = key.removeprefix(GENERATION).partition("/")[0]
    return key.startswith(GENERATION) and number.isdecimal() and int(number) < generation


def topic_of(key: str) -> str:
    """What those who wait for the key wait for."""
    return f"key {key}"


def about_a_key(topic: str) -> bool:
    return topic.startswith("key ")


class Keys:
    """Keys, and the answers to questions about them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def sum(self, key: str, amount: int) -> int:
        """The key's value, 0 when it is new, and so much more."""
        try:
            total = int(self.values.get(key, b"0")) + amount
        except ValueError:
            raise PacelineError(f"The store's key {key!r} holds no number to add to.") from None
        if not integer(total):
            raise PacelineError(f"The store's key {key!r} cannot hold {total}.", cause="It is more than 64 bits hold.")
        return total

    def get(self, key: str, timeout: float) -> Later:
        return self._when_there([key], timeout, lambda: Frame("value", buffers=[memoryview(self.values[key])]))

    def wait(self, keys: list[str], timeout: float) -> Later:
        return self._when_there(keys, timeout, lambda: Frame("done"))

    def check(self, keys: list[str]) -> Frame:
        return Frame("truth", {"value": self._first_missing(keys) is None})

    def delete(self, key: str) -> Frame:
        return Frame("truth", {"value": self.values.pop(key, None) is not None})

    def missing(self, keys: list[str]) -> list[str]:
        return [key for key in keys if key not in self.values]

    def _first_missing(self, keys: list[str]) -> str | None:
        return next((key for key in keys if key not in self.values), None)

    def _when_there(self, keys: list[str], timeout: float, answer: Callable[[], Frame]) -> Later:
        def attempt() -> Frame | str:
            missing = self._first_missing(keys)
            return answer() if missing is None else topic_of(missing)

        def too_late() -> PacelineError:
            return PacelineError(f"Nobody set the store's key {self._first_missing(keys)!r} within {timeout:g} s.")

        return Later(attempt, timeout, too_late)
