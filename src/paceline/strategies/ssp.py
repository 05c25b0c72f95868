"""Stale synchronous parallel: nobody is more than a few iterations ahead of the slowest (Ho et al. 2013).

    worker i may start iff   clock_i ≤ min clock + s

s = 0 is `bsp`, s = ∞ is `asp`. In the long run everybody goes at the pace of the slowest; only for a while, as long as
s lasts, one may be ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.rules.staleness import Bound, Fixed
from paceline.strategies.checks import at_least
from paceline.strategies.parameter_server import ParameterServer


@dataclass(frozen=True, kw_only=True)
class Ssp(ParameterServer):
    """SSP: a parameter server with bounded staleness.

    Args:
        staleness: iterations that a worker may be ahead of the slowest when it starts one more (s).
        overlap, compress, ratio, direction, adapt_lr, delay_cure: see `bsp`.
    """

    name: ClassVar[str] = "ssp"
    staleness: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "staleness", 0)

    @property
    def bound(self) -> Bound:
        return Fixed(self.staleness)
