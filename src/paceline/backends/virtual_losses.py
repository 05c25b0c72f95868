"""Ranks that are lost in virtual time, for strategies that go on without them: who hears of it, and who gets their
samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.parting import ROUNDS_TO_LOOK, may_go
from paceline.backends.simulated_node import SimulatedNode
from paceline.backends.sources import Source
from paceline.backends.virtual_rounds import Collective
from paceline.control.membership import ON_NOTICE
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
        self.leaving: dict[int, int] = {}
        """Ranks that were told to leave, and the first round that each starts after that."""
        self.joining: set[int] = set()
        """Newcomers that wait for the place of a rank that is gone."""
        self._any = False

    def __bool__(self) -> bool:
        return bool(self._unheard)

    def __contains__(self, rank: int) -> bool:
        return rank in self._unheard

    @property
    def samples_left(self) -> bool:
        """Whether lost ranks may have left samples that nobody has used."""
        return self._any and self._source.has_more

    def expect(self, node: SimulatedNode) -> None:
        """A further rank: until it joins it is as one that is gone."""
        node.ended = True
        self._unheard[node.rank] = set()

    def wait_to_join(self, rank: int) -> None:
        """A newcomer comes for the place of a rank; if that is not gone, or nobody is here, it goes again."""
        name = self._strategy.name
        if not self._strategy.admits:
            raise PacelineError(f"The strategy {name} cannot take a newcomer into a running training yet.")
        if self._run.nodes[rank].serves:
            raise PacelineError(f"Rank {rank} is a server, and a server that was lost cannot be replaced.")
        if rank in self._unheard and not all(node.ended for node in self._run.nodes):
            self.joining.add(rank)

    def admit(self, node: SimulatedNode, heard_with: Collective) -> None:
        """The first rank that has applied a round with which all hear of newcomers lets them in. None of those who have
        applied it has begun the next one without them: for that it takes all."""
        first = heard_with.newcomers is None
        if heard_with.newcomers is None:
            heard_with.newcomers = tuple(rank for rank in sorted(self.joining) if not self._source.in_doubt(rank))
        node.here = tuple(sorted({*node.here, *heard_with.newcomers}))
        for rank in heard_with.newcomers if first else ():
            self.joining.discard(rank)
            if self._unheard.pop(rank):  # servers that have met, to whom the news is still on its way
                self._source.release(rank)
            if heard_with.early:  # others get it later, and if need be from the newcomer
                heard_with.early.add(rank)
            self._run.seat(rank, node)
            for gone in sorted(self._unheard.keys() & {*node.here}):  # they have met too, and were lost since
                self._tell(gone, rank)

    def tell_to_leave(self, node: SimulatedNode) -> None:
        """From now on it takes no more samples."""
        if not node.ended:
            others = [each.rank for each in self._run.nodes if each is not node]
            if node.serves or (others and self._strategy.lacks(others, node.workers, node.servers)):
                raise PacelineError(f"Rank {node.rank} cannot leave: the strategy {self._strategy.name} needs it.")
            self.leaving[node.rank] = node.rounds
            node.open_until = node.rounds + ROUNDS_TO_LOOK

    def look(self) -> None:
        """Whether somebody who was told to leave can go now."""
        for rank in self.leaving:
            node = self._run.nodes[rank]
            if not node.ended and self._may_go(node):
                self._run.clock.at(self._run.now, self._let_go, node)

    def _may_go(self, node: SimulatedNode) -> bool:
        first = self.leaving.get(node.rank, node.rounds)
        return may_go(first, node.last_round, node.bids_farewell, self._source.held(node.rank))

    def _let_go(self, node: SimulatedNode) -> None:
        if not node.ended and self._may_go(node):
            self._run.remove(node, ON_NOTICE)

    def add(self, lost: SimulatedNode, why: str) -> None:
        """A rank is lost. The others hear of it, after all that it had sent them."""
        alive = [node for node in self._run.nodes if not node.ended and node is not lost]
        self._unheard[lost.rank] = {node.rank for node in alive if node.serves}
        self._any = True
        lacks = self._strategy.lacks([node.rank for node in alive], lost.workers, lost.servers)
        if lacks:
            raise PacelineError(
                f"The run cannot go on without rank {lost.rank}: the strategy {self._strategy.name} needs {lacks}."
            )
        self._run.trace.lost(lost.rank, self._run.now, why)
        self.leaving.pop(lost.rank, None)
        for node in alive:
            self._tell(lost.rank, node.rank)

    def _tell(self, lost: int, rank: int) -> None:
        self._run.nodes[rank].post.start_message(rank, Message(lost, LOST, ()))

    def heard(self, node: SimulatedNode, rank: int) -> bool:
        """What the rank had may go to others when no server can come upon a gradient of it any more. Whether it is
        still gone."""
        unheard = self._unheard.get(rank, set())
        if node.rank in unheard:
            unheard.discard(node.rank)
            if not unheard:
                self._source.release(rank)
        return rank in self._unheard
