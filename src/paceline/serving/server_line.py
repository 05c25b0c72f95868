"""A worker's line to the servers of its group: it asks for parameters, pushes gradients, and moves when it is told to.

What they say to each other, a number of the request first where there is one:

    worker → server    join n · pull n · push k samples handed-in seconds · rest · gone · leaves pushed · pushed
    server → worker    parameters n samples held · move n group · bye · refused k why · speeds of-each-group
    its server is lost worker → all servers: orphan · the first of them → worker: adopted group
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from paceline.node import Gradient, Message, Node
from paceline.rules.placement import cut
from paceline.serving.cures import Cure
from paceline.serving.uploads import Upload

if TYPE_CHECKING:
    from paceline.strategies.parameter_server import ParameterServer

WORTH_OVERLAPPING = 0.1  # of the computing: what communication must take before parameters are asked for ahead
MEASURE_EVERY = 50  # iterations: then one goes without, because only so its communication can be measured
IN_DOUBT = 64  # pushes of which a refusal may still come: a server answers long before so many more have followed


class ServerLine:
    """One worker's line.

    Args:
        options: the strategy.
        node: the worker.
    """

    def __init__(self, options: ParameterServer, node: Node) -> None:
        self._node = node
        self._placement = options.placement(node.workers, node.servers)
        self._parts = cut(node.sizes, self._placement.parts)
        self._upload, self._cure = Upload(options, node), Cure(options, node)
        self._group = self._placement.first_group(node.rank)
        self._request = self._pushes = 0
        self._missing: set[int] = set()  # servers that have not answered the request
        self._lost = set(self._placement.ranks) - set(node.here)  # a newcomer has not heard of them
        self._move_to: int | None = None
        self._orphaned = self._parting = False  # it moves because its servers are lost; it says goodbye to them
        self._samples = [0] * self._placement.groups  # pushed to each group since the last meeting
        self._pushed: deque[tuple[int, list[range]]] = deque(maxlen=IN_DOUBT)
        self._began = self._computed = self._held = self._seconds = 0.0
        self._overlap, self._worth = options.overlap, False
        self._asked = False

    @property
    def _servers(self) -> list[int]:
        return self._placement.servers_of(self._group)

    async def join(self) -> None:
        """After a meeting, or at the beginning: enter the group, and get its parameters."""
        self._samples = [0] * self._placement.groups
        await self._enter()

    async def _enter(self) -> None:
        """The group, or the one that it says is the right one."""
        if self._orphaned and self._move_to is not None:  # its servers were lost while all met
            self._group, self._move_to, self._orphaned = self._move_to, None, False
        self._cure.entered()
        self._send_all("join")
        await self._answers()
        self._began, self._held, self._seconds = self._node.now(), 0.0, 0.0
        if self._move_to is not None:
            await self._move(self._move_to)

    def ask_ahead(self) -> None:
        """Ask for the next parameters, if it is worth it."""
        measures = self._overlap == "auto" and self._pushes % MEASURE_EVERY == 0
        self._asked = self._overlap == "always" or (self._worth and not measures)
        if self._asked:
            self._send_all("pull")

    async def parameters(self) -> None:
        """Wait for the next parameters; if the worker was told to move, for those of its new group."""
        if not self._asked:
            self._send_all("pull")
        await self._answers()
        now, computing = self._node.now(), self._computed - self._began
        communicating = max(0.0, now - self._computed - self._held)
        if not self._asked:
            self._worth = self._overlap == "auto" and communicating > WORTH_OVERLAPPING * computing
        # An iteration is to compute, to push and to pull; not the time that the server kept it waiting for others.
        self._seconds = computing + communicating
        self._began, self._held = now, 0.0
        if self._move_to is not None:
            await self._move(self._move_to)

    def push(self, gradient: Gradient) -> None:
        """Send the gradient to the group; it is used up."""
        node, samples = self._node, list(gradient.samples)
        count = gradient.count
        handed_in = node.hand_in(gradient)
        self._computed = node.now()
        if handed_in is None:  # NaN or infinity: it is discarded
            count, (mean, reached) = 0, (None, 0)
        else:
            mean, reached = self._cure.pushed(handed_in[0]), handed_in[1]
        if self._upload.epoch_ended(node.epoch):
            self.push_rest()
            self._upload.begin(node.epoch, self._group)
        self._pushes += 1
        self._samples[self._group] += count
        self._pushed.append((self._pushes, samples))
        kind = f"push {self._pushes} {count} {reached} {self._seconds!r}"
        for server, tensors in zip(self._servers, self._upload.parts(mean, self._parts), strict=True):
            node.send(server, kind, *tensors)

    def push_rest(self) -> None:
        """Send what the compressor has kept back."""
        rest = self._upload.rest()
        if rest is not None:
            for server, (first, last) in zip(self._servers, self._parts, strict=True):
                self._node.send(server, "rest", rest[first:last])

    async def leave(self) -> None:
        """Tell all servers that no push will follow before the next meeting, and hear what the own ones refuse."""
        self.push_rest()
        self._request += 1  # what was asked for ahead is of no use any more
        self._tell_servers("leaves")
        await self._goodbye()

    async def _move(self, group: int) -> None:
        self._move_to = None
        if not self._orphaned:
            self.push_rest()
            for server in self._servers:
                self._node.send(server, "gone")
            await self._goodbye()
        self._group, self._orphaned = group, False
        await self._enter()

    async def _goodbye(self) -> None:
        """Until the servers of the group have all that was pushed to them; a lost one has what it has."""
        self._parting = True
        self._missing = set(self._servers) - self._lost
        await self._answers()
        self._parting = False

    def _tell_servers(self, what: str) -> None:
        """To all of them, with how many samples went to which group."""
        pushed = ",".join(map(str, self._samples))
        for server in self._placement.ranks:
            self._node.send(server, f"{what} {pushed}")

    async def _answers(self) -> None:
        while self._missing:
            self._hear(await self._node.receive())

    def _send_all(self, what: str) -> None:
        if not self._lost.isdisjoint(self._servers):
            self._tell_servers("orphan")
        self._request += 1
        self._missing = set(self._servers)
        for server in self._servers:
            self._node.send(server, f"{what} {self._request}")

    def _hear(self, message: Message) -> None:
        what, *words = message.kind.split(maxsplit=3)
        match what:
            case "parameters" if int(words[0]) == self._request:
                self._cure.arrived(self._parts[self._placement.place(message.sender)[1]], message.tensors[0])
                self._node.learned(int(words[1]))
                self._held = max(self._held, float(words[2]))
                self._missing.discard(message.sender)
            case "move" if int(words[0]) == self._request:
                self._move_to = int(words[1])
                self._missing.discard(message.sender)
            case "bye":
                self._missing.discard(message.sender)
            case "refused":
                self._take_back(int(words[0]), message.kind.split(maxsplit=2)[2])
            case "adopted":
                self._move_to, self._orphaned = int(words[0]), True
                self._missing.clear()
            case "lost":
                self._lost.add(message.sender)
                if self._parting:
                    self._missing.discard(message.sender)
                if message.sender in self._placement.ranks:
                    self._tell_servers("pushed")
                if message.sender in self._servers:
                    self._tell_servers("orphan")
            case "speeds":
                self._upload.speeds = [float(each) for each in words[0].split(",")]

    def _take_back(self, push: int, why: str) -> None:
        for number, samples in self._pushed:
            if number == push:
                self._node.take_back(samples, why)
                self._node.warn(f"A server has refused a push of rank {self._node.rank}: {why}")
