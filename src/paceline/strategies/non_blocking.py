"""Non-blocking SGD: finished mini-batches count, and nobody waits for a whole batch (arXiv 2211.00889).

    round k, learner i:   A_i, K_i = 0;   w_k fixed all round
                          run mini-batches until SIGNAL(k);   A_i += g,   K_i += 1
                          who has finished a whole batch, K_i = m, signals to all
                          w_{k+1} = w_k − η · ΣA / ΣK                               no delay, no staleness

[paper]  the batch is split into m mini-batches; the update is made of the finished ones.
[paper]  the first learner that has finished its batch ends the round; the mini-batch under way elsewhere is thrown away
         and run again at the new parameters (the authors' earlier project).
[ours]   weights by sample count; `unfinished=finish` waits for what is under way, and counts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Gradient, Node
from paceline.strategies.checks import at_least, one_of, yes_or_no
from paceline.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class NonBlocking(Strategy):
    """Non-blocking SGD: the first to finish its batch ends the round; what the others have finished counts.

    Args:
        mini_batches: of a batch (m). More of them lose less when a round ends, and make rounds longer.
        unfinished: `abort` a mini-batch when the round ends, and run it again in the next; or `finish` it first.
        carry: a learner keeps its place in its batch over rounds, so that slow ones end a round too, now and then.
    """

    name: ClassVar[str] = "non-blocking"
    mini_batches: int = 8
    unfinished: str = "abort"
    carry: bool = False

    def __post_init__(self) -> None:
        at_least(self, "mini_batches", 1)
        one_of(self, "unfinished", ("abort", "finish"))
        yes_or_no(self, "carry")

    async def worker(self, node: Node) -> None:
        round_number, place = 0, 0
        while not node.finished:
            finished, place = await self.finished_ones(node, round_number, place if self.carry else 0)
            node.apply(await node.all_reduce(finished))
            round_number += 1

    async def finished_ones(self, node: Node, round_number: int, place: int) -> tuple[Gradient, int]:
        """This learner's part of a round, and its place in its batch after it."""
        until = round_number if self.unfinished == "abort" else None
        finished = Gradient(None, 0)
        while not node.signalled(round_number):
            fresh = await node.gradient(until=until)
            if not fresh.count:  # given up, or no more data
                break
            finished += fresh
            place = (place + 1) % self.mini_batches
            if place == 0:
                node.signal(round_number)
        return finished, place
