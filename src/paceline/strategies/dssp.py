"""Dynamic stale synchronous parallel: the bound follows the speeds (Zhao et al. 2019, arXiv 1908.11848).

    worker i may start iff   clock_i ≤ min clock + s,     s between `low` and `high`, where the next wait is shortest

See `rules.staleness` for how s is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.rules.staleness import Bound, Dynamic
from paceline.strategies.checks import at_least
from paceline.strategies.parameter_server import ParameterServer


@dataclass(frozen=True, kw_only=True)
class Dssp(ParameterServer):
    """DSSP: a parameter server whose bound on staleness moves.

    Args:
        low: iterations that a worker may always be ahead of the slowest.
        high: that it may be ahead where that makes its next wait shorter.
        overlap, compress, ratio, direction, adapt_lr, delay_cure: see `bsp`.
    """

    name: ClassVar[str] = "dssp"
    low: int = 3
    high: int = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "low", 0)
        at_least(self, "high", self.low)

    @property
    def bound(self) -> Bound:
        return Dynamic(self.low, self.high)
