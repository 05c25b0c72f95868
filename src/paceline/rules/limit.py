"""The least time in which a cluster can learn something, and where a run lost against it.

At batch B synchronous training needs S_min·(1 + B_noise/B) updates (McCandlish et al. 2018, arXiv 1812.06162), and an
update is no quicker than the workers compute its B samples, worker i at v_i samples a second, nor than they are summed:

    T_limit = min_B  S_min · (1 + B_noise/B) · step(B)
    step(B) = max(t*(B), t_comm) with overlap, else the sum          t*(B) = min{t : Σ_i ⌊t·v_i⌋ ≥ B}

For independent samples no method is faster, up to a constant (Tyurin & Richtárik 2023). The sample is the unit of
work: a method may divide its micro-batches. Of S_min, which no formula gives, a cluster's best batch is independent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import floor, fsum, inf, isfinite, sqrt

from paceline.errors import PacelineError

BELOW = 1 - 1e-9
"""Just before a moment: by so much that rounding cannot reach it, and by less than a sample of any usual batch."""
LARGEST_BATCH = 1e9
"""More than any update is over, and few enough that floats tell each finished sample from the next."""
SLOWEST, FASTEST = 1e-12, 1e12
"""Samples a second; no device is outside, and no sum or quotient of these leaves the range of floats."""
MOST_MOMENTS = 200_000
"""Looked at in search of the best batch: a fraction of a second. With N workers that is all of them up to a noise scale
of 10¹⁰/N samples; for a larger one the answer may be above the limit, by a part of at most 2·√(N/B_noise)."""


@dataclass(frozen=True)
class Limit:
    """What no method can beat on a cluster; all times in seconds.

    Args:
        batch: B*, in samples. Infinite with an infinite noise scale, as are the times.
        step_seconds: from one update to the next, step(B*).
        compute_seconds: of it, what the workers need to compute the batch, t*(B*).
        seconds_per_step_min: (1 + B_noise/B*)·step(B*), the least time for what one update would do without noise.
        speed: V = Σ v_i, samples a second of all workers together.
        noise_scale, comm_seconds: as given.
    """

    batch: float
    step_seconds: float
    compute_seconds: float
    seconds_per_step_min: float
    speed: float
    noise_scale: float
    comm_seconds: float

    def share(self, batch: float, step_seconds: float) -> float:
        """The share of the limit that updates over `batch` samples every `step_seconds` reach, at best.

        >>> unhurried = limit([100.0, 100.0], noise_scale=50, comm_seconds=0.1)
        >>> unhurried.share(unhurried.batch, unhurried.step_seconds), round(unhurried.share(100, 0.5), 3)
        (1.0, 0.467)
        """
        if self.noise_scale == inf:  # only samples count
            return batch / (self.speed * step_seconds)
        return self.seconds_per_step_min / ((1 + self.noise_scale / batch) * step_seconds)

    @property
    def binds(self) -> str:
        """What keeps the limit from being lower: `noise` when averaging it away takes the greater part of the time,
        else whichever the best update waits for, `communication` or the `devices`."""
        if self.noise_scale > self.batch or self.noise_scale == inf:
            return "noise"
        return "communication" if self.comm_seconds >= self.compute_seconds else "devices"


def time_for(batch: int, speeds: Sequence[float]) -> float:
    """t*(B): the first moment at which the workers together have computed `batch` whole samples.

    Args:
        batch: samples.
        speeds: of each worker, samples a second.

    No batch is ready before B/V, and then fewer samples than there are workers are missing; so the search takes as many
    steps as there are workers, whatever the batch.

    >>> time_for(4, [2.0, 2.0, 1.0])  # two samples of each fast worker after a second, none of them sooner
    1.0
    >>> time_for(1_000_000, [2.0, 2.0, 1.0])
    200000.0
    """
    if batch <= 0:
        return 0.0
    moments = _moments(speeds, batch / fsum(speeds) * BELOW)
    return next(seconds for seconds, done in moments if done >= batch)


def samples_by(seconds: float, speeds: Sequence[float]) -> int:
    """How many whole samples the workers together have computed by then.

    >>> samples_by(1.0, [2.0, 2.0, 1.0]), samples_by(0.9, [2.0, 2.0, 1.0])
    (5, 2)
    """
    return sum(_done(seconds, speed) for speed in speeds)


def limit(speeds: Sequence[float], noise_scale: float, comm_seconds: float, overlap: bool = True) -> Limit:
    """The best batch of a cluster, and the least time for what one update would do without noise.

    Args:
        speeds: of each worker, samples a second.
        noise_scale: B_noise, in samples. Zero: every update is as good as any, and the quickest is best (with as many
            samples as are ready by then). Infinite: every sample is as good as any, and only their number counts.
        comm_seconds: t_comm, what it takes to add up one update over all workers.
        overlap: whether workers compute on meanwhile, which is what a method can do at best.

    >>> best = limit([1600, 1600, 800, 400], noise_scale=500, comm_seconds=0.01)
    >>> best.batch, best.step_seconds, round(best.seconds_per_step_min, 4), best.binds
    (44, 0.01, 0.1236, 'noise')
    >>> limit([1600, 1600, 800, 400], noise_scale=0, comm_seconds=0.0).batch  # one sample of each of the fastest
    2
    """
    _check(speeds, noise_scale, comm_seconds)
    total = fsum(speeds)
    if noise_scale == inf:
        return Limit(inf, inf, inf, inf, total, inf, comm_seconds)
    search = _Search(speeds, total, noise_scale, comm_seconds, overlap)
    batch, computed = search.best()
    return Limit(
        batch=batch,
        step_seconds=search.step(computed),
        compute_seconds=time_for(batch, speeds),
        seconds_per_step_min=search.cost(batch, computed),
        speed=total,
        noise_scale=noise_scale,
        comm_seconds=comm_seconds,
    )


@dataclass(frozen=True)
class Split:
    """Where a run lost against the limit: its share of the limit is the product of three.

    Args:
        hardware: samples used / what all workers could have computed: the share of ideal.
        batch: the time of the limit / that of a run which loses nothing else at this run's batch. Above 1 for batches
            below the best one: they need fewer samples, and lose more than that by communicating.
        statistics: samples that a run without delay needs at this batch / samples that the run needed. None when
            either is not known.
    """

    hardware: float
    batch: float
    statistics: float | None

    @property
    def share(self) -> float | None:
        """T_limit / T_run.

        >>> Split(hardware=0.5, batch=0.5, statistics=1.0).share, Split(0.5, 0.5, None).share
        (0.25, None)
        """
        return None if self.statistics is None else self.hardware * self.batch * self.statistics


def split(
    limit: Limit, *, hardware: float, batch: float, samples: float | None = None, least_steps: float | None = None
) -> Split:
    """Split a run's distance from the limit.

    Args:
        limit: of the cluster.
        hardware: the run's share of ideal.
        batch: samples in an update, on average.
        samples: that the run needed to its target; None when it did not reach it.
        least_steps: S_min, see `least_steps`; None when it is not known.

    >>> cluster = limit([100.0, 100.0], noise_scale=100, comm_seconds=0.25)
    >>> split(cluster, hardware=0.9, batch=100, samples=2000, least_steps=8)
    Split(hardware=0.9, batch=0.75, statistics=0.8)
    """
    statistics = None
    if samples and least_steps is not None:
        statistics = least_steps * (batch + limit.noise_scale) / samples
    return Split(hardware, limit.share(batch, batch / limit.speed), statistics)


def least_steps(samples: float, batch: float, noise_scale: float) -> float:
    """S_min, from the samples that a run without delay needed: samples = S_min·(B + B_noise).

    >>> least_steps(samples=1500, batch=100, noise_scale=50)
    10.0
    """
    return samples / (batch + noise_scale)


@dataclass(frozen=True)
class Fit:
    """How the samples to a target grow with the batch: `least_samples + least_steps · batch`."""

    least_steps: float
    least_samples: float

    @property
    def noise_scale(self) -> float:
        """B_noise; infinite when the samples do not grow with the batch."""
        return self.least_samples / self.least_steps if self.least_steps else inf


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """S_min and B_noise from (batch, samples to the target) of synchronous runs, by least squares:

        samples = S_min · (B + B_noise),        S_min ≥ 0, B_noise ≥ 0

    >>> found = fit([(100, 1500), (200, 2500), (300, 3500)])
    >>> found.least_steps, found.noise_scale
    (10.0, 50.0)
    """
    for batch, samples in points:
        if not (0 < batch < inf and 0 < samples < inf):
            raise PacelineError(
                f"A run of batch {batch:g} that needs {samples:g} samples cannot be fitted.",
                remedy="Leave out runs that did not reach the target.",
            )
    if len({batch for batch, _ in points}) < 2:
        raise PacelineError(
            "The noise scale cannot be told from runs of one batch size.",
            remedy="Give runs with at least two different batches, best far apart.",
        )
    mean_batch, mean_samples = (fsum(column) / len(points) for column in zip(*points, strict=True))
    spread = fsum((batch - mean_batch) ** 2 for batch, _ in points)
    slope = fsum((batch - mean_batch) * (samples - mean_samples) for batch, samples in points) / spread
    if slope <= 0:
        return Fit(0.0, mean_samples)
    if slope * mean_batch > mean_samples:  # a straight line through nothing: no noise
        squares = fsum(batch * batch for batch, _ in points)
        return Fit(fsum(batch * samples for batch, samples in points) / squares, 0.0)
    return Fit(slope, mean_samples - slope * mean_batch)


@dataclass(frozen=True)
class _Search:
    """For the best batch. All that matters are the moments at which some worker finishes a sample, each with all that
    is done by then; from bounds of the cost on either side follows which of them can be the best."""

    speeds: Sequence[float]
    total: float
    noise_scale: float
    comm_seconds: float
    overlap: bool

    def step(self, computed: float) -> float:
        return max(computed, self.comm_seconds) if self.overlap else computed + self.comm_seconds

    def cost(self, batch: int, computed: float) -> float:
        return (1 + self.noise_scale / batch) * self.step(computed)

    def best(self) -> tuple[int, float]:
        """The best batch and when it is computed."""
        best = guess = self._guess()
        low, high = self._window(self.cost(*best))
        since = low / self.total * BELOW
        if self.overlap:  # what is computed while communicating anyway is free: all of it, or more
            since = self.comm_seconds
            free = samples_by(since, self.speeds)
            best = min([best, (free, since)], key=lambda found: self.cost(*found)) if free else best
        if high - low > MOST_MOMENTS:
            since = max(since, guess[1])
        for moment, batch in islice(_moments(self.speeds, since), MOST_MOMENTS):
            if batch > high:
                break
            if self.cost(batch, moment) < self.cost(*best):
                best = batch, moment
                high = self._window(self.cost(*best))[1]
        return best

    def _guess(self) -> tuple[int, float]:
        """A good batch to begin with: t*(B) is at most (B + N)/V, and with that in its place the cost is least at
        √(B_noise · N), without overlap at √(B_noise · (N + V·t_comm))."""
        lost = len(self.speeds) if self.overlap else len(self.speeds) + self.comm_seconds * self.total
        batch = max(1, floor(min(sqrt(self.noise_scale * lost), LARGEST_BATCH)))
        moment = time_for(batch, self.speeds)
        if self.overlap:
            moment = max(moment, self.comm_seconds)
        return samples_by(moment, self.speeds), moment

    def _window(self, cost: float) -> tuple[float, float]:
        """Batches outside cost more than this: with V = Σv no step is shorter than B/V, so that V·cost is at least
        B + B_noise with overlap and, without, B + B_noise + V·t_comm + B_noise·V·t_comm/B."""
        meanwhile, scaled = self.comm_seconds * self.total, cost * self.total
        leeway = 1 + scaled * 1e-12  # for rounding
        if self.overlap:
            return meanwhile, scaled - self.noise_scale + leeway
        middle = (scaled - self.noise_scale - meanwhile + leeway) / 2
        half = sqrt(max(middle * middle - self.noise_scale * meanwhile, 0.0))
        return max(0.0, middle - half - leeway), middle + half


def _moments(speeds: Sequence[float], since: float) -> Iterator[tuple[float, int]]:
    """Each moment after `since` at which a sample is finished, and how many are finished by then."""
    counts = [_done(since, speed) for speed in speeds]
    done = sum(counts)
    ends = [((count + 1) / speed, speed, count + 1) for count, speed in zip(counts, speeds, strict=True)]
    heapq.heapify(ends)
    while True:
        moment = ends[0][0]
        while ends[0][0] == moment:
            _, speed, count = ends[0]
            heapq.heapreplace(ends, ((count + 1) / speed, speed, count + 1))
            done += 1
        yield moment, done


def _done(seconds: float, speed: float) -> int:
    """How many samples one worker has finished: the largest k with k/speed ≤ seconds, in these very floats, so that
    the k-th is finished at k/speed. The product may be one off."""
    count = int(seconds * speed)
    if (count + 1) / speed <= seconds:
        return count + 1
    return count - 1 if count / speed > seconds else count


def _check(speeds: Sequence[float], noise_scale: float, comm_seconds: float) -> None:
    if not speeds:
        raise PacelineError("A cluster without workers has no limit.", remedy="Give the speed of each worker.")
    wrong = [speed for speed in speeds if not SLOWEST <= speed <= FASTEST]
    if wrong:
        raise PacelineError(
            f"A worker cannot do {wrong[0]:g} samples a second.", remedy="Give what it does alone, above zero."
        )
    if not noise_scale >= 0:
        raise PacelineError(
            f"A noise scale of {noise_scale:g} is not possible.",
            remedy="Give a number of samples, zero or more; a race measures it.",
        )
    if not comm_seconds >= 0 or not isfinite(comm_seconds):
        raise PacelineError(
            f"An all-reduce of {comm_seconds:g} seconds is not possible.", remedy="Give zero seconds or more."
        )
    if comm_seconds * fsum(speeds) > LARGEST_BATCH:
        raise PacelineError(
            f"The workers would compute {comm_seconds * fsum(speeds):.3g} samples during one all-reduce.",
            cause="Probably a unit is wrong.",
            remedy="Speeds are in samples a second, and an all-reduce is in seconds.",
        )
