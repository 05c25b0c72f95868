"""Which worker of a group may start its next iteration, and how much a gradient counts that comes late.

A worker's clock is the number of iterations that it has finished. It may start the next one iff

    clock ≤ min(clock of the live workers of its group) + bound

so nobody is ever more than bound + 1 finished iterations ahead, and the slowest never waits. One family; its members
differ only in the bound:

    bsp     Fixed(0)              lock-step (Valiant 1990)
    ssp     Fixed(s)              a lead that is fixed (Ho et al. 2013); gssp is this inside every group
    asp     Unbounded()           nobody waits
    dssp    Dynamic(low, high)    a lead that is decided anew again and again (Zhao et al. 2019, arXiv 1908.11848)

dssp [paper]: up to a lead of `low` it is ssp. When the fastest worker is further ahead, it may do r more iterations, r
from 0 to high − low, and then waits until its lead is `low` again. r is where its stop meets a completion of the
slowest, both foreseen from the last interval I of each:

    stop(r) = now + r·I_fastest        completion(k) = next + k·I_slowest        wait(r) = completion(k) − stop(r)

for the first completion(k) that is not before the stop. (More of them pass until the lead is `low` again; the paper
looks at one.) Where we depart from it, [ours]:

- The paper takes the r with the least |completion(k) − stop(r)|. A stop just after a completion then passes for a good
  one, and waits for almost a whole interval. Of equal waits we take the smallest r: gradients are less late.
- An interval begins when a worker is let go, not when it began to wait: else its wait would pass for slowness.
- The paper's server decides again as soon as the r are used up, so that a lead could grow without end. Ours decides
  when the lead is low + 1; so it is never above high + 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf
from typing import Any

from paceline.errors import PacelineError

DIGITS = 9
"""Of an interval. Waits that differ by less are equal: what is left then is the rounding of times."""


@dataclass(frozen=True)
class Fixed:
    """Always the same bound.

    Args:
        iterations: s; how many a worker may be ahead when it starts one more.

    >>> Fixed(3).low, Fixed(3).high
    (3, 3)
    """

    iterations: int

    def __post_init__(self) -> None:
        if self.iterations < 0:
            raise PacelineError(
                f"A staleness bound of {self.iterations} is below 0.",
                cause="Not even the slowest worker could start.",
                remedy="Give 0 for lock-step, or more.",
            )

    @property
    def low(self) -> int:
        """The bound that holds without looking at anybody's speed."""
        return self.iterations

    @property
    def high(self) -> int:
        """The largest that the bound becomes."""
        return self.iterations


@dataclass(frozen=True)
class Unbounded:
    """No bound: nobody ever waits.

    >>> Unbounded().low, Unbounded().high
    (inf, inf)
    """

    @property
    def low(self) -> float:
        """Infinite."""
        return inf

    @property
    def high(self) -> float:
        """Infinite."""
        return inf


