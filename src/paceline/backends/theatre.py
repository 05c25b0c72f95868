"""What a simulated node needs of the driver: to start something in virtual time, and to say what became of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from paceline.node import Gradient, Message, Share, Work

if TYPE_CHECKING:
    from paceline.backends.simulated_node import SimulatedNode
    from paceline.backends.virtual_rounds import RoundTotal


class Theatre(ABC):
    """What a node needs of the driver: to start something in virtual time."""

    @abstractmethod
    def start_all_reduce(self, node: SimulatedNode, gradient: Gradient, note: float) -> Work[Gradient]: ...

    @abstractmethod
    def start_mean(self, node: SimulatedNode, share: Share) -> Work[Gradient]: ...

    @abstractmethod
    def start_all_gather(
        self, node: SimulatedNode, numbers: tuple[float, ...]
    ) -> Work[tuple[tuple[float, ...], ...]]: ...

    @abstractmethod
    def discard(self, node: SimulatedNode, gradient: Gradient, reason: str) -> None: ...

    @abstractmethod
    def settle(self, node: SimulatedNode, gradient: Gradient) -> None: ...

    @abstractmethod
    def hand_in(self, node: SimulatedNode, gradient: Gradient) -> int: ...

    @abstractmethod
    def heard_of_loss(self, node: SimulatedNode, rank: int) -> bool: ...

    @property
    @abstractmethod
    def somebody_joins(self) -> bool: ...

    @abstractmethod
    def take_back(self, node: SimulatedNode, samples: list[range], reason: str) -> None: ...

    @abstractmethod
    def settle_for(self, node: SimulatedNode, worker: int, samples: int, handed_in: int, delay: int) -> None: ...

    @abstractmethod
    def learned(self, node: SimulatedNode, samples: int) -> None: ...

    @abstractmethod
    def round_over(self, node: SimulatedNode) -> None: ...

    @abstractmethod
    def say(self, node: SimulatedNode, kind: str, text: str) -> None: ...

    @property
    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def round_applied(self, node: SimulatedNode, total: RoundTotal) -> None: ...


class Post(ABC):
    """What a node needs to reach others without a collective."""

    @abstractmethod
    def start_message(self, to: int, message: Message) -> None: ...

    @abstractmethod
    def start_signal(self, node: SimulatedNode, round_number: int) -> None: ...

    @abstractmethod
    def start_count(self, node: SimulatedNode, round_number: int, samples: int, target: int) -> None: ...
