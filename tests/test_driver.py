"""What the driver tells the node about a strategy's own time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.backends.driver import DrivenNode, Driver, WaitableWork
from paceline.node import Gradient, Node
from paceline.strategies.strategy import Strategy


class Clock:
    """Moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0


class Slow(WaitableWork[int]):
    """Arrives when it is waited for, after so long."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds, self._done = clock, seconds, False

    @property
    def done(self) -> bool:
        return self._done

    def wait(self, seconds: float | None = None) -> bool:
        self._clock.now += self._seconds
        self._done = True
        return True

    def result(self) -> int:
        return 7


class Scripted(DrivenNode):
    """Only what the driver asks of a node."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.told = clock, list[float]()
        self.micro_batch = self.at_most = self.world_size = 1
        self.rank = 0

    divisible = True

    def now(self) -> float:
        return self.clock.now

    def spent(self, seconds: float) -> None:
        self.told.append(seconds)

    def suspended(self) -> None:
        pass

    def waited(self, work: Any, began: float) -> None:
        pass


Scripted.__abstractmethods__ = frozenset()  # the rest is not asked for


@dataclass(frozen=True, kw_only=True)
class Busy(Strategy):
    """Works for two seconds before each wait of ten, and for one after it."""

    name: ClassVar[str] = "busy"

    async def worker(self, node: Node) -> None:
        assert isinstance(node, Scripted)
        for _ in range(2):
            await node.gradient()
            node.clock.now += 2.0
            assert await Slow(node.clock, 10.0) == 7
            node.clock.now += 1.0


def test_what_a_strategy_does_counts_without_what_it_waits_for() -> None:
    node = Scripted(Clock())
    driver = Driver(Busy(), node)
    driver.start()
    node.clock.now += 50.0  # the user's micro-batch
    driver.give(Gradient(None, 1))
    assert node.told == [0.0, 3.0]
    driver.give(Gradient(None, 1))
    assert driver.finished and node.told == [0.0, 3.0], "after the last one no micro-batch follows"
