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
        self._travelling: list[tuple[float, int, int, bytes]] = []  # by when each is at its receiver's link
        self._arriving: list[tuple[float, int, int, bytes]] = []  # by when each is there
        self._shortest = min(delay for _, delay, _ in links)
        self._number = 0

    def take(self, sender: int, packet: bytes, now: float) -> None:
        """A host sends a packet. What is for nobody here, or finds the queues full, is dropped."""
        if packet[0] >> 4 == VERSION_4 and 0 < packet[DESTINATION] <= len(self._links):
            self._pass(now, sender, "up", self._travelling, packet[DESTINATION] - 1, packet)

    def _pass(
        self, now: float, host: int, way: str, to: list[tuple[float, int, int, bytes]], receiver: int, packet: bytes
    ) -> None:
        """Through one direction of a link, in the order of coming there."""
        rate, delay, loss = self._links[host]
        at = max(now, self._busy[host, way]) + 8 * len(packet) / rate
        if at - now > LONGEST_QUEUE:
            return
        self._busy[host, way] = at
        if not loss or self._chance.random() >= loss:
            self._number += 1  # of two for the same moment, the first goes first
            heapq.heappush(to, (at + delay, self._number, receiver, packet))

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Packets that have arrived, each with its receiver."""
        while self._travelling and self._travelling[0][0] <= now:
            at, _, receiver, packet = heapq.heappop(self._travelling)
            self._pass(at, receiver, "down", self._arriving, receiver, packet)
        arrived = []
        while self._arriving and self._arriving[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self._arriving)
            arrived.append((receiver, packet))
        return arrived

    @property
    def next_at(self) -> float | None:
        """Nothing arrives before: of what still travels, no link takes less than the shortest."""
        travelling = [at + self._shortest for at, *_ in self._travelling[:1]]
        return min([*travelling, *(at for at, *_ in self._arriving[:1])], default=None)


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
