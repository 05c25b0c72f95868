"""Where a parameter server's ranks stand: groups of servers, and the part of the model that each server holds.

Servers come behind the workers. Those of one group share its copy of the model, each holds a part of it:

    rank of part p of group g  =  workers + g·parts + p        and behind all groups a global server of every part
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from paceline.errors import PacelineError


@dataclass(frozen=True)
class Placement:
    """The ranks of a parameter server.

    Args:
        workers: that compute gradients: ranks 0 to workers − 1.
        groups: of servers; each has its own copy of the model.
        parts: that a copy is cut into, one for each server of a group.
        has_global: whether one more copy stands behind the groups'.

    >>> placement = Placement(workers=4, groups=2, parts=2)
    >>> placement.servers_of(1), placement.place(7), placement.peers(6)
    ([6, 7], (1, 1), [4])
    """

    workers: int
    groups: int
    parts: int = 1
    has_global: bool = False

    @property
    def copies(self) -> int:
        """Of the model, over all servers."""
        return self.groups + self.has_global

    @property
    def ranks(self) -> range:
        """Of all servers."""
        return range(self.workers, self.workers + self.copies * self.parts)

    def servers_of(self, group: int) -> list[int]:
        """The group's ranks, the first part's first. The global server is the group behind the last."""
        first = self.workers + group * self.parts
        return list(range(first, first + self.parts))

    def place(self, rank: int) -> tuple[int, int]:
        """Group and part of a server."""
        return divmod(rank - self.workers, self.parts)

    def peers(self, rank: int) -> list[int]:
        """The servers of the same part in the other groups."""
        return [each for each in self.ranks if each != rank and (each - rank) % self.parts == 0]

    def first_group(self, worker: int) -> int:
        """A worker's group while nobody's speed is known: in the order of the ranks, of equal size. Who has joined
        since, with a number behind the servers', asks at the first one.

        >>> [Placement(workers=5, groups=2).first_group(worker) for worker in range(5)]
        [0, 0, 0, 1, 1]
        """
        return worker * self.groups // self.workers if worker < self.workers else 0


def cut(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Cut a model into parts of about equal size, between parameters: an optimizer sees whole ones.

    Args:
        sizes: numbers in each parameter.
        parts: how many; none is empty.

    Returns:
        Where each part begins and ends in the flat model.

    >>> cut([100, 10, 10, 80], parts=2), cut([100, 10, 10, 80], parts=1)
    ([(0, 100), (100, 200)], [(0, 200)])
    """
    if not 1 <= parts <= len(sizes):
        raise PacelineError(
            f"A model of {len(sizes)} parameters cannot be cut into {parts} parts.",
            cause="Every server of a group holds whole parameters.",
            remedy=f"Give a group at most {len(sizes)} servers.",
        )
    ends = list(accumulate(sizes))
    chosen: list[int] = []
    for part in range(1, parts):
        least, most = len(chosen) and chosen[-1] + 1, len(sizes) - parts + part - 1
        wanted = ends[-1] * part / parts
        chosen.append(min(range(least, most + 1), key=lambda place: abs(ends[place] - wanted)))
    bounds = [0, *(ends[place] for place in chosen), ends[-1]]
    return list(pairwise(bounds))
