"""The record as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: one track a worker.

The format is the JSON of Chrome's trace events: slices for what a worker does, slices of no length where it makes a
step or is the last to join a round, and flows (arrows) from that rank to every rank's step with the round, which is how
a sync travels. A race has one process a strategy. Times are microseconds, as the format wants them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from paceline.record import Event
from paceline.summary import intervals

COLOURS = {"computing": "thread_state_running", "communicating": "thread_state_iowait", "idle": "grey"}
"""Names of chrome://tracing's own palette; Perfetto chooses by the slice's name."""
TOLD: tuple[str, ...] = ("round", "samples", "own", "bytes", "delay")
"""Of a step."""
FIRST_TRACK = 1  # to Perfetto track 0 is the kernel's idle thread, which belongs to no process


def write_trace(path: Path | str, runs: Mapping[str, Sequence[Event]]) -> None:
    """Write a trace of one or several runs.

    Args:
        path: of the file. A name that ends in `.gz` is packed; both viewers open it so.
        runs: the events of each run, by name.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    packed = target.suffix == ".gz"
    with cast("IO[str]", gzip.open(target, "wt") if packed else target.open("w", encoding="utf-8")) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for process, (name, events) in enumerate(runs.items(), start=1):
            for entry in trace_events(events, process=process, name=name):
                file.write(separator + json.dumps(entry, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")


def trace_events(events: Iterable[Event], *, process: int = 1, name: str = "run") -> Iterator[dict[str, Any]]:
    """The entries of one run, in the order of the tracks.

    >>> run = [{"kind": "compute", "rank": 0, "t": 0.0, "end": 0.5, "samples": 32},
    ...        {"kind": "join", "rank": 0, "t": 0.5, "round": 1, "samples": 32, "bytes": 8},
    ...        {"kind": "applied", "rank": 0, "t": 0.75, "round": 1, "samples": 32, "own": 32}]
    >>> for entry in trace_events(run):
    ...     print(entry["ph"], entry["name"], entry.get("ts"), entry.get("dur"))
    M process_name None None
    M thread_name None None
    M thread_sort_index None None
    X computing 0 500000
    X join 500000 0
    X step 750000 0
    """
    events = list(events)
    yield _named("process_name", process, 0, name=name)
    for rank in sorted({event["rank"] for event in events}):
        yield _named("thread_name", process, rank, name=f"rank {rank}")
        yield _named("thread_sort_index", process, rank, sort_index=rank)
    yield from _slices(events, process)
    yield from _last_joins(events, process)
    yield from _steps(events, process)


def _slices(events: Sequence[Event], process: int) -> Iterator[dict[str, Any]]:
    samples = {(e["rank"], e["t"], e["end"]): e["samples"] for e in events if e["kind"] == "compute"}
    for rank, done in intervals(events).items():
        over = 0
        for interval in done:
            # Slices of a track must not overlap: a viewer would drop the later one.
            began, ended = max(_microseconds(interval.t), over), _microseconds(interval.end)
            if ended > began:
                told = {"samples": samples[rank, interval.t, interval.end]} if interval.doing == "computing" else {}
                entry = _entry("X", interval.doing, process, rank, began, args=told)
                yield entry | {"dur": ended - began, "cname": COLOURS[interval.doing]}
                over = ended


def _last_joins(events: Sequence[Event], process: int) -> Iterator[dict[str, Any]]:
    """Where each round could begin to travel: here its arrows start."""
    last: dict[int, Event] = {}
    for event in events:
        if event["kind"] == "join" and event["t"] >= last.get(event["round"], event)["t"]:
            last[event["round"]] = event
    for number, join in last.items():
        told = {key: join[key] for key in ("round", "samples", "bytes")}
        entry = _entry("X", "join", process, join["rank"], _microseconds(join["t"]), args=told)
        yield entry | {"dur": 0, "bind_id": _arrows(process, number), "flow_out": True}


def _steps(events: Sequence[Event], process: int) -> Iterator[dict[str, Any]]:
    """A rank's steps, at which the arrows end, and what the user was told."""
    for event in events:
        rank, t = event["rank"], _microseconds(event["t"])
        if event["kind"] in ("applied", "step"):
            told = {key: event[key] for key in TOLD if key in event}
            entry = _entry("X", "step", process, rank, t, args=told) | {"dur": 0}
            of_all = event["kind"] == "applied"
            yield entry | {"bind_id": _arrows(process, event["round"]), "flow_in": True} if of_all else entry
        elif event["kind"] == "warning":
            yield _entry("i", "warning", process, rank, t, args={"text": str(event["text"])}) | {"s": "t"}


def _arrows(process: int, round_number: int) -> str:
    """The name that the arrows of a round have in common."""
    return hex(process * 2**32 + round_number)


def _entry(
    kind: str, name: str, process: int, rank: int, t: int, *, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    entry = {"ph": kind, "name": name, "pid": process, "tid": rank + FIRST_TRACK, "ts": t}
    return entry | {"args": args} if args else entry


def _named(what: str, process: int, rank: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": rank + FIRST_TRACK, "args": args}


def _microseconds(seconds: float) -> int:
    """Whole ones: Perfetto reckons in nanoseconds, and of fractions it cuts off so much that neighbours overlap."""
    return round(seconds * 1e6)