@dataclass(frozen=True)
class Dynamic:
    """A bound that follows the speeds of the fastest and the slowest worker.

    Args:
        low: iterations that a worker may always be ahead when it starts one more.
        high: the most that it may be ahead when starting one more makes its next wait shorter.

    >>> Dynamic(3, 15)
    Dynamic(low=3, high=15)
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise PacelineError(
                f"A staleness bound cannot move between {self.low} and {self.high}.",
                cause="The lower end must be 0 or more, and not above the upper.",
                remedy="Give for instance 3 and 15, the range of the paper.",
            )


Bound = Fixed | Unbounded | Dynamic


@dataclass(slots=True)
class _Worker:
    """What is known of a worker. `until` is the clock at which a grant of further iterations ends; `since` is when its
    present iteration began, None while nobody has told a time; `interval` is what its last one took, 0.0 if unknown."""

    clock: int
    until: int = 0
    since: float | None = None
    interval: float = 0.0


class Clocks:
    """The clocks of a group: who may start, and who waits.

    A worker asks before every iteration. If it has to wait, `released` names it as soon as it need not any more. So the
    server calls `released` after everything that `finished` and everybody who has to `leave`, and wakes those it names.

    Args:
        bound: of the family above.

    >>> group = Clocks(Fixed(1))
    >>> for worker in (0, 1):
    ...     group.join(worker)
    >>> group.ask(0), group.ask(1)
    (True, True)
    >>> group.finished(0, at=1.0)
    >>> group.ask(0)
    True
    >>> group.finished(0, at=2.0)
    >>> group.ask(0), group.released()
    (False, [])
    >>> group.finished(1, at=2.5)
    >>> group.released(), group.released()
    ([0], [])
    """

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self._workers: dict[int, _Worker] = {}
        self._counts: Counter[int] = Counter()  # how many workers are at each clock: few clocks, maybe many workers
        self._waiting: dict[int, None] = {}  # in the order of asking
        self._now: float | None = None

    @property
    def workers(self) -> tuple[int, ...]:
        """Who is in the group, in the order of joining."""
        return tuple(self._workers)

    @property
    def slowest(self) -> int:
        """The least clock of the group; 0 if nobody is in it."""
        return min(self._counts, default=0)

    def clock(self, worker: int) -> int:
        """Iterations that a worker has finished, counted from the group's least clock when it joined."""
        return self._of(worker).clock

    def join(self, worker: int) -> None:
        """A worker comes. It starts at the group's least clock: so it makes nobody wait who need not have waited, and
        waits for nobody itself."""
        if worker in self._workers:
            raise PacelineError(
                f"Worker {worker} is in the group already.",
                cause="It joined twice, or was not taken out when it was lost.",
                remedy="Let it leave first.",
            )
        self._enter(worker, _Worker(self.slowest))

    def leave(self, worker: int) -> None:
        """A worker goes, or is dead: nobody waits for it any longer."""
        self._count(self._of(worker).clock, -1)
        del self._workers[worker]
        self._waiting.pop(worker, None)

    def finished(self, worker: int, at: float) -> None:
        """A worker has finished an iteration.

        Args:
            worker: who; one that had to wait cannot have finished.
            at: when, in seconds, by one clock for all workers.
        """
        it = self._of(worker)
        if worker in self._waiting or not self.may_start(worker):
            raise PacelineError(
                f"Worker {worker} has finished an iteration that it was not allowed to start.",
                cause=f"It is at clock {it.clock} and the slowest of its group at {self.slowest}.",
                remedy="A worker must ask before every iteration, and wait until it is told.",
            )
        self._count(it.clock, -1)
        it.clock += 1
        self._count(it.clock, 1)
        if it.since is not None:
            it.interval = max(0.0, at - it.since)
        it.since = at
        self._now = at if self._now is None else max(at, self._now)
        if it.clock == self.slowest + self.bound.low + 1 and it.clock == max(self._counts):
            it.until = it.clock + self._further(at, it.interval)

    def may_start(self, worker: int) -> bool:
        """Whether a worker may start its next iteration now."""
        it = self._of(worker)
        return it.clock <= self.slowest + self.bound.low or it.clock < it.until

    def ask(self, worker: int) -> bool:
        """Whether a worker may start its next iteration now; if not, it waits, and `released` will name it. Who asks
        again while waiting keeps its place."""
        if not self.may_start(worker):
            self._waiting[worker] = None
            return False
        if worker in self._waiting:
            self._let_go(worker)
        return True

    def released(self) -> list[int]:
        """Those who wait and now may start, in the order of asking; each is named once."""
        named = [worker for worker in self._waiting if self.may_start(worker)]
        for worker in named:
            self._let_go(worker)
        return named

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint must keep, in plain values.

        Without who waits: a resumed worker is new and asks again. Without moments: the clock that told them may have
        ended with its process. A `Dynamic` bound stays at its lower end until new ones are known.
        """
        return {"workers": [[worker, it.clock, it.until, it.interval] for worker, it in self._workers.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; what was known before is forgotten.

        >>> group = Clocks(Fixed(1))
        >>> group.load_state_dict({"workers": [[4, 17, 0, 0.25], [5, 16, 0, 0.5]]})
        >>> group.workers, group.clock(4), group.slowest
        ((4, 5), 17, 16)
        """
        self._workers, self._counts, self._waiting, self._now = {}, Counter(), {}, None
        for worker, clock, until, interval in state["workers"]:
            self._enter(worker, _Worker(clock, until, None, interval))

    def _of(self, worker: int) -> _Worker:
        if worker not in self._workers:
            raise PacelineError(
                f"Worker {worker} is not in this group; it has {', '.join(map(str, self._workers)) or 'nobody'}.",
                cause="It has left, was given up as dead, or belongs to another group.",
                remedy="Let it join first.",
            )
        return self._workers[worker]

    def _enter(self, worker: int, it: _Worker) -> None:
        self._workers[worker] = it
        self._count(it.clock, 1)

    def _count(self, clock: int, change: int) -> None:
        self._counts[clock] += change
        if not self._counts[clock]:
            del self._counts[clock]

    def _let_go(self, worker: int) -> None:
        del self._waiting[worker]
        self._workers[worker].since = self._now

    def _further(self, now: float, interval: float) -> int:
        """The r of a worker that has just finished. Of several slowest workers the one counts that is foreseen to end
        last: until then the least clock stays."""
        ends = []
        for it in self._workers.values():
            if it.clock == self.slowest:
                if it.since is None or not it.interval:
                    return 0  # nothing can be foreseen
                ends.append((it.since + it.interval, it.interval))
        completion, slowest_interval = max(ends)
        most = int(self.bound.high - self.bound.low)
        return further_iterations(now, interval, completion, slowest_interval, most)


