"""Groups of workers of similar speed, from what an iteration takes each of them.

Inside a group everybody waits, sooner or later, for its slowest worker; between groups nobody waits. With t_i the
seconds of an iteration of worker i (median of some warm-up iterations: compute, push and pull) and N workers in groups
g of n_g, the throughput over that of one group is expected to be

    (Σ_g n_g / max_{i∈g} t_i)  /  (N / max_i t_i)        1.875 for four equal classes of times 1 : 1.5 : 2 : 3

[paper] Workers of similar performance form a group; [code] 4 × 4 of 16. The public text does not say how; so [ours]:

    equal       in order of t, cut into G runs of as equal size as possible
    natural     exact k-means of log t for every G, and the largest G whose groups are all more than 25 % apart
    given       by the user

In one dimension the best groups are runs in order of t, so that dynamic programming finds them: the first j values in G
groups have the least sum of squares D(j, G) = min_i D(i, G − 1) + (sum of squares of values i … j). Of the logarithms,
because factors cost, not differences: 1 s beside 2 s wastes as much of a group as 10 s beside 20 s.

How many groups. A cut pays if its two sides differ in speed: at 25 % the faster side gets back a fifth of its time, and
less is soon eaten by one more server and later gradients. So G is the largest number for which the centres (geometric
means) of neighbouring groups are all more than a factor `APART` apart, and one if no cut is that good. A silhouette
looks only at the shape: to it noise of 5 % may be two groups as well as a factor of four, and a worker alone is worth
nothing. Tried 300 times each with log-normal noise of 5 % on 16 workers: alike workers became one group 300 times, four
classes 1 : 1.5 : 2 : 3 became four groups 295 times (by the best silhouette of the same cuts 294 times).

Regrouping [ours]. A worker moves when, in two looks running and to the same side, it is off its own group's median by
more than a factor `APART` and nearer to another's, in log t. Every move makes Σ_i |log t_i − median of its group|
smaller; so with constant times moves come to an end, and none is undone. A worker alone is its own median and stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, isfinite, log
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError

APART = 1.25
"""A factor between times: what is nearer is worth neither a cut nor a move, which costs a worker a flush of its
residual. One number for both, so that neither undoes what the other did."""
ROUNDING = 1e-9
"""What logarithms may lose, and less than any difference of measured times."""

Times = Mapping[int, float]
Array = NDArray[Any]


@dataclass(frozen=True)
class Grouping:
    """Who is in which group, and why.

    Args:
        groups: the workers of each group; from the fastest group to the slowest where times made them.
        reason: for the user, in words with the numbers that decided.

    >>> four = equal({0: 1.0, 1: 3.0, 2: 1.5, 3: 2.0}, groups=2)
    >>> four.groups, four.group_of(3)
    (((0, 2), (1, 3)), 1)
    """

    groups: tuple[tuple[int, ...], ...]
    reason: str

    def group_of(self, worker: int) -> int:
        """The number of a worker's group, from 0."""
        for number, group in enumerate(self.groups):
            if worker in group:
                return number
        raise PacelineError(
            f"Worker {worker} is in no group.",
            cause=f"The groups are {'/'.join(map(_joined, self.groups))}.",
            remedy="Let it join the nearest group.",
        )

    def throughput_over_ssp(self, times: Times) -> float:
        """Expected throughput over that of one group: (Σ_g n_g / max_{i∈g} t_i) / (N / max_i t_i).

        Args:
            times: seconds of an iteration, of every worker.

        >>> times = {worker: (1.0, 1.5, 2.0, 3.0)[worker // 4] for worker in range(16)}
        >>> equal(times, groups=4).throughput_over_ssp(times), equal(times, groups=1).throughput_over_ssp(times)
        (1.875, 1.0)
        """
        members = [[times[worker] for worker in group] for group in self.groups if group]
        apart = sum(len(each) / max(each) for each in members)
        return apart / (sum(map(len, members)) / max(map(max, members)))


