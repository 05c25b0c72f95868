"""Messages and signals in virtual time: what reaches a rank without a collective of all."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from paceline.backends.simulated_node import SimulatedNode
from paceline.backends.theatre import Post
from paceline.control.signals import RoundSignals
from paceline.node import Message
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import FaultPlan
from paceline.simulator.flows import Flows
from paceline.simulator.network import Traffic

if TYPE_CHECKING:
    from paceline.backends.virtual_run import VirtualRun


class VirtualPost(Post):
    """Carries what the nodes of a run send.

    Args:
        run: whose clock it goes by, and whose ranks it wakes.
        cluster: whose network it is.
        faults: what may hold a message up.
        traffic: which link is busy.
    """

    def __init__(self, run: VirtualRun, cluster: Cluster, faults: FaultPlan, traffic: Traffic) -> None:
        self._run, self._network, self._faults, self._traffic = run, cluster.network, faults, traffic
        self._flows = Flows(cluster.network, run.clock)
        self._signals = RoundSignals()

    def start_message(self, to: int, message: Message) -> None:
        nbytes = sum(tensor.nbytes for tensor in message.tensors)
        self._run.trace.ranks[message.sender].nbytes += nbytes
        self._run.nodes[message.sender].sent += nbytes
        self._depart((self._run.nodes[to], message, nbytes))  # to this one, not to whoever takes its place meanwhile

    def _depart(self, parcel: tuple[SimulatedNode, Message, int]) -> None:
        receiver, message, nbytes = parcel
        to, now = receiver.rank, self._run.clock.now
        opens = self._faults.open((message.sender, to), now)
        if now < opens < inf:
            self._run.clock.at(opens, self._depart, parcel)
        elif opens == now and self._network.between_hosts(message.sender, to):
            self._flows.send(message.sender, to, nbytes, self._deliver, (receiver, message))
        elif opens == now:
            arrival = self._traffic.arrival(message.sender, to, nbytes, now)
            self._run.clock.at(arrival, self._deliver, (receiver, message))

    def _deliver(self, parcel: tuple[SimulatedNode, Message]) -> None:
        node, message = parcel
        waiters = node.take_in(message)
        if node.idle:
            waiters = [*waiters, (node, node.ticket)]
        for waiter in waiters:
            self._run.wake(waiter)

    def start_signal(self, node: SimulatedNode, round_number: int) -> None:
        """The first signal of a round reaches everybody; later ones would tell them nothing new."""
        node.signals.add(round_number)
        if self._signals.add(round_number):
            self._spread(round_number, node, [other for other in self._run.nodes if other is not node])

    def start_count(self, node: SimulatedNode, round_number: int, samples: int, target: int) -> None:
        """The control plane counts without delay; that it has enough reaches everybody as a signal does."""
        if self._signals.add(round_number, samples, target):
            self._spread(round_number, node, self._run.nodes)

    def _spread(self, round_number: int, origin: SimulatedNode, hearers: Sequence[SimulatedNode]) -> None:
        arrivals = dict[float, list[SimulatedNode]]()
        for other in hearers:
            opens = self._faults.open((origin.rank, other.rank), self._run.clock.now)
            if opens < inf:
                at = opens + self._network.signal_seconds(origin.rank, other.rank)
                arrivals.setdefault(at, []).append(other)
        for time, reached in arrivals.items():
            self._run.clock.at(time, self._hear, (round_number, reached))

    def _hear(self, news: tuple[int, list[SimulatedNode]]) -> None:
        round_number, reached = news
        for node in reached:
            node.signals.add(round_number)
            if node.until == round_number and node.computing is not None and not node.ended:
                self._run.give_up(node)
            elif node.idle:
                self._run.wake((node, node.ticket))
