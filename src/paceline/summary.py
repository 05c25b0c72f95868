"""From the record of a run to the numbers that describe it: the same words in the race, the table and the report.

Everything is worked out from events, so that real and simulated runs are measured by one ruler. No torch: the command
line and the timing-only simulator read summaries too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from paceline.record import Event

ROUNDS_KEPT = 1000
"""Ranks write their files at different moments: news of a round may come long after that of later ones."""


class Interval(NamedTuple):
    """What a rank did from `t` to `end`: `computing`, `communicating` or `idle`."""

    t: float
    end: float
    doing: str


@dataclass(frozen=True)
class WorkerSummary:
    """One worker. `speed` is its samples a second alone, `samples` what it contributed to applied rounds; `computing`,
    `communicating` and `idle` are shares of the window and sum to 1."""

    rank: int
    speed: float
    samples: int
    computing: float
    communicating: float
    idle: float


@dataclass(frozen=True)
class RunSummary:
    """The numbers of a run, named as in the race's JSON; `seconds` is the window that was measured."""

    seconds: float
    share_of_ideal: float
    time_to_target: float | None
    final_metric: float | None
    final_loss: float | None
    rounds: int
    samples_computed: int
    samples_applied: int
    samples_discarded: int
    bytes_sent: int
    workers: list[WorkerSummary]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(
    events: Iterable[Event], *, speeds: Sequence[float], seconds: float | None = None, target: float | None = None
) -> RunSummary:
    """Measure a run.

    share of ideal = samples applied in the window / (sum of solo speeds × length of the window)

    See `window_of` for the window and why it is fair. What was computed before it (by a rank that started earlier than
    the last one) is not counted in the share.

    Args:
        events: the run's events, in any order.
        speeds: of each rank, samples a second alone.
        seconds: the run's time limit; `None` when it ran until its data were used up.
        target: of the held-out metric; `time_to_target` counts from the beginning of the window.

    >>> run = [{"kind": "start", "rank": 0, "t": 0.0},
    ...        {"kind": "compute", "rank": 0, "t": 0.0, "end": 0.9, "samples": 90},
    ...        {"kind": "join", "rank": 0, "t": 0.9, "round": 1, "samples": 90, "bytes": 8},
    ...        {"kind": "wait", "rank": 0, "t": 0.9, "end": 1.0, "round": 1},
    ...        {"kind": "applied", "rank": 0, "t": 1.0, "round": 1, "samples": 90, "own": 90}]
    >>> summary = summarise(run, speeds=[100.0])
    >>> round(summary.share_of_ideal, 3), round(summary.workers[0].communicating, 3)
    (0.9, 0.1)
    """
    of_kind = _by_kind(events)
    start, end = window_of([*of_kind["start"], *of_kind["applied"], *of_kind["step"]], seconds)
    length = max(end - start, 0.0)
    applied = _applied_by_rank(of_kind)
    early = sum(event["samples"] for event in of_kind["compute"] if event["end"] <= start)
    ideal = sum(speeds) * length
    metrics = sorted(of_kind["metric"], key=lambda event: event["t"])
    return RunSummary(
        seconds=length,
        share_of_ideal=max(sum(applied.values()) - early, 0) / ideal if ideal else 0.0,
        time_to_target=_time_to_target(metrics, start, target),
        final_metric=metrics[-1]["metric"] if metrics else None,
        final_loss=metrics[-1]["loss"] if metrics else None,
        rounds=len({event["round"] for kind in ("applied", "step") for event in of_kind[kind] if event["samples"]}),
        samples_computed=sum(event["samples"] for event in of_kind["compute"]),
        samples_applied=sum(applied.values()),
        samples_discarded=sum(event["samples"] for event in of_kind["discard"]),
        bytes_sent=sum(event["bytes"] for kind in ("join", "step") for event in of_kind[kind]),
        workers=_workers(of_kind, speeds, applied, (start, end)),
    )


def window_of(events: Iterable[Event], seconds: float | None = None) -> tuple[float, float]:
    """When the clock of the run began and stopped.

    It begins when the *last* rank has started: before that no collective can end, and how long the processes took to
    come up says nothing about a strategy.

    It stops when the last round was applied, but not before a given time limit. At the limit a run takes no new data
    and finishes what it has begun. To cut at the limit would throw away a round that a blocking strategy has computed
    for the most part (the longer its rounds, the more), and to count that round without its time would be a gift; so
    both its samples and its time count. A run that stands still until the limit has used that time too, hence the
    second half of the rule. Rounds without a sample (by which ranks agree that all are done) are no work and no time.
    """
    of_kind = _by_kind(events)
    start = max((event["t"] for event in of_kind["start"]), default=0.0)
    steps = [*of_kind["applied"], *of_kind["step"]]
    last = max((event["t"] for event in steps if event["samples"]), default=start)
    return start, max(last, start + (seconds or 0.0))


