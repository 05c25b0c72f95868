"""A parameter server: workers pull parameters from servers and push gradients to them.

    worker i of group g   waits until  clock_i ≤ min(clock of the workers of g) + bound        see `rules.staleness`
                          w ← pull;   x ← gradient at w;   push x;   clock_i += 1
    server of group g     w ← Opt(w, x) with the learning rate η/N, N workers in all

One family. Its members differ in the bound and in the groups: `bsp`, `ssp`, `dssp` and `asp` have one group, `gssp` has
several. With a bound of 0 the pushes of a round are added up and make one step: then one group is synchronous SGD.

[ours]  the learning rate is divided by N, not the gradient: for SGD it is the same, and Adam or weight decay mean what
        they mean in synchronous training.
[ours]  where communication takes long, the next parameters are asked for while the gradient is computed. The server
        sends them as soon as the bound allows, so that they travel meanwhile; with a bound of 0 that is when everybody
        has pushed. Then a worker's own last gradient is not in them: where communication is cheap, it asks later.
[ours]  what it costs that others step while a worker computes is cured: see `serving.cures`.
[ours]  a newcomer is let in when ranks meet, with the model of the run; its clock begins at the least of its group.
[ours]  several servers of a group hold a part of its model each. What a compressor has kept back is pushed at the end
        of an epoch, and before ranks meet to save or to end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import PacelineError
from paceline.node import Node, Share
from paceline.rules.placement import Placement, cut
from paceline.rules.staleness import Bound
from paceline.serving.cures import CURES
from paceline.serving.group_server import GroupServer
from paceline.serving.grouper import GroupRules
from paceline.serving.server_line import ServerLine
from paceline.strategies.centre import end_round
from paceline.strategies.checks import at_least, one_of, only_as_default, yes_or_no
from paceline.strategies.strategy import Strategy

NOTHING = Share(models=0, last=0)
OVERLAPS = ("auto", "always", "never")
COMPRESSORS = ("none", "top-k", "gdtopk", "dgc")


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy):
    """What the strategies with servers have in common: how pushes are compressed, what late ones count, and whether
    parameters travel while the worker computes."""

    survives: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    overlap: str = "auto"
    compress: str = "none"
    ratio: float = 0.01
    direction: str = "code"
    adapt_lr: bool = False
    delay_cure: str = "auto"

    def __post_init__(self) -> None:
        one_of(self, "overlap", OVERLAPS)
        one_of(self, "compress", COMPRESSORS)
        one_of(self, "direction", ("code", "speed"))
        yes_or_no(self, "adapt_lr")
        one_of(self, "delay_cure", CURES)
        at_least(self, "ratio", 0.0)
        unused = {"none": ("ratio", "direction"), "gdtopk": ("ratio",)}.get(self.compress, ("direction",))
        only_as_default(self, unused, f"compress={self.compress}")

    @property
    def steps_alone(self) -> bool:
        return True

    @property
    @abstractmethod
    def bound(self) -> Bound:
        """How far a worker may be ahead of the slowest of its group."""

    @property
    def group_rules(self) -> GroupRules:
        """How groups are formed, and what their servers tell each other."""
        return GroupRules()

    def placement(self, workers: int, servers: int) -> Placement:
        """One group, whose model is cut into as many parts as there are servers."""
        return Placement(workers, groups=1, parts=servers)

    def servers_for(self, workers: int) -> int:
        return 1

    def check_servers(self, workers: int, servers: int) -> None:
        if servers < 1 or workers < 1:
            raise PacelineError(
                f"The strategy {self.name} needs workers and servers, and has {workers} and {servers}.",
                remedy=f"Start it with `paceline run --servers {self.servers_for(max(workers, 1))}`, or under torchrun "
                f"as Run({self.name!r}, servers={self.servers_for(max(workers, 1))}): then the last ranks serve.",
            )

    def lacks(self, alive: Collection[int], workers: int, servers: int) -> str:
        """There must be a worker, and a group with a server of every part; and the global server, if there is one."""
        placement = self.placement(workers, servers)
        whole = [all(rank in alive for rank in placement.servers_of(copy)) for copy in range(placement.copies)]
        if not any(whole[: placement.groups]) or not all(whole[placement.groups :]):
            return "a group of servers that is whole"
        return "" if any(rank not in placement.ranks for rank in alive) else "a worker"

    def share_of_model(self, rank: int, workers: int, servers: int, sizes: Sequence[int]) -> Share:
        placement = self.placement(workers, servers)
        if rank not in placement.ranks:
            return NOTHING
        group, part = placement.place(rank)
        if placement.has_global and group < placement.groups:
            return NOTHING
        first, last = cut(sizes, placement.parts)[part]
        return Share(models=int(part == 0), first=first, last=last)

    async def worker(self, node: Node) -> None:
        line = ServerLine(self, node)
        while not node.finished:
            await line.join()
            while not node.called_together:
                line.ask_ahead()
                gradient = await node.gradient()
                if not gradient.count:  # no more data
                    break
                line.push(gradient)
                await line.parameters()
            await line.leave()
            node.adopt(await node.mean_model(self._share(node)))
            end_round(node)  # newcomers are let in now

    async def server(self, node: Node) -> None:
        group = GroupServer(self, node)
        while not node.finished:
            await group.serve()
            share = NOTHING if group.broken else self._share(node)
            node.adopt(await node.mean_model(share))
            end_round(node)
            group.met()

    def _share(self, node: Node) -> Share:
        return self.share_of_model(node.rank, node.workers, node.servers, node.sizes)
