"""Runs a strategy's coroutine on a real process, between the user's micro-batches.

The user's loop computes gradients; the coroutine asks for them. `give` sends one in and runs the coroutine until it
asks for the next. Where the coroutine awaits something in flight, the process waits: that is the time lost to others.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from paceline.node import NEXT_GRADIENT, Gradient, Node, Work
from paceline.strategies.strategy import Strategy

T = TypeVar("T")
LOOK_AROUND_SECONDS = 0.05  # how soon a rank that waits notices that another is lost
NAMING_SECONDS = 3.0  # a broken socket is seen at once; who broke it is known a little later


class WaitableWork(Work[T]):
    """Work that a process can wait for."""

    @abstractmethod
    def wait(self, seconds: float | None = None) -> bool:
        """Block until it is done, or for so long; whether it is done. Raises if it can never be."""


class DrivenNode(Node):
    """A node that a `Driver` runs."""

    @abstractmethod
    def nothing(self) -> Gradient:
        """The gradient of a rank without data."""

    @abstractmethod
    def suspended(self) -> None:
        """Called whenever the coroutine needs time or is through: what it did in between is complete."""

    @abstractmethod
    def spent(self, seconds: float) -> None:
        """Called when the coroutine asks for the next gradient: what it has done with the last took so long, without
        what it waited."""

    @abstractmethod
    def waited(self, work: Work[object], began: float) -> None:
        """Called after the coroutine stood still for the work since `began`."""

    @abstractmethod
    def await_any(self, seconds: float) -> None:
        """Block until something in flight here arrives, or for so long."""

    @abstractmethod
    def look_around(self, waits: bool = False) -> None:
        """Raise if what is waited for can never come. `waits`: whether the rank can do nothing else meanwhile."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began."""


class Driver:
    """One rank's coroutine and whether it is through."""

    def __init__(self, strategy: Strategy, node: DrivenNode) -> None:
        self._node = node
        self._coroutine = strategy.course(node)
        self.finished = False

    def start(self) -> None:
        """Run to the first request for a gradient."""
        self._advance(None)

    def give(self, gradient: Gradient) -> None:
        """Answer the request with a gradient and run to the next request or to the end."""
        self._node.look_around()  # who computes while its collectives travel may never wait for anybody
        self._advance(gradient)

    def give_nothing(self, seconds: float) -> None:
        """Answer with an empty gradient, after something in flight has arrived or the time is over: a rank without
        data takes part in the rounds of the others and does not spin."""
        self._node.await_any(seconds)
        self._advance(self._node.nothing())

    def stop(self) -> None:
        """Leave the coroutine where it is, for good."""
        self._coroutine.close()
        self.finished = True

    def _advance(self, answer: Gradient | None) -> None:
        entered, waited = self._node.now(), 0.0
        while True:
            try:
                asked = self._coroutine.send(answer)
            except StopIteration:
                self.finished = True
                self._node.suspended()
                return
            self._node.suspended()
            if asked is NEXT_GRADIENT:
                self._node.spent(self._node.now() - entered - waited)
                return
            assert isinstance(asked, WaitableWork), "a strategy may await only what its node gave it"
            began = self._node.now()
            while not asked.wait(LOOK_AROUND_SECONDS):
                self._node.look_around(waits=True)
            self._node.waited(asked, began)
            waited += self._node.now() - began
            answer = None
