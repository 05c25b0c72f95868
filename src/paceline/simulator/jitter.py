"""How a device's micro-batch times vary: factors of mean 1, so that a device's mean speed is what its owner says.

Each kind yields an endless stream of blocks of factors, from a random generator that belongs to one rank alone: one
call into numpy serves many micro-batches.
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from math import log1p, sqrt
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from paceline.rules.chance import chance
from paceline.simulator.checks import WrongValueError, number

Floats = NDArray[np.float64]
BLOCK = 128  # a block of Python floats is 4 kB: 40 MB for 10,000 ranks


def stream(seed: int, rank: int) -> Generator:
    """The random numbers of one rank: what happens to the others cannot change them."""
    return np.random.default_rng((seed, rank))


class Jitter(ABC):
    """A distribution of factors with mean 1 on the time of a micro-batch."""

    kind: ClassVar[str]

    @abstractmethod
    def blocks(self, seed: int, rank: int) -> Iterator[Floats]:
        """An endless stream of factors for one rank, in blocks."""


@dataclass(frozen=True)
class Constant(Jitter):
    """No jitter."""

    kind: ClassVar[str] = "constant"

    def blocks(self, seed: int, rank: int) -> Iterator[Floats]:
        return repeat(np.ones(BLOCK))


@dataclass(frozen=True)
class LogNormal(Jitter):
    """exp(σZ − σ²/2): many small causes that multiply. The usual model of a healthy machine (σ about 0.05 to 0.3)."""

    sigma: float
    kind: ClassVar[str] = "log-normal"

    def __post_init__(self) -> None:
        number(self, "sigma", least=0.0)

    def blocks(self, seed: int, rank: int) -> Iterator[Floats]:
        random = stream(seed, rank)
        while True:
            yield random.lognormal(-0.5 * self.sigma**2, self.sigma, BLOCK)


@dataclass(frozen=True)
class Exponential(Jitter):
    """The memoryless extreme: the model of most proofs about asynchronous methods."""

    kind: ClassVar[str] = "exponential"

    def blocks(self, seed: int, rank: int) -> Iterator[Floats]:
        random = stream(seed, rank)
        while True:
            yield random.standard_exponential(BLOCK)


@dataclass(frozen=True)
class Pareto(Jitter):
    """A heavy tail: mostly a little faster than the mean, and now and then very slow.

    Args:
        shape: above 1, or there is no mean; the smaller, the heavier the tail (2 and less: infinite variance).
    """

    shape: float
    kind: ClassVar[str] = "pareto"

    def __post_init__(self) -> None:
        number(self, "shape", above=1.0)

    def blocks(self, seed: int, rank: int) -> Iterator[Floats]:
        random = stream(seed, rank)
        least = (self.shape - 1) / self.shape
        while True:
            yield (1 + random.pareto(self.shape, BLOCK)) * least


@dataclass(frozen=True)
class SlowDowns(Jitter):
    """Now and then a device is slow for one micro-batch's worth of work: a neighbour, a garbage collection, a throttle.

    Args:
        factor: so many times slower than else.
        probability: of each micro-batch's.
    """

    factor: float
    probability: float
    kind: ClassVar[str] = "slow-downs"

    def __post_init__(self) -> None:
        number(self, "factor", least=1.0)
        number(self, "probability", least=0.0)
        if self.probability > 1:
            raise WrongValueError("probability", f"probability = {self.probability} is not possible: it is at most 1.")

    def blocks(self, seed: int, rank: int) -> Iterator[Floats]:
        random = stream(seed, rank)
        mean = 1 + (self.factor - 1) * self.probability
        while True:
            yield np.where(random.random(BLOCK) < self.probability, self.factor, 1.0) / mean


@dataclass(frozen=True)
class SlowRounds(Jitter):
    """Now and then a device is slow for a whole round, whatever the strategy makes of that: few micro-batches or all of
    a batch. Of mean 1 over rounds.

    Args:
        factor: so many times slower than else.
        probability: of each round's.
    """

    factor: float
    probability: float
    kind: ClassVar[str] = "slow-rounds"

    def __post_init__(self) -> None:
        SlowDowns(self.factor, self.probability)  # the same can be wrong

    def blocks(self, seed: int, rank: int) -> Iterator[Floats]:
        return repeat(np.full(BLOCK, 1 / (1 + (self.factor - 1) * self.probability)))

    def in_round(self, seed: int, rank: int, round_number: int) -> float:
        return self.factor if chance("slow-rounds", seed, rank, round_number) < self.probability else 1.0


@dataclass(frozen=True)
class Drift(Jitter):
    """Slow wandering, AR(1): after a slow micro-batch the next is probably slow too, as on real machines.

        z_t = φ z_{t−1} + √(1−φ²) ε,      factor = exp(s z_t − s²/2)

    s and φ are chosen so that the *factors* have the spread and the correlation asked for:
    s² = ln(1 + spread²) and φ = ln(1 + correlation·spread²) / s².

    Args:
        correlation: between one micro-batch and the next (0 to below 1; about 0.7 on Alibaba's traces).
        spread: standard deviation of the factors.
    """

    correlation: float
    spread: float
    kind: ClassVar[str] = "drift"

    def __post_init__(self) -> None:
        number(self, "correlation", least=0.0)
        number(self, "spread", above=0.0)
        if self.correlation >= 1:
            said = f"correlation = {self.correlation} is not possible: it must be below 1."
            raise WrongValueError("correlation", said)

    def blocks(self, seed: int, rank: int) -> Iterator[Floats]:
        random = stream(seed, rank)
        variance = log1p(self.spread**2)
        keep, scale = log1p(self.correlation * self.spread**2) / variance, sqrt(variance)
        fresh = sqrt(1 - keep**2)
        state = float(random.standard_normal())
        while True:
            states = []
            for noise in random.standard_normal(BLOCK).tolist():
                state = keep * state + fresh * noise
                states.append(state)
            yield np.exp(scale * np.array(states) - 0.5 * variance)


@dataclass(frozen=True)
class Trace(Jitter):
    """Recorded times of real micro-batches: rank i replays worker i's, from a random place on and in a loop.

    The place is the same for all workers of the job, because their times go up and down together. Each worker's times
    are divided by their own mean; `Cluster.from_trace` takes the workers' speeds from the file too.

    Args:
        file: csv with the columns `worker` and `batch_time_norm` (any unit), a row for each micro-batch.
    """

    file: str
    kind: ClassVar[str] = "trace"

    def __post_init__(self) -> None:
        read_trace(self.file)

    def blocks(self, seed: int, rank: int) -> Iterator[Floats]:
        workers = read_trace(self.file)
        times = np.array(workers[rank % len(workers)])
        place = stream(seed, rank // len(workers)).random()
        return repeat(np.roll(times / times.mean(), -int(place * len(times))))


@lru_cache(maxsize=8)
def read_trace(file: str) -> tuple[tuple[float, ...], ...]:
    """The times of each worker of a recorded job, in the order of the workers' numbers."""
    where = f"the trace {file}"
    try:
        with Path(file).open(newline="", encoding="utf-8") as stream:
            rows = csv.DictReader(stream)
            missing = {"worker", "batch_time_norm"} - set(rows.fieldnames or ())
            if missing:
                raise WrongValueError("file", f"{where} has no column {' and no column '.join(sorted(missing))}.")
            return _times_by_worker(rows, where)
    except (OSError, UnicodeDecodeError) as error:
        raise WrongValueError(
            "file", f"{where} cannot be read: {error}.", "Give a csv file with the columns worker and batch_time_norm."
        ) from error


def _times_by_worker(rows: csv.DictReader[str], where: str) -> tuple[tuple[float, ...], ...]:
    times: dict[int, list[float]] = {}
    for row in rows:
        try:
            worker, time = int(row["worker"]), float(row["batch_time_norm"])
        except (TypeError, ValueError):
            worker, time = 0, 0.0
        if not 0 < time < float("inf"):
            raise WrongValueError("file", f"line {rows.line_num} of {where} has no worker number and time above zero.")
        times.setdefault(worker, []).append(time)
    if not times:
        raise WrongValueError("file", f"{where} has no rows.")
    return tuple(tuple(times[worker]) for worker in sorted(times))


KINDS: dict[str, type[Jitter]] = {
    each.kind: each for each in (Constant, LogNormal, Exponential, Pareto, SlowDowns, SlowRounds, Drift, Trace)
}
