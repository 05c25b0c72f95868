"""Batches that grow where many updates are made and shrink where few are, until all make as many (Adaptive SGD).

    paper      b_i ← b_i + β (u_i − ū)
    release    b_i ← b_i ± 32 by the sign of u_i − ū

Between two merges, in a time t, a worker of speed v makes u = t·v/b updates. A sample more in its batch changes u by
−u/b, so that β·u/b of a difference is gone after the next merge: above 1 the batch swings from merge to merge, and from
2 on more and more. [ours] β_i is at most half of b_i/ū.

Both rules make updates equal, and at every common level of the batches they are: the level is nobody's aim. A batch
that has come to the largest stays there while others shrink, so every change of speeds leaves the level lower.
[ours] `at_full_size` raises it again.
"""

from __future__ import annotations

from collections.abc import Sequence

RULES = ("paper", "release")
RELEASED_STEP = 32.0
LARGEST_GAIN = 0.5


def scaled_batches(
    rule: str, batches: Sequence[float], updates: Sequence[float], beta: float, bounds: tuple[float, float]
) -> list[float]:
    """The batches until the next merge. They are kept as they are, not rounded: small changes add up.

    Args:
        rule: of the above.
        batches: b_i, samples.
        updates: u_i since the last merge.
        beta: samples for each update above or below the mean.
        bounds: b_min and b_max.

    >>> scaled_batches("paper", (1000, 1000, 1000), (26, 25, 24), beta=16, bounds=(64, 1024))
    [1016.0, 1000.0, 984.0]
    >>> scaled_batches("release", (1000, 1000, 1000), (27, 25, 23), beta=16, bounds=(64, 1024))
    [1024, 1000.0, 968.0]
    >>> scaled_batches("paper", (32, 32), (30, 20), beta=16, bounds=(2, 32))  # the guard: 16·25/32 would be 12.5
    [32, 28.8]
    """
    mean = sum(updates) / len(updates)
    if not mean:
        return list(batches)
    least, most = bounds
    return [
        min(max(batch + _change(rule, own - mean, beta, LARGEST_GAIN * batch / mean), least), most)
        for batch, own in zip(batches, updates, strict=True)
    ]


def at_full_size(batches: Sequence[float], largest: float) -> list[float]:
    """Batches of the same proportions, of which the largest is as large as may be. Updates stay as equal as they were.

    >>> at_full_size((800, 400), largest=1000)
    [1000.0, 500.0]
    """
    return [batch * (largest / max(batches)) for batch in batches]


def _change(rule: str, difference: float, beta: float, guard: float) -> float:
    if rule == "paper":
        return min(beta, guard) * difference
    step = min(RELEASED_STEP, guard * abs(difference))
    return step if difference > 0 else -step


def make_room_(batches: list[float], ranks: int, full: int) -> None:
    """Whoever has come since begins with full batches.

    >>> batches = [8.0, 4.0]
    >>> make_room_(batches, ranks=3, full=16)
    >>> batches
    [8.0, 4.0, 16.0]
    """
    batches += [float(full)] * (ranks - len(batches))