def intervals(events: Iterable[Event]) -> dict[int, list[Interval]]:
    """What each rank did, in order of time. Time that no interval covers is idle.

    A rank that waits for a round is idle until the last rank has joined it (it waits for a *worker*) and communicates
    from then on (it waits for the *network*).
    """
    of_kind = _by_kind(events)
    last_join: dict[int, float] = {}
    for event in of_kind["join"]:
        last_join[event["round"]] = max(event["t"], last_join.get(event["round"], event["t"]))
    found: dict[int, list[Interval]] = defaultdict(list)
    for event in of_kind["compute"]:
        found[event["rank"]].append(Interval(event["t"], event["end"], "computing"))
    for event in of_kind["wait"]:
        t, end = event["t"], event["end"]
        turn = min(max(last_join.get(event["round"], end), t), end)
        if turn > t:
            found[event["rank"]].append(Interval(t, turn, "idle"))
        if end > turn:
            found[event["rank"]].append(Interval(turn, end, "communicating"))
    return {rank: sorted(found[rank]) for rank in sorted(found)}


@dataclass(frozen=True)
class Account:
    """Where the computed samples went. `errors` says what does not add up; it is empty for a sound run."""

    computed: int
    applied: int
    discarded: int
    in_flight: int
    errors: tuple[str, ...]


def account(events: Iterable[Event]) -> Account:
    """Check that nothing was dropped silently or used twice: computed = applied + discarded + in flight at the end.

    >>> account([{"kind": "compute", "rank": 0, "t": 0, "end": 1, "samples": 32}])
    Account(computed=32, applied=0, discarded=0, in_flight=32, errors=())
    """
    of_kind = _by_kind(events)
    lost = {event["rank"] for event in of_kind["lost"]}
    of_kind["applied"] = _of_rounds_that_count(of_kind["applied"], lost)
    computed = _sum_by_rank(of_kind["compute"], "samples")
    applied = _applied_by_rank(of_kind)
    discarded = _sum_by_rank(of_kind["discard"], "samples")
    errors = []
    for rank in sorted({*computed, *applied, *discarded}):
        used = applied[rank] + discarded[rank]
        if used > computed[rank] and rank not in lost:  # the record of one that was killed lacks its last moments
            errors.append(f"rank {rank} computed {computed[rank]} samples, but {used} were applied or discarded")
    errors += _round_errors(of_kind["join"], of_kind["applied"], lost)
    totals = [sum(by_rank.values()) for by_rank in (computed, applied, discarded)]
    return Account(totals[0], totals[1], totals[2], totals[0] - totals[1] - totals[2], tuple(errors))


def _of_rounds_that_count(applications: list[Event], lost: set[int]) -> list[Event]:
    """A rank may be lost just after a round that it alone had: the others have repeated it, with another total."""
    totals = {event["round"]: event["samples"] for event in applications if event["rank"] not in lost}
    return [event for event in applications if totals.get(event["round"], event["samples"]) == event["samples"]]


def _round_errors(joins: list[Event], applications: list[Event], lost: set[int]) -> list[str]:
    errors = []
    joined = {(event["round"], event["rank"]): event["samples"] for event in joins}
    applied: dict[int, dict[int, Event]] = defaultdict(dict)
    for event in applications:
        number, rank = event["round"], event["rank"]
        if rank in applied[number]:
            errors.append(f"rank {rank} applied round {number} twice")
        if event["own"] > joined.get((number, rank), 0):
            errors.append(f"rank {rank} counts {event['own']} own samples in round {number}, more than it joined with")
        applied[number][rank] = event
    everyone = {rank for _, rank in joined}
    for number, by_rank in applied.items():
        own = sum(event["own"] for event in by_rank.values())
        totals = {event["samples"] for event in by_rank.values()}
        complete = by_rank.keys() >= everyone | lost  # who died, or whose record was cut off, has not told its part
        if totals != {own} if complete else own > min(totals):
            errors.append(f"round {number} was a step over {sorted(totals)} samples, but its ranks brought {own}")
    return errors


