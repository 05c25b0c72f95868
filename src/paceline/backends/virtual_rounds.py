"""One collective of all ranks in virtual time, and the total that it brings."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from paceline.node import Gradient, Values

if TYPE_CHECKING:
    from paceline.backends.simulated_node import SimulatedNode

Waiter = tuple["SimulatedNode", int]
"""Who waits, and its ticket: a rank that something else woke meanwhile has another one."""


class Collective:
    """One collective of all ranks."""

    __slots__ = (
        "all_notes",
        "applied",
        "attempt",
        "count",
        "done",
        "early",
        "holders",
        "joined",
        "joining",
        "kind",
        "more",
        "nbytes",
        "newcomers",
        "notes",
        "number",
        "payloads",
        "ranks",
        "round",
        "value",
        "waiters",
    )

    def __init__(self, kind: str, number: int, round_number: int | None, nbytes: int) -> None:
        self.kind, self.number, self.round, self.nbytes = kind, number, round_number, nbytes
        self.payloads: dict[int, Any] = {}
        self.notes: dict[int, float] = {}
        self.all_notes: tuple[float, ...] = ()
        self.ranks: tuple[int, ...] = ()  # that have brought something, when all are there
        self.attempt = self.count = 0
        self.early: set[int] = set()  # ranks that have the result before the others, because somebody crashed
        self.holders: set[int] = set()
        self.waiters: list[Waiter] = []
        self.newcomers: tuple[int, ...] | None = None  # who were let in when it was applied
        self.value: Any = None
        self.joined = inf  # when the last rank joined
        self.done = self.applied = self.joining = False
        self.more = False  # whether lost ranks have left samples behind


class RoundTotal(Gradient):
    """The gradient of a whole round, and what else travelled with it."""

    __slots__ = ("parts", "working")

    def __init__(
        self, values: Values | None, count: int, working: bool, own: int | None, collective: Collective
    ) -> None:
        super().__init__(values, count)
        self.working, self.notes, self.ranks = working, collective.all_notes, collective.ranks
        self.parts = [(collective, 0, 0) if own is None else (collective, count, own)]

    def __iadd__(self, other: Gradient) -> Gradient:
        assert isinstance(other, RoundTotal)
        super().__iadd__(other)
        self.parts += other.parts
        self.working, self.notes, self.ranks = other.working, other.notes, other.ranks
        return self
