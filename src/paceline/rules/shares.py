"""How many samples each worker of unequal speed should compute in a blocking round."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise


def shares_by_speed(seconds: Sequence[float], total: int) -> tuple[int, ...]:
    """Divide `total` samples so that the slowest to finish finishes as soon as possible; everybody gets one.

    Args:
        seconds: what each worker needs for one sample.
        total: samples to divide, at least one a worker.

    Each next sample goes to whoever would have finished it first, which minimises max_i n_i·t_i over all whole
    divisions (any other division gives some worker a sample that ends later than all of these). Nobody gets less than
    the whole part of his exact share, so the counting begins there.

    >>> shares_by_speed([1, 1, 2, 4], 11)
    (4, 4, 2, 1)
    """
    exact = total / sum(1 / each for each in seconds)
    counts = [max(1, int(exact / each * (1 - 1e-12))) for each in seconds]
    if sum(counts) > total:  # the one that everybody gets is more than the share of many
        counts = [1] * len(seconds)
    ends = [((count + 1) * each, rank) for rank, (count, each) in enumerate(zip(counts, seconds, strict=True))]
    heapq.heapify(ends)
    for _ in range(total - sum(counts)):
        _, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, ((counts[rank] + 1) * seconds[rank], rank))
    return tuple(counts)


def round_seconds(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """How long a blocking round with these counts takes: until the last worker is done.

    >>> round_seconds([4, 4, 2, 1], [1, 1, 2, 4])
    4
    """
    return max(count * each for count, each in zip(counts, seconds, strict=True))


@lru_cache(maxsize=2)
def equal_shares(workers: int, each: int) -> tuple[int, ...]:
    """The same for everybody. One tuple for all ranks of a simulation: with ten thousand of them it matters.

    >>> equal_shares(3, 4)
    (4, 4, 4)
    """
    return (each,) * workers


def share_of(counts: tuple[int, ...], rank: int) -> int:
    """Of one worker; one that has come since has none yet."""
    return counts[rank] if rank < len(counts) else 0


def among(counts: tuple[int, ...], ranks: Sequence[int]) -> tuple[int, ...]:
    """What the others had is shared out among these, in proportion to what they have; one that has nothing, a newcomer,
    counts like the mean of those who have. Where nobody says who is there, all are.

    >>> among((4, 4, 2, 1), (0, 2, 3)), among((3, 0, 3), (0, 2)), among((6, 0, 3), (0, 1, 2))
    ((6, 0, 3, 2), (3, 0, 3), (4, 3, 2))
    >>> among((4, 2), (0, 1, 2))  # one more than there were
    (3, 1, 2)
    """
    counts += (0,) * (max(ranks, default=-1) + 1 - len(counts))
    having = [count for count in counts if count]
    if not ranks or (len(having) == len(ranks) and all(counts[rank] for rank in ranks)):
        return counts
    mean = sum(having) / len(having)
    here = [counts[rank] or mean for rank in ranks]
    ends = list(accumulate(here, initial=0))
    cuts = [round(sum(counts) * end / ends[-1]) for end in ends]
    shared = dict(zip(ranks, (after - before for before, after in pairwise(cuts)), strict=True))
    return tuple(shared.get(rank, 0) for rank in range(len(counts)))


class SharesBySpeed:
    """The counts for the next round: the old ones, unless new ones would shorten it by more than the dead band.

    In the simulator all ranks ask with the very same tuples, so the last answer is kept and found by identity: asking
    costs one rank the work and the others nothing.

    >>> resized = SharesBySpeed()
    >>> resized((3, 3), (1.0, 1.05), dead_band=0.1)
    (3, 3)
    >>> resized((3, 3), (1.0, 2.0), dead_band=0.1)
    (4, 2)
    >>> resized((3, 3), (1.0, 0.0), dead_band=0.1)  # who has had no data yet has no speed
    (3, 3)
    """

    def __init__(self) -> None:
        self._asked: tuple[object, ...] = (None, None, None)
        self._answer: tuple[int, ...] = ()

    def __call__(self, counts: tuple[int, ...], seconds: tuple[float, ...], dead_band: float) -> tuple[int, ...]:
        asked_counts, asked_seconds, asked_band = self._asked
        if counts is not asked_counts or seconds is not asked_seconds or dead_band != asked_band:
            self._answer = _resized(counts, seconds, dead_band)
            self._asked = (counts, seconds, dead_band)
        return self._answer


def _resized(counts: tuple[int, ...], seconds: tuple[float, ...], dead_band: float) -> tuple[int, ...]:
    here = [rank for rank, count in enumerate(counts) if count]  # the others are lost
    known = [seconds[rank] for rank in here if seconds]
    if not known or not all(known):
        return counts
    before = [counts[rank] for rank in here]
    better = shares_by_speed(known, sum(before))
    gain = 1 - round_seconds(better, known) / round_seconds(before, known)
    if gain <= dead_band:
        return counts
    shares = dict(zip(here, better, strict=True))
    return tuple(shares.get(rank, 0) for rank in range(len(counts)))


resized = SharesBySpeed()
