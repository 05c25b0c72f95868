"""What goes wrong, as data: who, when, how much, for how long.

| kind       | what it does                                                                                          |
|------------|-------------------------------------------------------------------------------------------------------|
| crash      | the rank is gone: its coroutine is closed, its leases go out again                                    |
| leave      | the rank is told to leave: it takes no more samples, and goes when its work is in rounds that count   |
| join       | a newcomer takes the place of the rank, if it is lost, from a round on; a rank that joins before it   |
|            | was ever lost is a further one, and the run begins without it                                         |
| hang       | the rank stands still: the micro-batch under way ends later by the duration, nothing else wakes it    |
| slow-down  | micro-batches that start within it take `factor` times as long                                        |
| partition  | messages and collectives that start within it and cross it leave when it heals                        |
| late-join  | the rank starts only then                                                                             |

Times are virtual seconds since the start of the run. A duration that is not given means for ever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from paceline.simulator.checks import WrongValueError, number, whole


@dataclass(frozen=True, kw_only=True)
class Fault(ABC):
    """Something that happens at a time."""

    kind: ClassVar[str]
    at: float

    def __post_init__(self) -> None:
        number(self, "at", least=0.0)
        if self.at == inf:
            raise WrongValueError("at", "at = inf is not possible: it would never happen.")

    @property
    @abstractmethod
    def ranks(self) -> frozenset[int]:
        """Whom it names."""


@dataclass(frozen=True, kw_only=True)
class RankFault(Fault):
    """Something that happens to one rank."""

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "rank", 0)

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset([self.rank])


@dataclass(frozen=True, kw_only=True)
class Crash(RankFault):
    """The rank is gone for good."""

    kind: ClassVar[str] = "crash"


@dataclass(frozen=True, kw_only=True)
class Leave(RankFault):
    """The rank is told to leave."""

    kind: ClassVar[str] = "leave"


@dataclass(frozen=True, kw_only=True)
class Join(RankFault):
    """A newcomer comes for the place of the rank, or as a further one."""

    kind: ClassVar[str] = "join"


@dataclass(frozen=True, kw_only=True)
class LateJoin(RankFault):
    """The rank starts at that time instead of zero."""

    kind: ClassVar[str] = "late-join"


@dataclass(frozen=True, kw_only=True)
class Hang(RankFault):
    """The rank stands still."""

    kind: ClassVar[str] = "hang"
    duration: float = inf

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "duration", above=0.0)


@dataclass(frozen=True, kw_only=True)
class SlowDown(RankFault):
    """The rank's micro-batches take `factor` times as long."""

    kind: ClassVar[str] = "slow-down"
    factor: float
    duration: float = inf

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "factor", above=0.0)
        number(self, "duration", above=0.0)


@dataclass(frozen=True, kw_only=True)
class Partition(Fault):
    """The groups cannot reach each other. Ranks that no group names form one more group."""

    kind: ClassVar[str] = "partition"
    groups: tuple[tuple[int, ...], ...]
    duration: float = inf

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "duration", above=0.0)
        try:
            groups = tuple(tuple(group) for group in self.groups)
        except TypeError:
            groups = ()
        named = [rank for group in groups for rank in group]
        sound = all(type(rank) is int and rank >= 0 for rank in named) and len(set(named)) == len(named)
        if not sound or not groups or not all(groups):
            raise WrongValueError("groups", f"groups = {self.groups!r} is not a list of disjoint lists of ranks.")
        object.__setattr__(self, "groups", groups)  # a file gives lists; as a value it must be hashable

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for group in self.groups for rank in group)

    def separates(self, ranks: Iterable[int]) -> bool:
        side = {rank: index for index, group in enumerate(self.groups) for rank in group}
        return len({side.get(rank, -1) for rank in ranks}) > 1


KINDS: dict[str, type[Fault]] = {each.kind: each for each in (Crash, Leave, Join, Hang, SlowDown, Partition, LateJoin)}


def check_ranks(fault: Fault, workers: int) -> None:
    """Protest when the fault names a rank that the cluster does not have."""
    strange = [rank for rank in sorted(fault.ranks) if rank >= workers]
    if strange:
        key = "groups" if isinstance(fault, Partition) else "rank"
        raise WrongValueError(
            key, f"The {fault.kind} names rank {strange[0]}, but the cluster has only ranks 0 to {workers - 1}."
        )


def further_ranks(faults: Sequence[Fault]) -> list[int]:
    """Ranks that join before they were ever lost: the run begins without them.

    >>> further_ranks([Join(at=2.0, rank=4), Crash(at=3.0, rank=4), Crash(at=1.0, rank=1), Join(at=1.0, rank=1)])
    [4]
    """
    coming_and_going = [fault for fault in faults if isinstance(fault, Crash | Leave | Join)]
    first: dict[int, Fault] = {}
    for fault in sorted(coming_and_going, key=lambda fault: (fault.at, isinstance(fault, Join))):
        first.setdefault(fault.rank, fault)
    return sorted(rank for rank, fault in first.items() if isinstance(fault, Join))


class FaultPlan:
    """A cluster's faults, sorted by the questions that a run asks."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        ordered = sorted(faults, key=lambda fault: fault.at)
        self.crashes = [fault for fault in ordered if isinstance(fault, Crash)]
        self.leaves = [fault for fault in ordered if isinstance(fault, Leave)]
        self.joins = [fault for fault in ordered if isinstance(fault, Join)]
        self.starts = {fault.rank: fault.at for fault in ordered if isinstance(fault, LateJoin)}
        self._hangs = [fault for fault in ordered if isinstance(fault, Hang)]
        self._slow_downs = [fault for fault in ordered if isinstance(fault, SlowDown)]
        self._partitions = [fault for fault in ordered if isinstance(fault, Partition)]
        self.touched = frozenset(fault.rank for fault in (*self._hangs, *self._slow_downs))
        """Ranks whose micro-batches a fault can change; all others need not ask."""

    def end(self, rank: int, start: float, seconds: float) -> float:
        """When a micro-batch ends that starts then and would take so long; `inf` for never."""
        for slow in self._slow_downs:
            if slow.rank == rank and slow.at <= start < slow.at + slow.duration:
                seconds *= slow.factor
        end = start + seconds
        for hang in self._hangs:
            if hang.rank == rank and hang.at < end and start < hang.at + hang.duration:
                end += hang.at + hang.duration - max(hang.at, start)
        return end

    def thaw(self, rank: int, now: float) -> float:
        """When the rank can act next: now, unless it hangs."""
        for hang in self._hangs:
            if hang.rank == rank and hang.at <= now < hang.at + hang.duration:
                now = hang.at + hang.duration
        return now

    def open(self, ranks: Sequence[int], now: float) -> float:
        """When all these ranks can reach each other next: now, unless a partition separates them."""
        for cut in self._partitions:
            if cut.at <= now < cut.at + cut.duration and cut.separates(ranks):
                now = cut.at + cut.duration
        return now

    def in_force(self, now: float) -> list[str]:
        """What is still broken, in words: for the explanation of a run that stands still."""
        said = [f"rank {crash.rank} crashed at {crash.at:g} s" for crash in self.crashes if crash.at <= now]
        said += [f"rank {hang.rank} hangs since {hang.at:g} s" for hang in self._hangs if _lasts(hang, now)]
        said += [f"a partition since {cut.at:g} s does not heal" for cut in self._partitions if _lasts(cut, now)]
        return said


def _lasts(fault: Hang | Partition, now: float) -> bool:
    return fault.at <= now and fault.duration == inf
