"""A switch in user space between tunnels of network namespaces: rates, delays and losses where the kernel has no netem.

A packet is sent out bit by bit at its sender's link, travels, and is received bit by bit at the receiver's: each
direction of a link is busy with one packet at a time, in order. More than two seconds of queue are dropped, as a
router's full buffer would.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import random
import select
import sys
import time

LONGEST_QUEUE = 2.0  # seconds
PACKETS_A_TURN = 64  # of one tunnel, before those that are due are looked after
LARGEST = 65536
DESTINATION = 19  # the byte of an IPv4 header that is the last of the receiver's address
VERSION_4 = 4


class Switch:
    """Which direction of which link is busy until when, and which packets are on their way.

    Args:
        links: (rate, delay, loss) of each host.
    """

    def __init__(self, links: list[tuple[float, float, float]]) -> None:
        self._links, self._chance = links, random.Random(0)
        self._busy = {(host, way): 0.0 for host in range(len(links)) for way in ("up", "down")}
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._number = 0

    def take(self, sender: int, packet: bytes, now: float) -> None:
        """A host sends a packet. What is for nobody here, or finds the queues full, is dropped."""
        if packet[0] >> 4 != VERSION_4 or not 0 < packet[DESTINATION] <= len(self._links):
            return
        receiver = packet[DESTINATION] - 1
        at = now
        for host, way in ((sender, "up"), (receiver, "down")):
            rate, delay, loss = self._links[host]
            at = max(at, self._busy[host, way]) + 8 * len(packet) / rate
            if at - now > LONGEST_QUEUE:
                return
            self._busy[host, way] = at
            if loss and self._chance.random() < loss:
                return
            at += delay
        self._number += 1  # of two for the same moment, the first goes first
        heapq.heappush(self._on_the_way, (at, self._number, receiver, packet))

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Packets that have arrived, each with its receiver."""
        arrived = []
        while self._on_the_way and self._on_the_way[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self._on_the_way)
            arrived.append((receiver, packet))
        return arrived

    @property
    def next_at(self) -> float | None:
        return self._on_the_way[0][0] if self._on_the_way else None


def main() -> None:
    settings = json.loads(sys.argv[1])
    tunnels: list[int] = settings["tunnels"]
    switch = Switch([(link["rate"], link["delay"], link["loss"]) for link in settings["links"]])
    hosts = {tunnel: host for host, tunnel in enumerate(tunnels)}
    while True:
        for receiver, packet in switch.due(time.monotonic()):
            with contextlib.suppress(OSError):  # its interface is down
                os.write(tunnels[receiver], packet)
        until = switch.next_at
        # select, because its time-outs are finer than a millisecond
        for tunnel in select.select(tunnels, [], [], None if until is None else max(0.0, until - time.monotonic()))[0]:
            with contextlib.suppress(OSError):  # all are read, or its interface is down
                for _ in range(PACKETS_A_TURN):
                    switch.take(hosts[tunnel], os.read(tunnel, LARGEST), time.monotonic())


if __name__ == "__main__":
    main()
