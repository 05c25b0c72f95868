"""Ranks as threads of one process, with real process groups between them: for tests of collectives in whose middle a
rank is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from paceline.backends.collectives import Collectives
from paceline.backends.peers import Present

RANKS = 4


class Town:
    """What all ranks of a test see: who is lost, and what they tell each other.

    Args:
        hosts: of each rank.
    """

    def __init__(self, hosts: str) -> None:
        self._hosts = hosts
        self.present = Present(0, frozenset(), frozenset())
        self.said: dict[str, bytes] = {}
        self._store = c10d.HashStore()
        self.looks = 0
        """How often a rank has looked who is here."""

    def lose(self, *ranks: int) -> None:
        self.present = Present(self.present.generation + 1, self.present.lost | set(ranks), frozenset())

    def check(self, seconds: float) -> None:
        pass

    def membership(self) -> Present:
        self.looks += 1
        return self.present

    def host_of(self, rank: int) -> str:
        return self._hosts[rank]

    def say(self, key: str, value: bytes) -> None:
        self.said[key] = value

    def heard(self, keys: list[str]) -> list[bytes] | None:
        return [self.said[key] for key in keys] if all(key in self.said for key in keys) else None

    def store(self, generation: int) -> c10d.Store:
        return c10d.PrefixStore(str(generation), self._store)


def together(act: Callable[[int, Collectives, Town], Any], hosts: str = RANKS * "a") -> list[Any]:
    """What the act of each rank returns."""
    town = Town(hosts)

    def rank(number: int) -> Any:
        group = Collectives(town, number, len(hosts), torch.device("cpu"), "127.0.0.1")
        try:
            return act(number, group, town)
        finally:
            group.abandon()

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(rank, range(len(hosts))))
