"""How large a rank's micro-batches should be.

A round cannot end before the slowest rank has ended its part of it. So a slow rank takes smaller micro-batches, which
last as long as those of the fastest. And everybody's are cut: from each a rank goes on (see `delayed_steps`), and many
small steps lead further than a few large ones. What a micro-batch costs beside its samples sets the limit to that; and
where the network is so slow that a round has many of them anyway, they are not cut: that would only cost more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

# Of the noise scale, for a round: samples to a target grow as B + B_noise. The noise scale that is measured, late in
# training above all, is several times the batch from which on samples are lost: 0.1 needed 1.4 times the time of 0.03
# where both were tried (LeNet-5, equal workers).
NOISE_SHARE = 0.03
LEAST_PART = 4  # the fastest rank's micro-batches are cut into so many at most: devices are made for large ones
# A micro-batch has at least so many times the samples that its overhead is worth: a twentieth of the time is lost at
# most. With ten, digits at 10 ms a sample had a share of ideal of 0.925; with micro-batches twice as large 0.945, and
# they needed as many samples to the target (rates 0.1 and 0.2, medians of 12 seeds in virtual time: 1,522 and 1,480).
OVERHEAD_FACTOR = 20
# The same where a round has several whole ones anyway, because the network is slow: then there are steps enough.
SEVERAL, THEIR_OVERHEAD_FACTOR = 2, 40


def micro_batch_size(
    micro_batch: int, rank: int, seconds: Sequence[float], overhead: float, in_a_round: int = 0
) -> int:
    """Samples for this rank's next micro-batches: an equal part of the user's micro-batch.

    Args:
        micro_batch: the user's; the most.
        rank: whose.
        seconds: a sample, of every rank; 0.0 of those that have had no data yet.
        overhead: what a micro-batch costs this rank beside its samples, in samples.
        in_a_round: samples that this rank has in a round.

    >>> [micro_batch_size(32, rank, (1, 1, 2, 4), 0.0) for rank in range(4)]
    [8, 8, 4, 2]
    >>> [micro_batch_size(32, rank, (1, 1, 2, 4), 0.0, in_a_round=128) for rank in range(4)]
    [32, 32, 16, 8]
    >>> micro_batch_size(32, 3, (1, 1, 2, 4), overhead=0.8)
    16
    >>> [micro_batch_size(32, 3, (1, 1, 2, 4), overhead=0.4, in_a_round=samples) for samples in (8, 16)]
    [8, 16]
    """
    if len(seconds) == 1 or not seconds[rank] > 0:  # alone there is nobody to keep up with: the user's own steps
        return micro_batch
    whole = as_long_as_the_fastest(micro_batch, rank, seconds)
    parts = 1 if in_a_round >= LEAST_PART * whole else LEAST_PART
    factor = THEIR_OVERHEAD_FACTOR if in_a_round >= SEVERAL * whole else OVERHEAD_FACTOR
    wanted = min(max(whole / parts, factor * overhead, 1.0), micro_batch)
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
    fastest = min(filter(None, seconds), default=0.0)  # a thousand ranks ask this of each other in every round
    return micro_batch * fastest / seconds[rank] if fastest and seconds[rank] > 0 else micro_batch


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