def equal(times: Times, groups: int) -> Grouping:
    """As equal in size as possible: in order of time, cut into runs. The first, the fastest, have one more if it does
    not divide.

    Args:
        times: seconds of an iteration, of every worker.
        groups: G, at most one a worker.

    >>> print(equal({0: 1.1, 1: 3.0, 2: 1.0, 3: 3.1, 4: 1.2}, groups=2).reason)
    2 groups of equal size: workers 0+2+4 (1 to 1.2 s), 1+3 (3 to 3.1 s). Expected: 1.95 times the throughput of one.
    """
    order = _by_time(times)
    if not 1 <= groups <= len(order):
        raise PacelineError(
            f"{len(order)} workers cannot be cut into {groups} groups.",
            cause="Every group has at least one worker.",
            remedy=f"Ask for 1 to {len(order)} groups.",
        )
    size, more = divmod(len(order), groups)
    ends = [number * size + min(number, more) for number in range(groups + 1)]
    return _grouping([order[start:end] for start, end in pairwise(ends)], times, "of equal size")


def natural(times: Times, most: int) -> Grouping:
    """As the times fall: the exact k-means of log t with the largest G whose groups are all more than `APART` apart.

    Args:
        times: seconds of an iteration, of every worker.
        most: the largest G to think of, for instance the servers that there are.

    >>> two = natural({0: 1.0, 1: 4.0, 2: 1.1, 3: 4.1}, most=4)
    >>> print(two.reason)  # doctest: +NORMALIZE_WHITESPACE
    2 groups at least 3.86 times apart: workers 0+2 (1 to 1.1 s), 1+3 (4 to 4.1 s). Expected: 2.36 times the throughput
    of one. 3 would be only 1.1 times apart, and a cut needs more than 1.25.
    >>> natural({0: 1.0, 1: 1.1, 2: 1.05}, most=1).reason
    'One group: workers 0-2 (1 to 1.1 s).'
    """
    order = _by_time(times)
    if most < 1:
        raise PacelineError(f"Workers cannot be in {most} groups.", remedy="Allow 1 group or more.")
    seconds, counts = np.unique([times[worker] for worker in order], return_counts=True)
    ends = [0, *np.cumsum(counts).tolist()]  # equal times are one value, so that no cut parts them
    ways = [
        [order[ends[start] : ends[end]] for start, end in pairwise(cuts)]
        for cuts in k_means_cuts(np.log(seconds), counts, most)
    ]
    apart = [_apart(groups, times) for groups in ways]
    best = max(place for place, each in enumerate(apart) if each > APART)
    tail = ""
    if best + 1 < len(ways):
        tail = f" {best + 2} would be only {apart[best + 1]:.3g} times apart, and a cut needs more than {APART}."
    return _grouping(ways[best], times, f"at least {apart[best]:.3g} times apart", tail)


def given(groups: str | Iterable[Iterable[int]], workers: Iterable[int]) -> Grouping:
    """The user's own groups, checked: every worker is in one of them.

    Args:
        groups: lists of workers, or a word: groups parted by `/`, in a group workers or ranges of them joined by `+`.
        workers: all there are.

    >>> given("0-2+5/3+4", range(6)).groups
    ((0, 1, 2, 5), (3, 4))
    >>> given([[2, 0], [1]], range(3)).reason
    'As given: workers 0+2, 1.'
    """
    listed = _read(groups) if isinstance(groups, str) else [list(group) for group in groups]
    found, everybody = Counter(worker for group in listed for worker in group), set(workers)
    wrong = {
        "named twice": [worker for worker, often in found.items() if often > 1],
        "in no group": everybody - set(found),
        "not in this run": set(found) - everybody,
    }
    said = [f"{what}: {', '.join(map(str, sorted(who)))}" for what, who in wrong.items() if who]
    if said or not all(listed):
        raise PacelineError(
            f"Not every worker is in one group; {'; '.join(said) or 'and a group is empty'}.",
            where=f"groups {'/'.join(map(_joined, listed))}",
            remedy="Name each worker in one group, as in 0-3/4+6/5+7.",
        )
    checked = tuple(tuple(sorted(group)) for group in listed)
    return Grouping(checked, f"As given: workers {', '.join(map(_joined, checked))}.")


@dataclass(frozen=True)
class Move:
    """A worker that changes its group.

    Args:
        worker: who.
        source, target: from which group to which, by number.
        side: `slower` or `faster` than its old group.
        gain: how much nearer the new one's median is, in log time.
        why: for the user, in words.
    """

    worker: int
    source: int
    target: int
    side: str
    gain: float
    why: str


