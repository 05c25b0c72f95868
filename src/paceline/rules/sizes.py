"""How large a rank's micro-batches should be.

A round cannot end before the slowest rank has ended a micro-batch. So a slow rank takes smaller ones, which last as
long as a whole one of the fastest. And when the noise scale is small against a round, everybody's are cut: a batch
far below the noise scale costs nothing in samples, and rounds are more frequent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

# Of the noise scale, for a round: samples to a target grow as B + B_noise. The noise scale that is measured, late in
# training above all, is several times the batch from which on samples are lost: 0.1 needed 1.4 times the time of 0.03
# where both were tried (LeNet-5, equal workers).
NOISE_SHARE = 0.03
LEAST_PART = 4  # the fastest rank's micro-batches are cut into so many at most: devices are made for large ones
OVERHEAD_FACTOR = 4  # a micro-batch has at least so many times the samples that its overhead is worth


def micro_batch_size(
    micro_batch: int, rank: int, seconds: Sequence[float], noise_scale: float | None, overhead: float
) -> int:
    """Samples for this rank's next micro-batches: an equal part of the user's micro-batch.

    Args:
        micro_batch: the user's; the most.
        rank: whose.
        seconds: a sample, of every rank; 0.0 of those that have had no data yet.
        noise_scale: of the gradient; None for unknown.
        overhead: what a micro-batch costs this rank beside its samples, in samples.

    >>> [micro_batch_size(32, rank, (1, 1, 2, 4), None, 0.0) for rank in range(4)]
    [32, 32, 16, 8]
    >>> [micro_batch_size(32, rank, (1, 1, 2, 4), 1466.0, 0.0) for rank in range(4)]
    [16, 16, 8, 4]
    >>> micro_batch_size(32, 3, (1, 1, 2, 4), None, overhead=5.0)
    16
    """
    known = [each for each in seconds if each > 0]
    if not known or not seconds[rank] > 0:
        return micro_batch
    as_long_as_the_fastest = micro_batch * min(known) / seconds[rank]
    wanted = as_long_as_the_fastest
    if noise_scale is not None:
        share = 1 / (seconds[rank] * sum(1 / each for each in known))
        wanted = max(min(wanted, NOISE_SHARE * noise_scale * share), as_long_as_the_fastest / LEAST_PART)
    wanted = min(max(wanted, OVERHEAD_FACTOR * overhead, 1.0), micro_batch)
    return ceil(micro_batch / round(micro_batch / wanted))


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