class Standing:
    """Who waits for whom, kept up to date event by event.

    A micro-batch is recorded when it is done, so a rank that computes while its round travels looks at first like one
    that waits. It is taken at its habit: if it computed during its last round, it is believed to compute, for as long
    as two of its micro-batches may take.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, _RankStanding] = {}
        self._joined: dict[int, set[int]] = defaultdict(set)
        self._now = 0.0

    def see(self, event: Event) -> None:
        rank = self._ranks.setdefault(event["rank"], _RankStanding())
        match event["kind"]:
            case "compute":
                rank.computed_since_join = True
                rank.micro_batch = event["end"] - event["t"]
            case "join":
                self._joined[event["round"]].add(event["rank"])
                rank.round, rank.computed_since_join = event["round"], False
            case "applied" if event["round"] == rank.round:
                rank.round, rank.overlaps = None, rank.computed_since_join
                self._forget_before(event["round"])
            case "start":  # also of a newcomer, in the place of a lost rank
                rank.ended = False
            case "end" | "lost":
                rank.round, rank.ended = None, True
        until: float = event["end"] if "end" in event else event["t"]
        rank.news = max(rank.news, until)
        self._now = max(self._now, rank.news)

    def waiting_for(self) -> dict[int, list[int]]:
        """For each rank that stands still for a round: the ranks that have not joined it (none: for the network)."""
        return {
            number: [
                other
                for other, standing in sorted(self._ranks.items())
                if other not in self._joined[rank.round] and not standing.ended
            ]
            for number, rank in sorted(self._ranks.items())
            if rank.round is not None and self._stands_still(rank)
        }

    def _stands_still(self, rank: _RankStanding) -> bool:
        believed_busy = rank.overlaps and self._now - rank.news <= 2 * rank.micro_batch
        return not rank.computed_since_join and not believed_busy

    def _forget_before(self, round_number: int) -> None:
        for old in [number for number in self._joined if number < round_number - ROUNDS_KEPT]:
            del self._joined[old]


@dataclass
class _RankStanding:
    round: int | None = None
    """The round that it has joined and not yet applied."""
    computed_since_join: bool = False
    overlaps: bool = False
    """Whether it computed while its last round was under way."""
    micro_batch: float = 0.0
    news: float = 0.0
    ended: bool = False


def waiting_for(events: Iterable[Event]) -> dict[int, list[int]]:
    """Who waits for whom after these events (in the order of the record); see `Standing`.

    >>> waiting_for([{"kind": "start", "rank": 1, "t": 0.0},
    ...              {"kind": "join", "rank": 0, "t": 0.5, "round": 1, "samples": 32, "bytes": 8}])
    {0: [1]}
    """
    standing = Standing()
    for event in events:
        standing.see(event)
    return standing.waiting_for()


def _by_kind(events: Iterable[Event]) -> dict[str, list[Event]]:
    of_kind: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        of_kind[event["kind"]].append(event)
    return of_kind


def _applied_by_rank(of_kind: dict[str, list[Event]]) -> dict[int, int]:
    """What each rank brought to rounds of all, and what was used of it in steps of its own or of a server."""
    applied = _sum_by_rank(of_kind["applied"], "own")
    for event in of_kind["step"]:
        applied[event["of"] if "of" in event else event["rank"]] += event["samples"]
    return applied


def _sum_by_rank(events: list[Event], field: str) -> dict[int, int]:
    sums: dict[int, int] = defaultdict(int)
    for event in events:
        sums[event["rank"]] += event[field]
    return sums


def _time_to_target(metrics: list[Event], start: float, target: float | None) -> float | None:
    if target is None:
        return None
    return next((max(event["t"] - start, 0.0) for event in metrics if event["metric"] >= target), None)


def _workers(
    of_kind: dict[str, list[Event]], speeds: Sequence[float], applied: dict[int, int], window: tuple[float, float]
) -> list[WorkerSummary]:
    done = intervals([*of_kind["compute"], *of_kind["join"], *of_kind["wait"]])
    workers = []
    for rank, speed in enumerate(speeds):
        own = done.get(rank, [])
        computing, communicating = _share(own, "computing", window), _share(own, "communicating", window)
        idle = max(1.0 - computing - communicating, 0.0)
        workers.append(WorkerSummary(rank, speed, applied.get(rank, 0), computing, communicating, idle))
    return workers


def _share(done: list[Interval], doing: str, window: tuple[float, float]) -> float:
    start, end = window
    inside = sum(max(min(i.end, end) - max(i.t, start), 0.0) for i in done if i.doing == doing)
    return inside / (end - start) if end > start else 0.0
