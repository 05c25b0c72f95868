"""When a rank that was told to leave may go. Pure; the same on processes and in virtual time.

From the notice on it computes nothing more: it gives back what it has not used and takes part in rounds without data.
It may go when nothing of it can be missed:

    a round is applied that it started after the notice     its last gradients, or its model, are in that one or before
    (of a worker with servers: they know that no push will follow)
    it holds no sample any more                             all that it has used is in rounds that every rank has

What it has in flight then is empty. So the others may count it or repeat it without that rank: see `agreement`.
"""

from __future__ import annotations

ROUNDS_TO_LOOK = 3
"""A rank that gives leases back holds the run open for so many rounds: the others may have looked for data just before,
and with a strategy that is one round late what they find shows two rounds later."""


def may_go(first: int, last: int, bids_farewell: bool, held: int) -> bool:
    """Whether nothing of a rank can be missed.

    Args:
        first: the first round that it started after the notice.
        last: the last one that is applied.
        bids_farewell: whether its servers know that no push will follow.
        held: samples that it has leased and that are neither given back nor known to be used.

    >>> may_go(7, 6, False, 0), may_go(7, 7, False, 4), may_go(7, 8, False, 0)
    (False, False, True)
    """
    return (bids_farewell or last >= first) and held == 0
