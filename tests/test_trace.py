"""The trace: entries are what the format allows, tracks do not overlap, and arrows go where rounds went."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.simulated import simulate
from paceline.record import Event, MemoryRecorder
from paceline.report.trace import trace_events, write_trace
from paceline.simulator.cluster import Cluster
from paceline.strategies import create
from paceline.summary import intervals

# What the format demands of each kind of entry, and what it allows beyond: the name and the type of every field.
NEEDED: dict[str, dict[str, type]] = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "pid": int, "tid": int, "ts": int, "dur": int},
    "i": {"name": str, "pid": int, "tid": int, "ts": int, "s": str},
}
ALLOWED: dict[str, dict[str, type]] = {
    "M": {},
    "X": {"args": dict, "cname": str, "bind_id": str, "flow_in": bool, "flow_out": bool},
    "i": {"args": dict},
}


def check(entries: list[dict[str, Any]]) -> None:
    """The strict schema."""
    for entry in entries:
        kind = entry["ph"]
        needed, allowed = NEEDED[kind], NEEDED[kind] | ALLOWED[kind] | {"ph": str}
        assert needed.keys() <= entry.keys() <= allowed.keys(), entry
        assert all(type(value) is allowed[name] for name, value in entry.items()), entry
        assert entry.get("ts", 0) >= 0 and entry.get("dur", 0) >= 0 and entry["pid"] > 0 and entry["tid"] > 0
    named = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in entries if e["ph"] != "M"} <= named
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X" and entry["dur"]:
            tracks[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    for slices in tracks.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(slices))
    outgoing = {e["bind_id"]: e["ts"] for e in entries if e.get("flow_out")}
    for entry in entries:
        if entry.get("flow_in"):
            assert outgoing[entry["bind_id"]] <= entry["ts"], "an arrow never goes back in time"


def simulated(strategy: str, seconds: float = 2.0) -> list[Event]:
    recorder = MemoryRecorder()
    cluster = Cluster.from_speeds([1, 1, 0.5, 0.25], micro_batch_seconds=0.02)
    simulate(create(strategy), cluster, seconds=seconds, recorder=recorder)
    return recorder.events


@pytest.mark.parametrize("strategy", ["all-reduce", "abs-sgd", "local-sgd", "ad-psgd"])
def test_every_entry_is_what_the_format_allows(strategy: str) -> None:
    events = simulated(strategy)
    entries = list(trace_events(events))
    check(entries)
    slices = [entry for entry in entries if entry["ph"] == "X"]
    assert len([e for e in slices if e["name"] == "computing"]) == sum(e["kind"] == "compute" for e in events)
    assert len([e for e in slices if e["name"] == "step"]) == sum(e["kind"] in ("applied", "step") for e in events)
    computing = sum(e["dur"] for e in slices if e["name"] == "computing")
    exact = sum(i.end - i.t for lane in intervals(events).values() for i in lane if i.doing == "computing")
    assert computing == pytest.approx(1e6 * exact, rel=1e-4)


def test_arrows_go_from_the_last_rank_to_every_step() -> None:
    entries = list(trace_events(simulated("all-reduce")))
    arrows = defaultdict(list)
    for entry in entries:
        if "bind_id" in entry:
            arrows[entry["bind_id"]].append(entry)
    for ends in arrows.values():
        assert [end["tid"] for end in ends if end.get("flow_out")] == [4], "rank 3 is the slowest"
        assert sorted(end["tid"] for end in ends if end.get("flow_in")) == [1, 2, 3, 4]


def test_a_race_has_a_process_for_each_strategy(tmp_path: Path) -> None:
    runs = {name: simulated(name) for name in ("all-reduce", "abs-sgd")}
    for name in ("trace.json", "new/trace.json.gz"):
        write_trace(tmp_path / name, runs)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert json.loads(gzip.decompress((tmp_path / "new/trace.json.gz").read_bytes())) == trace
    check(trace["traceEvents"])
    named = [entry["args"]["name"] for entry in trace["traceEvents"] if entry["name"] == "process_name"]
    assert named == ["all-reduce", "abs-sgd"] and trace["displayTimeUnit"] == "ms"
    assert len({entry["bind_id"] for entry in trace["traceEvents"] if entry.get("flow_out")}) == sum(
        len({event["round"] for event in events if event["kind"] == "join"}) for events in runs.values()
    ), "no two rounds share an arrow"


def test_a_server_a_warning_and_nothing_at_all() -> None:
    check(list(trace_events([])))
    server: list[Event] = [
        {"kind": "start", "rank": 4, "t": 0.0, "pid": 1},
        {"kind": "step", "rank": 4, "t": 0.5, "round": 0, "samples": 32, "bytes": 8, "delay": 3},
        {"kind": "warning", "rank": 4, "t": 0.5, "text": "odd"},
    ]
    entries = list(trace_events(server))
    check(entries)
    step = next(entry for entry in entries if entry["name"] == "step")
    assert step["args"]["delay"] == 3 and step["tid"] == 5
    assert entries[1]["args"] == {"name": "rank 4"} and entries[-1]["args"] == {"text": "odd"}


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 10), st.floats(0, 3)), max_size=20))
def test_slices_never_overlap_even_if_the_record_does(computed: list[tuple[int, float, float]]) -> None:
    events: list[Event] = [
        {"kind": "compute", "rank": rank, "t": t, "end": t + length, "samples": 1} for rank, t, length in computed
    ]
    check(list(trace_events(events)))
