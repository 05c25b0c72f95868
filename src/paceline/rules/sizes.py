"""How large a rank's micro-batches should be.

A round cannot end before the slowest rank has ended its part of it. So a slow rank takes smaller micro-batches, which
last as long as those of the fastest. And everybody's are cut: from each a rank goes on (see `delayed_steps`), and many
small steps lead further than a few large ones. What a micro-batch costs beside its samples sets the limit to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

# Of the noise scale, for a round: samples to a target grow as B + B_noise. The noise scale that is measured, late in
# training above all, is several times the batch from which on samples are lost: 0.1 needed 1.4 times the time of 0.03
# where both were tried (LeNet-5, equal workers).
NOISE_SHARE = 0.03
LEAST_PART = 4  # the fastest rank's micro-batches are cut into so many at most: devices are made for large ones
OVERHEAD_FACTOR = 10  # a micro-batch has at least so many times the samples that its overhead is worth


def micro_batch_size(micro_batch: int, rank: int, seconds: Sequence[float], overhead: float) -> int:
    """Samples for this rank's next micro-batches: an equal part of the user's micro-batch.

    Args:
        micro_batch: the user's; the most.
        rank: whose.
        seconds: a sample, of every rank; 0.0 of those that have had no data yet.
        overhead: what a micro-batch costs this rank beside its samples, in samples.

    >>> [micro_batch_size(32, rank, (1, 1, 2, 4), 0.0) for rank in range(4)]
    [8, 8, 4, 2]
    >>> micro_batch_size(32, 3, (1, 1, 2, 4), overhead=1.6)
    16
    """
    if len(seconds) == 1 or not seconds[rank] > 0:  # alone there is nobody to keep up with: the user's own steps
        return micro_batch
    wanted = min(
        max(as_long_as_the_fastest(micro_batch, rank, seconds) / LEAST_PART, OVERHEAD_FACTOR * overhead, 1.0),
        micro_batch,
    )
    return ceil(micro_batch / round(micro_batch / wanted))


def least_of_a_round(micro_batch: int, rank: int, seconds: Sequence[float], size: int) -> int:
    """Micro-batches of this size that a rank's part of a round should have: two, so that it goes on from the first to
    the second, if they take no longer than a whole one of the fastest; else one.

    >>> [least_of_a_round(32, 3, (1, 1, 2, 4), size) for size in (2, 4, 8)]
    [2, 2, 1]
    """
    return 2 if 2 * size <= as_long_as_the_fastest(micro_batch, rank, seconds) else 1


def as_long_as_the_fastest(micro_batch: int, rank: int, seconds: Sequence[float]) -> float:
    """Samples that take this rank as long as a whole micro-batch takes the fastest.

    >>> [as_long_as_the_fastest(32, rank, (0.0, 1, 2, 4)) for rank in range(4)]
    [32, 32.0, 16.0, 8.0]
    """
    known = [each for each in seconds if each > 0]
    return micro_batch * min(known) / seconds[rank] if known and seconds[rank] > 0 else micro_batch


def round_target(target: int | str, micro_batch: int, workers: int, noise_scale: float | None) -> int:
    """Samples of a round: as many as the user says, or (`auto`) so many that hardly any are lost against the smallest
    batches; while the noise scale is not known, what synchronous training would take.

    >>> [round_target("auto", 32, 4, noise) for noise in (None, 10.0, 2000.0, 1e9)]
    [128, 32, 60, 512]
    """
    if isinstance(target, int):
        return target
    if noise_scale is None:
        return workers * micro_batch
    return round(min(max(NOISE_SHARE * noise_scale, micro_batch), LEAST_PART * workers * micro_batch))
