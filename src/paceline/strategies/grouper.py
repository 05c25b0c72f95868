"""Who is in which group: the first server of all gathers what iterations take, groups by it, and looks again.

every server            median seconds of a worker's last P iterations  →  the first server
the first server        when it has heard of every worker: groups of similar speed  →  all servers
later, with `regroup`   the same again; who is off twice running moves                      see `rules.grouping`
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paceline.node import Message, Node
from paceline.rules.grouping import Grouping, equal, given, natural, regroup
from paceline.strategies.received import Received

if TYPE_CHECKING:
    from paceline.strategies.parameter_server import ParameterServer


@dataclass(frozen=True)
class GroupRules:
    """How groups are formed, and what their servers tell each other. By default there is one group, and nothing to do.

    Args:
        grouping: `natural`, `equal`, or groups given as in `0-2+5/3+4`.
        regroup: whether workers move whose speed has changed.
        warm_up: iterations of a worker before its speed is known, and between two looks at it.
        exchange: see `exchange`.
    """

    grouping: str = "natural"
    regroup: bool = False
    warm_up: int = 1
    exchange: str = "delta"

    @property
    def given(self) -> bool:
        """Whether the user has said who is in which group."""
        return any(sign.isdigit() for sign in self.grouping)


class Grouper:
    """One server's part in it.

    Args:
        options: the strategy.
        node: the server.
        group: its own.
    """

    def __init__(self, options: ParameterServer, node: Node, group: int) -> None:
        self._rules, self._node = options.group_rules, node
        self._tells_speeds = options.compress == "gdtopk"
        self._placement = options.placement(node.workers, node.servers)
        self._looks = self._placement.groups > 1 and self._placement.place(node.rank)[1] == 0
        self._last: dict[int, deque[float]] = {}  # seconds of the last iterations, of workers of this group
        self._times: dict[int, float] = {}  # of all, as the first server has heard
        self._fresh: set[int] = set()
        self._grouping: Grouping | None = None
        self._suspects: tuple[tuple[int, str], ...] = ()
        self._groups: list[int] = []
        if self._looks and self._rules.given:
            self._grouping = given(self._rules.grouping, range(node.workers))
            self._groups = [self._grouping.group_of(worker) for worker in range(node.workers)]
            if node.rank == node.workers:
                node.tell(self._grouping.reason)

    def group_of(self, worker: int) -> int | None:
        """Where the worker belongs; None while nobody knows."""
        return self._groups[worker] if self._groups else None

    def see(self, push: Received) -> None:
        """A push that tells what an iteration took."""
        if not self._looks or not push.seconds:
            return
        wanted = self._rules.warm_up
        last = self._last.setdefault(push.worker, deque(maxlen=wanted))
        last.append(push.seconds)
        if len(last) == wanted:
            self._node.send(self._node.workers, f"time {push.worker} {median(last)!r}")
            last.clear()

    def hear(self, message: Message) -> None:
        """A worker's time, to the first server; or its decision, to all."""
        what, *words = message.kind.split()
        if what == "groups":
            self._groups = [int(group) for group in words[0].split(",")]
            return
        worker = int(words[0])
        self._times[worker] = float(words[1])
        self._fresh.add(worker)
        if len(self._fresh) == self._node.workers:
            self._fresh.clear()
            self._look()

    def _look(self) -> None:
        """Every worker has been heard of since the last look."""
        rules, before = self._rules, self._grouping
        if before is None:
            groups = self._placement.groups
            make = equal if rules.grouping == "equal" else natural
            self._grouping = make(self._times, min(groups, self._node.workers))
        elif rules.regroup and not rules.given:
            look = regroup(before, self._times, self._suspects)
            self._grouping, self._suspects = look.grouping, look.suspects
        assert self._grouping is not None
        if self._grouping is not before:
            self._node.tell(self._grouping.reason)
            groups_of = ",".join(str(self._grouping.group_of(worker)) for worker in range(self._node.workers))
            for group in range(self._placement.groups):
                self._node.send(self._placement.servers_of(group)[0], f"groups {groups_of}")
        if self._tells_speeds:
            self._tell_speeds(self._grouping)

    def _tell_speeds(self, grouping: Grouping) -> None:
        """The mean seconds of an iteration of each group, to all workers; who has no worker is as slow as nobody."""
        times = self._times
        means = [sum(times[worker] for worker in group) / len(group) if group else 0.0 for group in grouping.groups]
        for worker in range(self._node.workers):
            self._node.send(worker, f"speeds {','.join(map(repr, means))}")
