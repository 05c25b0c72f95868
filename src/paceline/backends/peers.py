"""What collectives need to know of the other ranks, and who tells it: the control plane, or nobody at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

from paceline.control.client import ControlClient
from paceline.control.keys import GENERATION
from paceline.control.store import ControlStore


class Present(NamedTuple):
    """The membership: its generation, who is gone, and below which number ranks are; 0 for those of the beginning."""

    generation: int
    lost: frozenset[int]
    left: frozenset[int]
    seats: int = 0


class Peers(Protocol):
    """The other ranks, as far as collectives need to know them."""

    def check(self, seconds: float) -> None:
        """Look whether somebody is known to be lost, or becomes so within the time. Raises if the run cannot go on."""

    def membership(self) -> Present:
        """Who is gone, as far as is known here."""

    def host_of(self, rank: int) -> str:
        """Where a rank that is here is: the same for two on one machine."""

    def say(self, key: str, value: bytes) -> None:
        """To all ranks of a generation."""

    def heard(self, keys: list[str]) -> list[bytes] | None:
        """What ranks have said, if all of them have."""

    def store(self, generation: int) -> c10d.Store:
        """Where the ranks of a generation find each other."""


class ControlPeers:
    """The other ranks, as the control plane tells of them.

    Args:
        control: the rank's line to it.
        check: see `Peers.check`.
    """

    def __init__(self, control: ControlClient, check: Callable[[float], None]) -> None:
        self._control, self.check = control, check
        self._store = ControlStore(control)  # torch keeps only its C++ half alive

    def membership(self) -> Present:
        return Present(*self._control.membership)

    def host_of(self, rank: int) -> str:
        place = self._control.roster[rank]
        return place[0] if place else ""

    def say(self, key: str, value: bytes) -> None:
        self._control.store_set(key, value)

    def heard(self, keys: list[str]) -> list[bytes] | None:
        return [self._control.store_get(key) for key in keys] if self._control.store_check(keys) else None

    def store(self, generation: int) -> c10d.Store:
        return c10d.PrefixStore(f"{GENERATION}{generation}", self._store)


class NobodyIsLost:
    """Ranks that find each other in a store of torch's, and stay to the end.

    Args:
        store: the same for all.
        check: see `Peers.check`.
    """

    def __init__(self, store: c10d.Store, check: Callable[[float], None] = lambda seconds: None) -> None:
        self._store, self.check = store, check

    def membership(self) -> Present:
        return Present(0, frozenset(), frozenset())

    def host_of(self, rank: int) -> str:
        return ""

    def say(self, key: str, value: bytes) -> None:
        self._store.set(key, value.decode())

    def heard(self, keys: list[str]) -> list[bytes] | None:
        return [self._store.get(key) for key in keys] if self._store.check(keys) else None

    def store(self, generation: int) -> c10d.Store:
        return self._store