@dataclass(frozen=True)
class Look:
    """What a look at the times has led to.

    Args:
        grouping: after the moves; the old one if there are none.
        moves: in the order in which they were decided.
        suspects: who is off now, and whether it is `slower` or `faster`; for the next look, and for a checkpoint.
    """

    grouping: Grouping
    moves: tuple[Move, ...]
    suspects: tuple[tuple[int, str], ...]


def regroup(grouping: Grouping, times: Times, suspects: Iterable[tuple[int, str]] = ()) -> Look:
    """Who moves where, after a look at the present times.

    One move after the other, who gains most first, each with the medians that the last one left: a worker whose
    neighbour turned slow is not moved away from it, because the neighbour goes first.

    Args:
        grouping: the present groups.
        times: seconds of an iteration. Who has none (yet, or any more) is not looked at.
        suspects: of the last look.

    >>> first = regroup(equal({0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}, 2), {0: 1.0, 1: 3.0, 2: 3.0, 3: 3.0})
    >>> first.moves, first.suspects
    ((), ((1, 'slower'),))
    >>> second = regroup(first.grouping, {0: 1.0, 1: 3.0, 2: 3.0, 3: 3.0}, first.suspects)
    >>> second.grouping.groups, second.suspects
    (((0,), (1, 2, 3)), ())
    >>> print(second.moves[0].why)  # doctest: +NORMALIZE_WHITESPACE
    Worker 1 takes 3 s an iteration, 1.73 times the median of group 0 (1.73 s), and is nearer to that of group 1 (3 s),
    in two looks running.
    """
    _check(times)
    groups = [list(group) for group in grouping.groups]
    sides = dict(suspects)
    moves: list[Move] = []
    while ready := [move for move in _off(groups, times) if sides.get(move.worker) == move.side]:
        move = max(ready, key=lambda each: (each.gain, -each.worker))
        groups[move.source].remove(move.worker)
        groups[move.target].append(move.worker)
        moves.append(move)
        del sides[move.worker]
    if moves:
        after = tuple(tuple(sorted(group)) for group in groups)
        grouping = Grouping(after, " ".join(move.why for move in moves))
    return Look(grouping, tuple(moves), tuple((each.worker, each.side) for each in _off(groups, times)))


def nearest(times_of_groups: Sequence[Sequence[float]], time: float) -> int:
    """The group whose median is nearest to a time, in log; of two that are equally near the slower, because there the
    worker makes nobody wait.

    Args:
        times_of_groups: seconds of an iteration of the workers of each group; none for a group that is no more.
        time: seconds of an iteration of the worker that looks for a group.

    >>> nearest([[1.0, 1.1], [], [3.0, 2.9, 8.0]], time=2.0)
    2
    >>> nearest([[1.0], [4.0]], time=2.0)
    1
    """
    if not any(times_of_groups):
        raise PacelineError("There is no group to join.", remedy="Start the run again from its last checkpoint.")
    return _nearest([_log_median(each) for each in times_of_groups], log(time))


def k_means_cuts(points: Array, weights: Array, most: int) -> list[list[int]]:
    """The cuts that make the sum of squared distances to the groups' means least, for every number of groups.

    Args:
        points: in order, no two alike.
        weights: how often each is there.
        most: the largest number of groups; there are never more than points.

    >>> k_means_cuts(np.array([0.0, 1.0, 5.0, 6.0, 20.0]), np.ones(5), most=3)
    [[0, 5], [0, 4, 5], [0, 2, 4, 5]]
    """
    size = len(points)
    points = points - np.average(points, weights=weights)  # so that squares lose little when they are subtracted
    count, total, squares = (np.concatenate([[0.0], np.cumsum(weights * points**power)]) for power in (0, 1, 2))

    def spread(start: Array | int, end: Array | int) -> Array:
        inside: Array = squares[end] - squares[start] - (total[end] - total[start]) ** 2 / (count[end] - count[start])
        return inside

    ways = [[0, size]]
    least = np.concatenate([[inf], spread(0, np.arange(1, size + 1))])
    last_cuts: list[Array] = []  # for each further group: where the last cut of the first j points is
    for groups in range(2, min(most, size) + 1):
        so_far, least = least, np.full(size + 1, inf)
        last_cuts.append(np.zeros(size + 1, dtype=int))
        for end in range(groups, size + 1):
            starts = np.arange(groups - 1, end)
            costs = so_far[starts] + spread(starts, end)
            place = int(costs.argmin())
            least[end], last_cuts[-1][end] = costs[place], starts[place]
        cuts = [size]
        for last in reversed(last_cuts):
            cuts.append(int(last[cuts[-1]]))
        ways.append([0, *reversed(cuts)])
    return ways


