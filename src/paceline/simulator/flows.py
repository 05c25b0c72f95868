"""Messages between hosts: connections that share the links of their hosts.

A pair of ranks has one connection, which carries their messages one after the other. All connections that have
something to carry share a host's link equally, as those of TCP do: of two models that leave a host at the same instant
none is there before the other. (In a queue the first would be there after half the time, and its receiver ahead.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from paceline.simulator.clock import Clock
from paceline.simulator.network import Network

INSTANT = 1e-9  # seconds: what is left by rounding
FASTEST = 1e18  # bytes a second: for links without a limit
Link = dict["Connection", None]  # in order, so that a run depends on nothing but its seed


class Connection:
    """From one rank to another.

    Args:
        up, down: the hosts' links, each with all connections that use it now.
        ways: latency, and the bandwidths of both.
    """

    __slots__ = ("due", "left", "links", "queue", "rate", "since", "ways")

    def __init__(self, up: Link, down: Link, ways: tuple[float, float, float]) -> None:
        self.links, self.ways = (up, down), ways
        self.queue: deque[tuple[float, Callable[[Any], object], Any]] = deque()
        self.left = self.rate = self.since = 0.0
        self.due = -1.0

    def now_at(self, now: float) -> None:
        self.left -= self.rate * (now - self.since)
        self.since = now


class Flows:
    """All of them.

    Args:
        network: with links of hosts.
        clock: that says when a message is there.
    """

    def __init__(self, network: Network, clock: Clock) -> None:
        self._network, self._clock = network, clock
        self._connections: dict[tuple[int, int], Connection] = {}
        self._up: list[Link] = [{} for _ in network.uplinks]
        self._down: list[Link] = [{} for _ in network.uplinks]

    def send(self, sender: int, receiver: int, nbytes: int, callback: Callable[[Any], object], argument: Any) -> None:
        """Call back when a message that leaves now has arrived."""
        connection = self._connections.get((sender, receiver))
        if connection is None:
            connection = self._connections[sender, receiver] = self._connect(sender, receiver)
        if not nbytes and not connection.queue:  # it takes nothing from the others
            self._clock.at(self._clock.now + connection.ways[0], callback, argument)
            return
        connection.queue.append((float(nbytes), callback, argument))
        if len(connection.queue) == 1:
            self._begin(connection)

    def _connect(self, sender: int, receiver: int) -> Connection:
        up, down = self._network.host_of(sender), self._network.host_of(receiver)
        widths = [self._network.uplinks[host].bandwidth for host in (up, down)]
        to_up, to_down = (min(FASTEST, self._network.bandwidth, width) for width in widths)
        return Connection(self._up[up], self._down[down], (self._network.way(sender, receiver)[0], to_up, to_down))

    def _begin(self, connection: Connection) -> None:
        connection.left, connection.since, connection.rate = connection.queue[0][0], self._clock.now, 0.0
        for link in connection.links:
            link[connection] = None
        self._share_out(connection)

    def _share_out(self, changed: Connection) -> None:
        """Everybody who shares a link with it gets another rate. Who gets less looks when it would have been done."""
        now = self._clock.now
        for connection in changed.links[0] | changed.links[1]:
            _, up, down = connection.ways
            connection.now_at(now)
            connection.rate = min(up / len(connection.links[0]), down / len(connection.links[1]))
            end = now + max(0.0, connection.left) / connection.rate
            if connection.due < now or end < connection.due:
                self._look_at(connection, end)

    def _look_at(self, connection: Connection, time: float) -> None:
        connection.due = time
        self._clock.at(time, self._look, (connection, time))

    def _look(self, planned: tuple[Connection, float]) -> None:
        connection, time = planned
        if connection.due != time or not connection.queue:
            return
        connection.now_at(time)
        connection.due = -1.0
        if connection.left > INSTANT * connection.rate:
            self._look_at(connection, time + connection.left / connection.rate)
            return
        _, callback, argument = connection.queue.popleft()
        self._clock.at(time + connection.ways[0], callback, argument)
        for link in connection.links:
            del link[connection]
        if connection.queue:
            self._begin(connection)
        else:
            self._share_out(connection)
