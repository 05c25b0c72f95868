"""What the servers of different groups tell each other: asynchronous, in order, and all of it before ranks meet.

    after as many pushes as the group has workers:
    delta      the change of w that these pushes have made; the others add it. At rest all groups are equal    [ours]
    gradient   the mean of what was pushed; the others make a step with it                                     [code]
    global     the same, to a global server: it makes the step, and its w becomes the group's                  [code]

A window has a number: one that has come before is passed over, a gap is an error, since nothing may be lost silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.node import Message, Node
from paceline.serving.cures import scale_at_server
from paceline.serving.received import Received

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.strategies.parameter_server import ParameterServer

EXCHANGES = ("delta", "gradient", "global")


class Exchange(ABC):
    """One server's exchange with the servers of the same part in the other groups.

    Args:
        options: the strategy.
        node: the server.
        peers: their ranks.
        first: where its part of the parameters begins.
        parameters: its part.
    """

    def __init__(
        self, options: ParameterServer, node: Node, peers: Sequence[int], first: int, parameters: Tensor
    ) -> None:
        self._options = options
        self._node, self._peers, self._first, self._parameters = node, list(peers), first, parameters
        self._pushes = self._samples = self._windows = 0
        self._heard = dict.fromkeys(self._peers, 0)  # windows of each
        self._samples_heard = dict.fromkeys(self._peers, 0)  # since the last meeting
        self._closed: set[int] = set()
        self._closing = False

    # ---- own pushes

    def stepped(self, mean: Tensor, scale: float, pushes: Sequence[Received], window: int) -> None:
        """A step was made with these pushes; a window closes when there are so many."""
        if not self._peers:
            return
        self._collect(mean, scale)
        self._pushes += len(pushes)
        self._samples += sum(push.samples for push in pushes)
        if self._pushes >= window:
            self._send_window()

    def close(self) -> None:
        """No push comes before the next meeting: send what there is, and say so."""
        if self._pushes:
            self._send_window()
        for peer in self._peers:
            self._node.send(peer, "closed")
        self._closing = True

    @property
    def closed(self) -> bool:
        """Whether nothing comes any more, in both directions."""
        return self._closing and self._closed.issuperset(self._peers)

    def met(self) -> None:
        """All groups hold the same parameters."""
        self._closed.clear()
        self._closing = False
        self._samples_heard = dict.fromkeys(self._peers, 0)

    def samples_of(self, peer: int) -> int:
        """Samples of another server that have come here since the last meeting."""
        return self._samples_heard.get(peer, 0)

    def lose(self, peer: int) -> None:
        """Nothing comes from there any more."""
        if peer in self._peers:
            self._peers.remove(peer)

    def _send_window(self) -> None:
        self._windows += 1
        tensor, weight = self._window()
        kind = f"window {self._windows} {self._pushes} {self._samples} {weight!r}"
        for peer in self._receivers():
            self._node.send(peer, kind, tensor)
        self._pushes = self._samples = 0
        self._sent()

    def _receivers(self) -> Sequence[int]:
        return self._peers

    # ---- what comes from others

    def hear(self, message: Message) -> int:
        """Something of another server's: the pushes that it is the result of."""
        what, *words = message.kind.split()
        if what == "closed":
            self._closed.add(message.sender)
            return 0
        number, pushes, samples, weight = int(words[0]), int(words[1]), int(words[2]), float(words[3])
        last = self._heard[message.sender]
        if number <= last:
            return 0
        if number > last + 1:
            raise PacelineError(
                f"Window {number} of server {message.sender} has come after window {last}: {number - last - 1} are "
                "lost.",
                where=f"server {self._node.rank}",
                cause="Messages on one link keep their order; probably a connection was replaced.",
                remedy="Start again from the last checkpoint (run.resume()).",
            )
        self._heard[message.sender] = number
        self._samples_heard[message.sender] += samples
        self._take(message, weight)
        self._node.learned(self._node.samples_applied + samples)
        return pushes

    # ---- what the kinds differ in

    @abstractmethod
    def _collect(self, mean: Tensor, scale: float) -> None:
        """A step was made here."""

    @abstractmethod
    def _window(self) -> tuple[Tensor, float]:
        """What to send, and what weight it has."""

    @abstractmethod
    def _sent(self) -> None:
        """The window is on its way; the next one begins."""

    @abstractmethod
    def _take(self, message: Message, weight: float) -> None:
        """What another server has sent."""


class Delta(Exchange):
    """Changes of the parameters. `base` is what they would be without the pushes of the open window."""

    def __init__(
        self, options: ParameterServer, node: Node, peers: Sequence[int], first: int, parameters: Tensor
    ) -> None:
        super().__init__(options, node, peers, first, parameters)
        self._base = parameters.clone() if self._peers else parameters

    def _collect(self, mean: Tensor, scale: float) -> None:
        pass

    def _window(self) -> tuple[Tensor, float]:
        return self._base.neg_().add_(self._parameters), 1.0

    def _sent(self) -> None:
        self._base.copy_(self._parameters)

    def _take(self, message: Message, weight: float) -> None:
        self._parameters.add_(message.tensors[0])
        self._base.add_(message.tensors[0])

    def met(self) -> None:
        super().met()
        if self._peers:
            self._sent()


class Means(Exchange):
    """Mean gradients of a window."""

    def __init__(
        self, options: ParameterServer, node: Node, peers: Sequence[int], first: int, parameters: Tensor
    ) -> None:
        super().__init__(options, node, peers, first, parameters)
        self._sum = parameters.clone().zero_()
        self._weight = 0.0

    def _collect(self, mean: Tensor, scale: float) -> None:
        self._sum.add_(mean, alpha=scale)
        self._weight += scale

    def _window(self) -> tuple[Tensor, float]:
        return self._sum.div_(self._weight), self._weight

    def _sent(self) -> None:
        self._sum.zero_()
        self._weight = 0.0

    def _take(self, message: Message, weight: float) -> None:
        self._node.step(message.tensors[0], scale_at_server(self._options, self._node, weight), self._first)


class ToGlobal(Means):
    """Mean gradients to the global server, whose parameters come back."""

    def _receivers(self) -> Sequence[int]:
        return self._peers[-1:]

    def hear(self, message: Message) -> int:
        if message.kind.startswith("overwrite"):
            self._parameters.copy_(message.tensors[0])
            self._node.learned(int(message.kind.split()[1]))
            return 0
        return super().hear(message)


class Global(Means):
    """The global server: it has no workers."""

    def close(self) -> None:
        """It says so to each group when it has answered the last window of that group: see `hear`."""
        self._closing = True

    def hear(self, message: Message) -> int:
        pushes = super().hear(message)
        if pushes:
            self._node.send(message.sender, f"overwrite {self._node.samples_applied}", self._parameters)
        elif message.kind == "closed":
            self._node.send(message.sender, "closed")
        return pushes


def exchange(options: ParameterServer, node: Node, first: int, parameters: Tensor) -> Exchange:
    """Of the kind that the strategy's options name."""
    placement = options.placement(node.workers, node.servers)
    peers = placement.peers(node.rank)
    kind: type[Exchange] = Delta
    told = options.group_rules.exchange
    if told == "gradient":
        kind = Means
    elif told == "global":
        kind = Global if placement.place(node.rank)[0] == placement.groups else ToGlobal
    return kind(options, node, peers, first, parameters)
