"""What every strategy is: frozen options and one coroutine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from paceline.node import Node


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """A way to train together. Its fields are its options, checked when it is made.

    Four laws, held by `tests/test_house_rules.py`: ask only the node; never await inside `torch.no_grad()`; sequences
    are coroutines and rules are values; what must survive the round lives in `node.state`.
    """

    name: ClassVar[str]
    blocking: ClassVar[bool] = False
    """Whether it steps with fresh gradients of all workers, after waiting for all of them."""

    @property
    def steps_alone(self) -> bool:
        """Whether ranks step by themselves, so that their models differ: the model of the run is then their mean."""
        return False

    @abstractmethod
    async def worker(self, node: Node) -> None:
        """What one rank does from the first sample to the last."""
