"""What a run is about, as the nodes of real ranks must know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """The same for all ranks, but for the last one.

    Args:
        micro_batch: the user's.
        samples: of the data set.
        servers: how many ranks, the last ones, serve.
        survives, carries: see `Strategy`.
        more_to_come: for this rank, whether a lost one has left samples that nobody has used.
    """

    micro_batch: int
    samples: int
    servers: int
    survives: bool
    carries: bool
    more_to_come: Callable[[], bool]
