"""Asynchronous parallel on a parameter server: nobody waits for anybody (Dean et al. 2012).

    worker i, all the time:   w ← pull;   push g_i(w)

Every worker computes all the time, at parameters that others change meanwhile. How late a gradient comes has no bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.rules.staleness import Bound, Unbounded
from paceline.strategies.parameter_server import ParameterServer


@dataclass(frozen=True, kw_only=True)
class Asp(ParameterServer):
    """ASP: a parameter server without a bound on staleness.

    Args:
        overlap, compress, ratio, direction, adapt_lr, delay_cure: see `bsp`.
    """

    name: ClassVar[str] = "asp"

    @property
    def bound(self) -> Bound:
        return Unbounded()
