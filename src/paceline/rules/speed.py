"""How fast a worker is, from what its last micro-batches took."""

from __future__ import annotations

from math import inf

LONG_AVERAGE = 16


def smoothed(mean: float, latest: float) -> float:
    """An exponential average of weight ½: three micro-batches after a change of speed it is within an eighth of it.

    >>> smoothed(0.0, 4.0)
    4.0
    >>> smoothed(4.0, 2.0)
    3.0
    """
    return latest if mean == 0.0 else 0.5 * (mean + latest)


class Speedometer:
    """A worker's seconds a sample, and what a micro-batch costs beside its samples.

    A device needs t(n) = a + s·n for n samples. Two sizes tell a and s apart. And what the strategy does after a
    micro-batch (steps, joining a round) takes b. The overhead is (a + b)/s, in samples.

    >>> meter = Speedometer()
    >>> meter.see(32, 3.6)
    >>> meter.seconds_per_sample, meter.overhead_samples
    (0.1125, 0.0)
    >>> meter.see(16, 2.0)
    >>> round(meter.overhead_samples, 6)
    4.0
    >>> meter.see_overhead(0.3)
    >>> round(meter.overhead_samples, 6)
    7.0
    """

    __slots__ = ("_beside", "_count", "_other_count", "_other_seconds", "_seconds", "seconds_per_sample")

    def __init__(self) -> None:
        self.seconds_per_sample = 0.0
        self._count = self._other_count = 0
        self._seconds = self._other_seconds = self._beside = 0.0

    def see(self, count: int, seconds: float) -> None:
        """A micro-batch of so many samples took so long."""
        self.seconds_per_sample = smoothed(self.seconds_per_sample, seconds / count)
        if count != self._count:
            self._other_count, self._other_seconds = self._count, self._seconds
            self._count, self._seconds = count, seconds
        else:
            self._seconds = smoothed(self._seconds, seconds)

    def see_overhead(self, seconds: float) -> None:
        """What was done after a micro-batch took so long. A long average: a few of many make a round. And what takes
        many times longer for once (a checkpoint, an evaluation after a round) is no habit."""
        if self._beside:
            self._beside += (min(seconds, LONG_AVERAGE * self._beside) - self._beside) / LONG_AVERAGE
        else:
            self._beside = seconds

    @property
    def overhead_samples(self) -> float:
        """(a + b)/s; infinite when more samples took no longer. While only one size was seen, a counts as none."""
        if not self._other_count:
            return self._beside / self.seconds_per_sample if self.seconds_per_sample else 0.0
        slope = (self._seconds - self._other_seconds) / (self._count - self._other_count)
        return max(0.0, (self._seconds + self._beside) / slope - self._count) if slope > 0 else inf
