"""GSSP: a parameter server in groups of similar speed (Sun et al., IEEE TCC 10(4) 2022, 10.1109/TCC.2021.3062398).

    inside a group       SSP: nobody is more than s + 1 iterations ahead of the slowest of its group
    between groups       nobody waits; after `window` pushes the others hear of them

[paper]  workers of similar performance form a group, with a server of its own; group servers talk asynchronously.
[code]   16 workers, 4 groups of 4, s = 3; servers exchange sums of gradients, after as many pushes as
         a group has workers.
[ours]   how groups are formed: by the time of an iteration, measured. `natural` groups by default; who turns slower or
         faster moves, after two looks. Servers exchange changes of the parameters: then all agree at rest, whatever the
         optimizer is; and after every push: in portions they come late and by jerks, which costs many more samples.
         `paper=True` switches these off.

The model of the run is the mean of the groups' models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import PacelineError
from paceline.rules.grouping import given
from paceline.rules.placement import Placement
from paceline.rules.staleness import Bound, Fixed
from paceline.serving.exchange import EXCHANGES
from paceline.serving.grouper import GroupRules
from paceline.strategies.checks import as_published, at_least, one_of, yes_or_no
from paceline.strategies.parameter_server import ParameterServer

PUBLISHED = {"grouping": "equal", "regroup": False, "exchange": "gradient", "window": 0, "delay_cure": "none"}
USUAL_GROUPS = 4  # of the paper


@dataclass(frozen=True, kw_only=True)
class Gssp(ParameterServer):
    """GSSP: bounded staleness inside groups of similar speed, none between them.

    Args:
        staleness: iterations that a worker may be ahead of the slowest of its group when it starts one more (s).
        grouping: `natural` (as the speeds fall, at most one group a server), `equal` (of equal size), or groups given
            as in `0-2+5/3+4`.
        regroup: let workers move whose speed has changed.
        warm_up: iterations of a worker before its speed is known, and between two looks at it.
        exchange: between groups: `delta`, `gradient` or `global`, which takes the last server for itself.
        window: pushes of a group between two words to the other groups; 0 for as many as it has workers.
        parts: servers of a group, which hold a part of its model each.
        overlap, compress, ratio, direction, adapt_lr, delay_cure: see `bsp`.
        paper: as published: groups of equal size, nobody moves, gradients are exchanged, lateness is not cured.
    """

    name: ClassVar[str] = "gssp"
    staleness: int = 3
    grouping: str = "natural"
    regroup: bool = True
    warm_up: int = 5
    exchange: str = "delta"
    window: int = 1
    parts: int = 1
    paper: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        yes_or_no(self, "paper")
        yes_or_no(self, "regroup")
        if self.paper:
            as_published(self, PUBLISHED)
        at_least(self, "staleness", 0)
        at_least(self, "warm_up", 1)
        at_least(self, "window", 0)
        at_least(self, "parts", 1)
        one_of(self, "exchange", EXCHANGES)
        if not self.group_rules.given:
            one_of(self, "grouping", ("natural", "equal"))

    @property
    def bound(self) -> Bound:
        return Fixed(self.staleness)

    @property
    def group_rules(self) -> GroupRules:
        return GroupRules(self.grouping, self.regroup, self.warm_up, self.exchange, self.window)

    def placement(self, workers: int, servers: int) -> Placement:
        has_global = self.exchange == "global"
        return Placement(workers, servers // self.parts - has_global, self.parts, has_global)

    def servers_for(self, workers: int) -> int:
        groups = min(USUAL_GROUPS, workers)
        if self.group_rules.given:
            groups = len(given(self.grouping, range(workers)).groups)
        return (groups + (self.exchange == "global")) * self.parts

    def check_servers(self, workers: int, servers: int) -> None:
        super().check_servers(workers, servers)
        placement = self.placement(workers, servers)
        if servers % self.parts or placement.groups < 1:
            raise PacelineError(
                f"{servers} servers cannot be groups of {self.parts}"
                + (" with a global server behind them." if placement.has_global else "."),
                remedy=f"Give for instance {self.servers_for(workers)} servers.",
            )
        if self.group_rules.given and len(given(self.grouping, range(workers)).groups) > placement.groups:
            raise PacelineError(
                f"grouping={self.grouping} needs more than {servers} servers.",
                remedy=f"Give {self.servers_for(workers)} servers.",
            )