def further_iterations(now: float, interval: float, completion: float, slowest_interval: float, most: int) -> int:
    """How many more iterations the fastest worker does before it stops, so that it then waits least.

        wait(r) = (completion − now − r·interval) mod slowest_interval,        r = 0 … most

    Args:
        now: when the fastest finished, in seconds.
        interval: what an iteration takes it, in seconds.
        completion: when the slowest ends its present iteration, in seconds; if that is past, it ends whole intervals
            later.
        slowest_interval: what an iteration takes the slowest, in seconds; above 0.
        most: the largest r.

    The slowest ends iterations at 10, 20, … and the fastest is at 4. It then waits for 6, 4, 2, 0 or again 8 s.

    >>> further_iterations(4.0, 2.0, completion=10.0, slowest_interval=10.0, most=4)
    3
    >>> further_iterations(4.0, 2.0, completion=10.0, slowest_interval=10.0, most=2)
    2
    """

    def wait(r: int) -> float:
        part = (completion - now - r * interval) / slowest_interval % 1.0
        return round(part, DIGITS) % 1.0  # a hair less than a whole interval is none: both end together

    return min(range(most + 1), key=wait)


def delayed_learning_rate(learning_rate: float, workers: int, delay: int) -> float:
    """The learning rate of a gradient that comes late: η·n / max(n, delay).

    With n workers at work a gradient is n − 1 updates late on the average; that is the price of asynchrony, and it is
    paid. Only what is later counts less, in proportion. With this rule convergence no longer depends on the largest
    delay (Koloskova et al. 2022, arXiv 2206.08307; Mishchenko et al. 2022, arXiv 2206.07638).

    Args:
        learning_rate: η.
        workers: n, of those whose updates count for the delay.
        delay: updates since the parameters were pulled at which the gradient was taken.

    >>> [delayed_learning_rate(0.1, workers=4, delay=delay) for delay in (0, 3, 4, 8, 40)]
    [0.1, 0.1, 0.1, 0.05, 0.01]
    """
    return learning_rate * workers / max(workers, delay)
