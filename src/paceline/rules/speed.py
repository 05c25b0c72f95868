"""How fast a worker is, from what its last micro-batches took."""

from __future__ import annotations


def smoothed(mean: float, latest: float) -> float:
    """An exponential average of weight ½: three micro-batches after a change of speed it is within an eighth of it.

    >>> smoothed(0.0, 4.0)
    4.0
    >>> smoothed(4.0, 2.0)
    3.0
    """
    return latest if mean == 0.0 else 0.5 * (mean + latest)
