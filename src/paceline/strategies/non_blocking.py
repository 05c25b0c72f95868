"""Non-blocking SGD: finished mini-batches count, and nobody waits for a whole batch (arXiv 2211.00889).

    round k, learner i:   A_i, K_i = 0;   x_i fixed all round
                          run mini-batches until SIGNAL(k);   A_i += g,   K_i += 1
                          who has finished a whole batch, K_i = m, signals to all
    ring-all-reduce       x   ← x − η · ΣA / ΣK                                     no delay, no staleness
    d-psgd, matcha        x_i ← Σ_j W_ij x_j − η · A_i / m                          with K_i = 0 it only mixes

[paper]  the batch is split into m mini-batches; the update is made of the finished ones.
[paper]  the first learner that has finished its batch ends the round; the mini-batch under way elsewhere is thrown away
         and run again at the new parameters (the authors' earlier project).
[ours]   weights by sample count; `unfinished=finish` waits for what is under way, and counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from paceline.node import Gradient, Node
from paceline.rules.plans import Plan
from paceline.strategies.checks import at_least, one_of, only_as_default, yes_or_no
from paceline.strategies.d_psgd import DPsgd
from paceline.strategies.gossip import Gossip, gossip
from paceline.strategies.matcha import Matcha
from paceline.strategies.strategy import Strategy

RING = "ring-all-reduce"
ON_A_GRAPH = ("graph", "probability", "seed", "momentum")


@dataclass(frozen=True, kw_only=True)
class NonBlocking(Strategy):
    """Non-blocking SGD: the first to finish its batch ends the round; what the others have finished counts.

    Args:
        mini_batches: of a batch (m). More of them lose less when a round ends, and make rounds longer.
        unfinished: `abort` a mini-batch when the round ends, and run it again in the next; or `finish` it first.
        carry: a learner keeps its place in its batch over rounds, so that slow ones end a round too, now and then.
        topology: `ring-all-reduce`, `d-psgd` or `matcha`.
        graph, probability, seed, mixing, budget, momentum: of the topology, see `d-psgd` and `matcha`.
    """

    name: ClassVar[str] = "non-blocking"
    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    mini_batches: int = 8
    unfinished: str = "abort"
    carry: bool = False
    topology: str = RING
    graph: str = "ring"
    probability: float = 0.0
    seed: int = 0
    mixing: str = "metropolis"
    budget: float = 0.5
    momentum: str = "local"

    def __post_init__(self) -> None:
        at_least(self, "mini_batches", 1)
        one_of(self, "unfinished", ("abort", "finish"))
        yes_or_no(self, "carry")
        one_of(self, "topology", (RING, "d-psgd", "matcha"))
        without = {RING: (*ON_A_GRAPH, "mixing", "budget"), "d-psgd": ("budget",), "matcha": ("mixing",)}
        only_as_default(self, without[self.topology], f"topology={self.topology}")
        if self.steps_alone:
            self._blocking()  # checks what is left

    @property
    def steps_alone(self) -> bool:
        return self.topology != RING

    def plan(self, workers: int, here: Sequence[int]) -> Plan:
        """Who mixes with whom of those who are here; the run began with so many workers."""
        return self._blocking().plan(workers, here)

    def _blocking(self) -> Gossip:
        """The strategy on the same graph whose workers wait for each other."""
        common = {option: getattr(self, option) for option in ON_A_GRAPH}
        if self.topology == "matcha":
            return Matcha(**common, budget=self.budget)
        return DPsgd(**common, mixing=self.mixing)

    async def worker(self, node: Node) -> None:
        if self.steps_alone:
            await self.on_a_graph(node)
            return
        round_number, place = node.state.get("round", 0), 0
        while not node.finished:
            finished, place = await self.finished_ones(node, round_number, place)
            node.apply(await node.all_reduce(finished))
            round_number += 1
            node.state["round"] = round_number

    async def on_a_graph(self, node: Node) -> None:
        place = 0

        async def batch(round_number: int) -> tuple[Gradient, bool]:
            nonlocal place
            finished, place = await self.finished_ones(node, round_number, place)
            has_data = finished.count > 0 or node.signalled(round_number)
            if finished.count:
                finished.count = self.mini_batches * node.micro_batch  # A_i / m: what is not finished counts as zero
            return finished, has_data

        await gossip(node, partial(self.plan, node.world_size), self.momentum, batch)

    async def finished_ones(self, node: Node, round_number: int, place: int) -> tuple[Gradient, int]:
        """This learner's part of a round, and its place in its batch after it."""
        until = round_number if self.unfinished == "abort" else None
        place = place if self.carry else 0
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
