"""Which ranks learn and which serve. Workers come first in Paceline's own numbering, servers behind them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import PacelineError

ON_EVERY_HOST = "host"
SERVERS = "PACELINE_SERVERS"
Servers = int | str | Sequence[int]
"""How many of the launcher's ranks serve, the last ones; or which: a list of them, or `"host"` for the last rank of
every host."""


def serving_ranks(servers: Servers, world_size: int, ranks_of_a_host: int) -> list[int]:
    """The launcher's ranks that serve, in order.

    Args:
        servers: see `Servers`; a list may also be a text, as in `"0,4"`.
        world_size: all ranks.
        ranks_of_a_host: as many as the launcher has started on this one; for `"host"` the same on all.

    >>> serving_ranks(2, 6, 6), serving_ranks("host", 8, 4), serving_ranks("0,4", 8, 4)
    ([4, 5], [3, 7], [0, 4])
    """
    try:
        if servers == ON_EVERY_HOST and world_size % ranks_of_a_host:
            raise PacelineError(
                f'servers="host" needs as many ranks on every host; this one has {ranks_of_a_host} of {world_size}.',
                remedy="Say which ranks serve, or give each host its own with `paceline run --servers`.",
            )
        if servers == ON_EVERY_HOST:
            chosen = list(range(ranks_of_a_host - 1, world_size, ranks_of_a_host))
        elif isinstance(servers, str) and "," in servers:
            chosen = sorted(int(rank) for rank in servers.split(","))
        elif isinstance(servers, int | str):
            first = world_size - int(servers)
            chosen = list(range(first, world_size)) if first <= world_size else [first]
        else:
            chosen = sorted(servers)
    except ValueError:
        raise PacelineError(
            f"servers={servers!r} says neither how many ranks serve nor which.",
            remedy='Give a number, a list of ranks as in "0,4", or "host" for one on every host.',
        ) from None
    if len(set(chosen)) < len(chosen) or any(not 0 <= rank < world_size for rank in chosen):
        raise PacelineError(
            f"servers={servers!r} does not fit a run of {world_size} ranks.",
            remedy=f"Name ranks from 0 to {world_size - 1}, each once, or fewer than there are.",
        )
    return chosen


def environment_of_servers(servers: int) -> dict[str, str]:
    """What a launcher tells its processes: the last so many of them serve."""
    return {SERVERS: str(servers)} if servers else {}


def place(rank: int, world_size: int, serving: Sequence[int]) -> int:
    """Paceline's number of a launcher's rank.

    >>> [place(rank, 4, serving=[0, 2]) for rank in range(4)]
    [2, 0, 3, 1]
    """
    learning = [each for each in range(world_size) if each not in serving]
    return [*learning, *serving].index(rank)
