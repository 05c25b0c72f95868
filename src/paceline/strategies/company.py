"""Who takes part where ranks step alone: those who were at the last meeting of all.

A rank that is lost is heard of in a message, after all that it had sent. Until the next meeting its neighbours do
without it, as without one that has no data left. Whoever hears of it ends its round and goes to a meeting; everybody
hears of it. At the meeting all take the mean of the models of those who are left, and know the same who that is: from
then on the graph is one over them. A newcomer calls all together, too. It is let in at the meeting, with the mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from paceline.node import FOUND, LOST, Message, Node
from paceline.strategies.centre import end_round
from paceline.strategies.movers import Mover


class Company(ABC):
    """A rank's part in a company, and the messages to it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.here = node.here
        """Who was at the last meeting or was let in there, the same on all ranks."""
        self.lost: set[int] = set()
        self._inbox = node.receive()

    @property
    def is_called(self) -> bool:
        """Whether all are to meet: because somebody needs all, or one of them is lost."""
        return self.node.called_together or not self.lost.isdisjoint(self.here)

    async def hear_what_came(self) -> None:
        while self._inbox.done:
            await self.hear_next()

    async def hear_next(self) -> None:
        message: Message = await self._inbox
        self._inbox = self.node.receive()
        if message.kind == LOST:
            self.lost.add(message.sender)
        elif message.kind != FOUND:
            self.hear(message)

    @abstractmethod
    def hear(self, message: Message) -> None:
        """A message of another rank."""

    async def until_gone(self, neighbours: Collection[int], gone: Collection[int]) -> None:
        """Listen until all of them have gone, or are lost."""
        while any(rank not in gone and rank not in self.lost for rank in neighbours):
            await self.hear_next()

    async def meet(self, moves: Mover) -> None:
        """All take the mean of all models."""
        self.node.adopt(await self.node.mean_model())
        moves.meet()
        end_round(self.node)  # newcomers are let in now
        self.here = self.node.here
        self.lost.difference_update(self.here)
