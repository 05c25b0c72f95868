"""Which collectives count when a rank is lost in the middle of some. Pure; the same on processes and in virtual time.

A rank numbers the collectives that it starts, and all ranks start the same ones in the same order. A collective ends
only after all have started it. So when somebody is lost, each of those who are left says how many it has started, and
which of them it lacks:

    somebody who is left holds the result     it counts: whoever lacks it gets it, bit for bit
    nobody who is left holds it               it is repeated among those who are left, each with what it had brought

Whoever holds the result of a collective knows that all have started it, the lost ones too. What it must keep, and for
how long, follows from that: see `Flight.floor` in `lane`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.errors import PacelineError


class Standing(NamedTuple):
    """How far a rank has come: how many collectives it has started, and which of them it has no result of."""

    started: int
    lacks: tuple[int, ...]

    def holds(self, number: int) -> bool:
        return number < self.started and number not in self.lacks


class Gift(NamedTuple):
    """A result that counts, who gives it, and who gets it."""

    number: int
    giver: int
    lacking: tuple[int, ...]


def gifts(standings: Mapping[int, Standing]) -> list[Gift]:
    """What those who are left have to give each other before they go on, in order. All others that somebody lacks
    are repeated.

    Args:
        standings: of each rank that is left.

    >>> gifts({0: Standing(8, ()), 1: Standing(8, (7,)), 3: Standing(8, (7,))})
    [Gift(number=7, giver=0, lacking=(1, 3))]
    >>> gifts({0: Standing(8, (7,)), 1: Standing(7, ()), 3: Standing(8, (6, 7))})  # rank 1 has not come to 7 yet
    [Gift(number=6, giver=0, lacking=(3,))]
    """
    found = []
    for number in sorted({number for standing in standings.values() for number in standing.lacks}):
        holders = [rank for rank, standing in standings.items() if standing.holds(number)]
        behind = [rank for rank, standing in standings.items() if standing.started <= number]
        if holders and behind:
            raise PacelineError(
                f"Rank {holders[0]} holds the result of collective {number}, which rank {behind[0]} has not started.",
                cause="The ranks do not start the same collectives in the same order.",
                remedy="Look at what the strategy does differently on the named ranks.",
            )
        if holders:
            lacking = tuple(rank for rank, standing in standings.items() if number in standing.lacks)
            found.append(Gift(number, min(holders), lacking))
    return found
