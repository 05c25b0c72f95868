"""Collectives in virtual time: they start when all who are there have joined, and end on all at one instant, unless
somebody crashes meanwhile. Then those who are left agree on what counts, by the rule of real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from typing import TYPE_CHECKING, Any

from paceline.backends.agreement import Standing, gifts
from paceline.backends.simulated_node import SimulatedNode
from paceline.backends.standstill import out_of_order
from paceline.backends.virtual_rounds import Collective
from paceline.rules.chance import chance
from paceline.simulator.faults import FaultPlan
from paceline.simulator.network import Traffic

if TYPE_CHECKING:
    from paceline.backends.sources import Source
    from paceline.backends.virtual_run import VirtualRun


ANYBODY, HELD_BY = 0.6, 0.5  # how often somebody holds a result when a rank crashes, and each of them then


class VirtualCollectives:
    """All collectives of a run.

    Args:
        run: whose.
        source: of the samples.
        faults: what may hold a collective up.
        traffic: which link is busy.
        seed: decides who holds the result of a collective in whose middle somebody crashes.
        more: whether lost ranks have left samples behind.
    """

    def __init__(
        self,
        run: VirtualRun,
        source: Source,
        faults: FaultPlan,
        traffic: Traffic,
        seed: int,
        more: Callable[[], bool],
    ) -> None:
        self._run, self._source, self._faults, self._traffic, self._seed = run, source, faults, traffic, seed
        self._more = more
        self._open: dict[int, Collective] = {}  # not all have joined
        self._travelling: dict[int, Collective] = {}

    @property
    def _nodes(self) -> Sequence[SimulatedNode]:
        return self._run.nodes

    def join(
        self, node: SimulatedNode, kind: str, payload: Any, nbytes: int, round_number: int | None, note: float
    ) -> Collective:
        number = node.collectives
        node.collectives += 1
        collective = self._open.get(number)
        if collective is None:
            collective = self._open[number] = Collective(kind, number, round_number, nbytes)
        elif collective.kind != kind:
            raise out_of_order(collective, kind, node.rank, self._run.strategy.name, self._run.place(node))
        collective.payloads[node.rank] = payload
        if note:
            collective.notes[node.rank] = note
        self._launch_if_all_are_there(collective)
        return collective

    def _launch_if_all_are_there(self, collective: Collective) -> None:
        if len(collective.payloads) == len(self._nodes) or (
            self._run.somebody_is_lost and all(n.ended or n.rank in collective.payloads for n in self._nodes)
        ):
            del self._open[collective.number]
            self._launch_among_all(collective)

    def _launch_among_all(self, collective: Collective) -> None:
        self._travelling[collective.number] = collective
        collective.joined = self._run.now
        collective.attempt += 1
        if collective.round is not None:
            collective.nbytes = self._nodes[0].learner.travelling(list(collective.payloads.values()))
        for rank in collective.payloads:
            self._run.trace.ranks[rank].nbytes += collective.nbytes
        self._launch((collective, collective.attempt))

    def _launch(self, trip: tuple[Collective, int]) -> None:
        """All have joined: it runs, unless a partition holds it up."""
        collective, attempt = trip
        now = self._run.now
        opens = self._faults.open(range(len(self._nodes)), now)
        if attempt != collective.attempt:
            return
        if now < opens < inf:
            self._run.clock.at(opens, self._launch, trip)
        elif opens == now:
            end = self._traffic.collective_end(collective.kind, collective.nbytes, now)
            self._run.clock.at(end, self._complete, trip)

    def _complete(self, trip: tuple[Collective, int]) -> None:
        collective, attempt = trip
        if attempt != collective.attempt:  # it was repeated meanwhile
            return
        del self._travelling[collective.number]
        if not collective.early:
            self._add_up(collective)
        collective.done = True
        if collective.applied:
            self._run.round_counts(collective)
        for waiter in collective.waiters:
            self._run.wake(waiter)

    def _add_up(self, collective: Collective) -> None:
        payloads, count = collective.payloads, len(self._nodes)
        ordered = [payloads.get(rank) for rank in range(count)]
        collective.ranks = tuple(rank for rank in range(count) if rank in payloads)
        if collective.round is None:
            nothing = (nan,) * len(next(iter(payloads.values())))
            collective.value = tuple(zip(*(payloads.get(rank, nothing) for rank in range(count)), strict=True))
        else:
            collective.value = self._nodes[0].learner.reduce([each for each in ordered if each is not None])
        collective.all_notes = tuple(collective.notes.get(rank, 0.0) for rank in range(count))
        collective.more = self._more()
        collective.joining = self._run.somebody_joins

    # ---- after a crash

    def agree_without(self, lost: int) -> None:
        """A rank is gone. What somebody who is left holds counts; all else is repeated without the lost rank."""
        here = [node for node in self._nodes if not self._run.is_lost(node.rank)]  # who is through has not left yet
        standings = {node.rank: self._standing(node) for node in here}
        counts = {gift.number for gift in gifts(standings)}
        if standings:  # what all who are left hold needs no gift
            counts |= {number for number in self._travelling if all(s.holds(number) for s in standings.values())}
        for collective in list(self._travelling.values()):
            if collective.number in counts:
                self._count_early(collective)
            elif lost in collective.payloads or collective.early:
                self._withdraw(collective)
                self._launch_among_all(collective)
        for collective in list(self._open.values()):
            self._withdraw(collective)
            self._launch_if_all_are_there(collective)

    def _standing(self, node: SimulatedNode) -> Standing:
        """Some hold the result of what was travelling, some do not; nobody who has not joined."""
        lacks = []
        for number in range(node.collectives):
            collective = self._travelling.get(number)
            if number in self._open or (collective is not None and not self._holds(node, collective)):
                lacks.append(number)
        return Standing(node.collectives, tuple(lacks))

    def _holds(self, node: SimulatedNode, collective: Collective) -> bool:
        if collective.early:
            return node.rank in collective.early
        which = (self._seed, collective.number, collective.attempt)
        if chance("anybody", *which) < ANYBODY and chance("held", *which, node.rank) < HELD_BY:
            collective.holders.add(node.rank)
        return node.rank in collective.holders

    def _count_early(self, collective: Collective) -> None:
        """Those who hold it have it now; the others when it would have ended."""
        if not collective.early:
            self._add_up(collective)
            collective.early = set(collective.holders)
            waiters = [waiter for waiter in collective.waiters if waiter[0].rank in collective.early]
            for waiter in waiters:
                self._run.clock.at(self._run.now, self._run.wake, waiter)

    def _withdraw(self, collective: Collective) -> None:
        """Without the parts of those who are lost, as if they had never joined."""
        collective.early, collective.applied = set(), False
        collective.holders.clear()
        for rank in [rank for rank in collective.payloads if self._nodes[rank].ended]:
            del collective.payloads[rank]
            collective.notes.pop(rank, None)
            if collective.round is not None:
                self._source.withdraw(rank, collective.round)
