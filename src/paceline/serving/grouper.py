"""Who is in which group: the first server of all gathers what iterations take, groups by it, and looks again.

every server            median seconds of a worker's last P iterations  →  the first server
the first server        when it has heard of every worker: groups of similar speed  →  all servers
later, with `regroup`   the same again; who is off twice running moves                      see `rules.grouping`
a newcomer              is placed by a guess; by its speed, with or without `regroup`, as soon as that is known
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paceline.node import Message, Node
from paceline.rules.grouping import Grouping, equal, given, natural, nearest, regroup
from paceline.serving.received import Received

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
        window: pushes of a group between two words to the other groups; 0 for as many as it has workers.
    """

    grouping: str = "natural"
    regroup: bool = False
    warm_up: int = 1
    exchange: str = "delta"
    window: int = 0

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
        self._rules, self._node, self._group = options.group_rules, node, group
        self._tells_speeds = options.compress == "gdtopk"
        self._placement = placement = options.placement(node.workers, node.servers)
        self._looks = placement.groups > 1 and placement.place(node.rank)[1] == 0
        self._workers = set(range(node.workers))  # that are not lost
        self._lost: set[int] = set()
        self._guessed: set[int] = set()  # newcomers whose group says nothing of their speed
        self._last: dict[int, deque[float]] = {}  # seconds of the last iterations, of workers of this group
        self._times: dict[int, float] = {}  # of all, as the first server has heard
        self._fresh: set[int] = set()
        self._grouping: Grouping | None = None
        self._suspects: tuple[tuple[int, str], ...] = ()
        self._groups = {worker: placement.first_group(worker) for worker in self._workers}
        self.formed = placement.groups <= 1 or self._rules.given
        """Whether those who are together are of similar speed: not before speeds are known."""
        self._losses: dict[int, Loss] = {}
        self._orphans: set[int] = set()
        if self._looks and self._rules.given:
            self._grouping = given(self._rules.grouping, range(node.workers))
            self._groups = {worker: self._grouping.group_of(worker) for worker in self._workers}
            if self._is_first:
                node.tell(self._grouping.reason)

    @property
    def _whole(self) -> list[int]:
        """Groups that have all their servers."""
        groups = range(self._placement.groups)
        return [group for group in groups if self._lost.isdisjoint(self._placement.servers_of(group))]

    @property
    def _leaders(self) -> list[int]:
        """The first servers of these groups; the first of them decides."""
        return [self._placement.servers_of(group)[0] for group in self._whole]

    @property
    def _is_first(self) -> bool:
        return self._looks and self._node.rank == self._leaders[0]

    def group_of(self, worker: int) -> int:
        """Where the worker belongs; if that is not known here, it was sent here by one who knows."""
        return self._groups.get(worker, self._group)

    def see(self, push: Received) -> None:
        """A push that tells what an iteration took."""
        if not self._looks or not push.seconds:
            return
        wanted = self._rules.warm_up
        last = self._last.setdefault(push.worker, deque(maxlen=wanted))
        last.append(push.seconds)
        if len(last) == wanted:
            self._node.send(self._leaders[0], f"time {push.worker} {median(last)!r}")
            last.clear()

    def hear(self, message: Message) -> None:
        """A worker's time, or what it has pushed where, to the first server; or the first one's decision, to all."""
        what, *words = message.kind.split()
        if what == "groups":
            self.formed = True
            if message.sender != self._node.rank:  # what it has told others it knows
                told = (each.split(":") for each in words[0].split(","))
                self._groups = {int(worker): int(group) for worker, group in told}
        elif what == "orphan":
            self._orphans.add(message.sender)
            self._adopt()
        elif what == "time":
            self._take_time(int(words[0]), float(words[1]))
        else:
            pushed = [int(samples) for samples in words[0].split(",")]
            for group, loss in list(self._losses.items()):
                loss.pushed[message.sender] = pushed[group]
                self._tell_loss(group)

    def _take_time(self, worker: int, seconds: float) -> None:
        if worker in self._workers:  # else it is lost: news of it may come later than of its loss
            self._times[worker] = seconds
            self._fresh.add(worker)
            self._place(worker)
            self._look()

    # ---- groups

    def _look(self) -> None:
        """When every worker has been heard of since the last look."""
        rules, before = self._rules, self._grouping
        if not self._fresh.issuperset(self._workers):
            return
        self._fresh.clear()
        if before is None:
            self._guessed.clear()
            whole = self._whole
            make = equal if rules.grouping == "equal" else natural
            made = make(self._times, min(len(whole), len(self._workers)))
            placed = dict(zip(whole, made.groups, strict=False))
            groups = tuple(placed.get(group, ()) for group in range(self._placement.groups))
            self._grouping = Grouping(groups, made.reason)
        elif rules.regroup and not rules.given:
            look = regroup(before, self._times, self._suspects)
            self._grouping, self._suspects = look.grouping, look.suspects
        assert self._grouping is not None
        if self._grouping is not before:
            self._announce(self._grouping)
        if self._tells_speeds:
            self._tell_speeds(self._grouping)

    def _announce(self, grouping: Grouping) -> None:
        self._node.tell(grouping.reason)
        self._groups |= {worker: grouping.group_of(worker) for worker in sorted(self._workers)}
        self._tell_groups()

    def _tell_groups(self) -> None:
        told = [f"{worker}:{group}" for worker, group in self._groups.items()]
        for group in self._whole:
            for server in self._placement.servers_of(group):
                self._node.send(server, f"groups {','.join(told)}")

    def _tell_speeds(self, grouping: Grouping) -> None:
        """The mean seconds of an iteration of each group, to all workers; who has no worker is as slow as nobody."""
        times = self._times
        means = [sum(times[worker] for worker in group) / len(group) if group else 0.0 for group in grouping.groups]
        for worker in sorted(self._workers):
            self._node.send(worker, f"speeds {','.join(map(repr, means))}")

    def _regrouped(self) -> Grouping | None:
        """The present groups, of those who are here."""
        groups, belong = range(self._placement.groups), self._groups
        members = tuple(tuple(w for w in sorted(self._workers) if belong.get(w) == group) for group in groups)
        return None if self._grouping is None else Grouping(members, self._grouping.reason)

    def _times_in(self, groups: Sequence[int], without: int | None = None) -> list[list[float]]:
        """Of each of the groups, what its workers take."""
        times = [(self._groups.get(worker), t) for worker, t in self._times.items() if worker != without]
        return [[t for place, t in times if place == group] for group in groups]

    # ---- newcomers

    def welcome(self, newcomers: set[int]) -> None:
        """They take part from now on. A successor belongs where the one before it did; of others see `_guess`."""
        self._workers |= newcomers
        self._lost -= newcomers
        for worker in sorted(newcomers) if self._is_first else ():
            if self._groups.get(worker) not in self._whole:
                self._groups[worker] = self._guess()
            self._grouping = self._regrouped()
            if not self._rules.given or worker >= self._node.workers:
                self._guessed.add(worker)

    def _guess(self) -> int:
        """For one whose speed nobody knows: the slowest group, where it is least likely that others wait for it. While
        nobody's speed is known, the smallest."""
        whole = self._whole
        times = self._times_in(whole)
        if any(times):
            return max(zip(times, whole, strict=True), key=lambda each: median(each[0] or [0.0]))[1]
        return min(whole, key=list(self._groups.values()).count)

    def _place(self, worker: int) -> None:
        """The speed of a newcomer is known: it belongs to the group that is nearest."""
        whole, seconds = self._whole, self._times[worker]
        others = self._times_in(whole, without=worker) if worker in self._guessed else []
        if self._grouping is not None and any(others):
            self._guessed.discard(worker)
            self._groups[worker] = group = whole[nearest(others, seconds)]
            self._grouping = self._regrouped()
            self._node.tell(f"Worker {worker} has joined and takes {seconds:.3g} s an iteration: group {group}.")
            self._tell_groups()

    # ---- losses

    def lose(self, rank: int, exchanged: int) -> None:
        """A rank is lost; `exchanged`: samples that have come from there, if it is a server."""
        before = self._whole
        self._lost.add(rank)
        for known in (self._workers, self._orphans, self._guessed, self._fresh):
            known.discard(rank)
        self._times.pop(rank, None)
        self._last.pop(rank, None)
        self._grouping = self._regrouped()
        if self._is_first:
            for group in set(before) - set(self._whole):
                self._losses[group] = Loss(rank, exchanged)
            self._adopt()
            self._look()

    def _adopt(self) -> None:
        """Workers whose server is lost join the group that they belong to, if it is whole; else the one whose speed is
        nearest to theirs; while none is known, one group after the other. Who is not the first server keeps them in
        mind: it may become so by the loss that made them orphans."""
        whole = self._whole
        if not self._is_first or not self._orphans:
            return
        times_of = self._times_in(whole)
        for number, worker in enumerate(sorted(self._orphans)):
            if self._groups.get(worker) not in whole:
                known = worker in self._times and any(times_of)
                place = nearest(times_of, self._times[worker]) if known else number % len(whole)
                self._groups[worker] = whole[place]
            self._node.send(worker, f"adopted {self._groups[worker]}")
        self._orphans.clear()
        self._grouping = self._regrouped()
        self._tell_groups()

    def _tell_loss(self, group: int) -> None:
        """What was pushed to the group and has not reached the others went with its server."""
        loss = self._losses[group]
        if self._is_first and loss.pushed.keys() >= self._workers:
            del self._losses[group]
            samples = max(0, sum(loss.pushed.values()) - loss.exchanged)
            self._node.warn(
                f"With server {loss.server} the steps with {samples} samples are lost that the other groups had not "
                "heard of; its workers have joined other groups."
            )


class Loss:
    """A server that is lost: samples that had come from it, and what each worker had pushed to its group."""

    def __init__(self, server: int, exchanged: int) -> None:
        self.server, self.exchanged = server, exchanged
        self.pushed: dict[int, int] = {}
