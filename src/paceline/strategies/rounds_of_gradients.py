"""What strategies have in common whose rounds are sums of all ranks' gradients."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rules.codes import CODES
from paceline.strategies.checks import one_of
from paceline.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class RoundsOfGradients(Strategy):
    """Adds gradients up over all ranks.

    Args:
        compress: as what gradients travel: `fp16`, `bf16` or `int8`, with error feedback; `none` as they are. The
            strategy does not see it: the node sends them so.
    """

    compress: str = "none"

    def __post_init__(self) -> None:
        one_of(self, "compress", tuple(CODES))

    @property
    def code(self) -> str:
        return self.compress
