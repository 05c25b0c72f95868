"""What every strategy is: frozen options and one coroutine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import PacelineError
from paceline.node import WHOLE, Node, Share


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """A way to train together. Its fields are its options, checked when it is made.

    Four laws, held by `tests/test_house_rules.py`: ask only the node; never await inside `torch.no_grad()`; sequences
    are coroutines and rules are values; what must survive the round lives in `node.state`.
    """

    name: ClassVar[str]
    blocking: ClassVar[bool] = False
    """Whether it steps with fresh gradients of all workers, after waiting for all of them."""
    survives: ClassVar[bool] = False
    """Whether it goes on when a rank is lost: then `node.receive` brings a message `lost` from it, after all others."""
    carries: ClassVar[bool] = False
    """Whether a round is applied when gradients of the next one are computed already. Then a checkpoint, which holds no
    gradients, is taken a round after it is wished for: meanwhile `node.saving` is true, and the strategy applies that
    round before it computes anything for another."""
    admits: ClassVar[bool] = False
    """Whether a rank can take part from a round of all on, in the place of a lost one or as a further one. For that
    nothing is in flight when a round is applied and the next has not begun, and what ranks must know alike of the
    rounds before is in `node.state`."""

    @property
    def steps_alone(self) -> bool:
        """Whether ranks step by themselves, so that their models differ: the model of the run is then their mean."""
        return False

    @property
    def code(self) -> str:
        """In which the gradients of a round travel: one of `rules.codes.CODES`. Nodes look after it."""
        return "none"

    def servers_for(self, workers: int) -> int:
        """How many ranks serve so many workers when nobody says how many; 0 for a strategy without servers."""
        return 0

    def check_servers(self, workers: int, servers: int) -> None:
        """Protest unless the strategy can train with so many ranks that learn and so many that serve."""
        if servers:
            raise PacelineError(
                f"The strategy {self.name} has no servers, and was given {servers}.",
                remedy="Start it without servers, or take bsp, ssp, dssp, asp or gssp.",
            )

    def lacks(self, alive: Collection[int], workers: int, servers: int) -> str:
        """What is missing for the strategy to go on with these ranks after a loss, in words; '' if it can."""
        return "" if self.survives else "one of the ranks"

    def share_of_model(self, rank: int, workers: int, servers: int, sizes: Sequence[int]) -> Share:
        """What a rank brings to the model of the run, where that is a mean of models."""
        return WHOLE

    def course(self, node: Node) -> Coroutine[Any, Any, None]:
        """What the rank does from the first sample to the last."""
        return self.server(node) if node.serves else self.worker(node)

    @abstractmethod
    async def worker(self, node: Node) -> None:
        """What a rank does that computes gradients."""

    async def server(self, node: Node) -> None:
        """What a rank does that serves the others; see `check_servers`."""
        raise PacelineError(f"The strategy {self.name} has no servers.")
