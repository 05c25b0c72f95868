"""Ranks that are lost in virtual time, for strategies that go on without them: who hears of it, and who gets their
samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.learners import Source
from paceline.backends.simulated_node import SimulatedNode
from paceline.errors import PacelineError
from paceline.node import LOST, Message
from paceline.strategies.strategy import Strategy

if TYPE_CHECKING:
    from paceline.backends.virtual_run import VirtualRun


class Losses:
    """The lost ranks of a run.

    Args:
        run: whose.
        strategy: that it plays.
        source: of the samples.
    """

    def __init__(self, run: VirtualRun, strategy: Strategy, source: Source) -> None:
        self._run, self._strategy, self._source = run, strategy, source
        self._unheard: dict[int, set[int]] = {}  # lost ranks, and the servers that have not come to the news yet

    def __bool__(self) -> bool:
        return bool(self._unheard)

    def __contains__(self, rank: int) -> bool:
        return rank in self._unheard

    @property
    def samples_left(self) -> bool:
        """Whether lost ranks may have left samples that nobody has used."""
        return bool(self._unheard) and self._source.has_more

    def add(self, lost: SimulatedNode) -> None:
        """A rank is lost. The others hear of it, after all that it had sent them."""
        alive = [node for node in self._run.nodes if not node.ended and node is not lost]
        self._unheard[lost.rank] = {node.rank for node in alive if node.serves}
        lacks = self._strategy.lacks([node.rank for node in alive], lost.workers, lost.servers)
        if lacks:
            raise PacelineError(
                f"The run cannot go on without rank {lost.rank}: the strategy {self._strategy.name} needs {lacks}."
            )
        self._run.trace.lost(lost.rank, self._run.now, "crash")
        for node in alive:
            lost.post.start_message(node.rank, Message(lost.rank, LOST, ()))

    def heard(self, node: SimulatedNode, rank: int) -> None:
        """What the rank had may go to others when no server can come upon a gradient of it any more."""
        unheard = self._unheard[rank]
        if node.rank in unheard:
            unheard.discard(node.rank)
            if not unheard:
                self._source.release(rank)