def _off(groups: Sequence[Sequence[int]], times: Times) -> list[Move]:
    """Who would move after a second look like this."""
    known = [[worker for worker in group if worker in times] for group in groups]
    medians = [_log_median([times[worker] for worker in group]) for group in known]
    found = []
    for source, own in enumerate(medians):
        for worker in sorted(known[source]):
            place = log(times[worker])
            target = _nearest(medians, place)
            other = medians[target]
            gain = abs(place - own) - abs(place - other)
            if abs(place - own) > log(APART) + ROUNDING and gain > ROUNDING:
                why = (
                    f"Worker {worker} takes {times[worker]:.3g} s an iteration, {exp(place - own):.3g} times the "
                    f"median of group {source} ({exp(own):.3g} s), and is nearer to that of group {target} "
                    f"({exp(other):.3g} s), in two looks running."
                )
                found.append(Move(worker, source, target, "slower" if other > own else "faster", gain, why))
    return found


def _nearest(medians: Sequence[float], place: float) -> int:
    """Infinite medians are those of empty groups."""
    known = [number for number, each in enumerate(medians) if isfinite(each)]
    return min(known, key=lambda number: (round(abs(medians[number] - place) / ROUNDING), -medians[number]))


def _log_median(seconds: Sequence[float]) -> float:
    return median(map(log, seconds)) if seconds else inf


def _by_time(times: Times) -> list[int]:
    """The workers, the fastest first."""
    _check(times)
    if not times:
        raise PacelineError("There is no worker to group.", remedy="Group when workers have joined.")
    return sorted(times, key=lambda worker: (times[worker], worker))


def _check(times: Times) -> None:
    for worker, time in times.items():
        if not (isfinite(time) and time > 0):
            raise PacelineError(
                f"Worker {worker} cannot take {time} s an iteration.",
                cause="It has finished none yet, or the clock went back.",
                remedy="Group those who have finished one.",
            )


def _apart(groups: Sequence[Sequence[int]], times: Times) -> float:
    """The least factor between the centres of neighbours; infinite for one group."""
    centres = [fmean(log(times[worker]) for worker in group) for group in groups]
    return min((exp(slow - fast) for fast, slow in pairwise(centres)), default=inf)


def _grouping(groups: Sequence[Sequence[int]], times: Times, what: str, tail: str = "") -> Grouping:
    members = tuple(tuple(sorted(group)) for group in groups)
    spans = [(min(seconds), max(seconds)) for seconds in ([times[worker] for worker in group] for group in groups)]
    said = [f"{low:.3g} s" if low == high else f"{low:.3g} to {high:.3g} s" for low, high in spans]
    shown = ", ".join(f"{_joined(group)} ({span})" for group, span in zip(members, said, strict=True))
    if len(groups) == 1:
        return Grouping(members, f"One group: workers {shown}.{tail}")
    gain = Grouping(members, "").throughput_over_ssp(times)
    expected = f"Expected: {gain:.3g} times the throughput of one."
    return Grouping(members, f"{len(groups)} groups {what}: workers {shown}. {expected}{tail}")


def _joined(group: Iterable[int]) -> str:
    """Workers as `given` reads them: 0-2+5."""
    runs: list[list[int]] = []
    for worker in sorted(group):
        if runs and worker == runs[-1][-1] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else "+".join(map(str, run)) for run in runs)


def _read(text: str) -> list[list[int]]:
    try:
        return [[worker for part in group.split("+") for worker in _range(part)] for group in text.split("/")]
    except ValueError:
        raise PacelineError(
            f"{text!r} is not a list of groups.", remedy="Write groups as in 0-3/4+6/5+7: 0 to 3, 4 and 6, 5 and 7."
        ) from None


def _range(text: str) -> range:
    first, dash, last = text.partition("-")
    return range(int(first), int(last if dash else first) + 1)
