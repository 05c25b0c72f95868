"""Bulk synchronous parallel on a parameter server: everybody waits for everybody (Valiant 1990).

    round:   every worker pulls w, computes x_i, pushes it;   w ← Opt(w, mean of all x_i)

What `all-reduce` does, with servers in between: the baseline of its kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.rules.staleness import Bound, Fixed
from paceline.strategies.parameter_server import ParameterServer


@dataclass(frozen=True, kw_only=True)
class Bsp(ParameterServer):
    """BSP: a parameter server in lock-step.

    Args:
        overlap: the next parameters travel while the gradient is computed: `always`, `never`, or `auto`, where
            communication takes more than a tenth of the computing. With a bound of 0 they are sent late anyway.
        compress: of pushes: `none`, `top-k`, `gdtopk` or `dgc`; what is not sent waits for the next ones.
        ratio: share of the entries that `top-k` and, in the end, `dgc` send.
        direction: of `gdtopk`: `code` lets the slowest group send most, `speed` least.
        adapt_lr: a push that comes late counts less: η·N/max(N, delay).
        delay_cure: where others step while a worker computes. `momentum`: workers keep that of SGD themselves.
            `predict`: they compute where the parameters will be in an iteration. `auto` is both, `none` neither;
            unless `none`, Adam's second moment forgets by rounds. With a bound of 0 there is nothing to cure.
    """

    name: ClassVar[str] = "bsp"
    blocking: ClassVar[bool] = True

    @property
    def bound(self) -> Bound:
        return Fixed(0)
