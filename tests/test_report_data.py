"""What the report draws, against what the record says: curves, delays, lanes, pictures, tables, and whole folders."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import cli
from paceline.backends.simulated import simulate
from paceline.errors import PacelineError
from paceline.node import GIVEN_UP
from paceline.record import Event, MemoryRecorder, read_events, write_events
from paceline.report import lanes
from paceline.report.figure import draw_figure
from paceline.report.folder import estimated_speeds, read_folder
from paceline.report.html import render
from paceline.report.markdown import render_markdown
from paceline.report.series import batches, bytes_sent, delays, learning, share_of_ideal
from paceline.simulator.cluster import Cluster
from paceline.strategies import create
from paceline.summary import intervals, summarise

SPEEDS = [1600.0, 1600.0, 800.0, 400.0]


def simulated(strategy: str, seconds: float = 4.0, speeds: tuple[float, ...] = (1, 1, 0.5, 0.25)) -> list[Event]:
    recorder = MemoryRecorder()
    cluster = Cluster.from_speeds(speeds, micro_batch_seconds=0.02)
    simulate(create(strategy), cluster, seconds=seconds, recorder=recorder)
    return recorder.events


def race_of(runs: dict[str, list[Event]], **more: Any) -> dict[str, Any]:
    results = [{"strategy": name, **summarise(events, speeds=SPEEDS).as_dict()} for name, events in runs.items()]
    return {"results": results, **more}


# ---- curves


@pytest.mark.parametrize("strategy", ["all-reduce", "abs-sgd", "ad-psgd"])
def test_the_share_over_time_has_the_mean_of_the_whole(strategy: str) -> None:
    events = simulated(strategy)
    curve = share_of_ideal(events, sum(SPEEDS))
    whole = summarise(events, speeds=SPEEDS).share_of_ideal
    assert np.mean(curve["share"]) == pytest.approx(whole, rel=1e-4)
    assert curve["seconds"] == sorted(curve["seconds"]) and share_of_ideal([], 1.0) == {"seconds": [], "share": []}


def test_learning_has_a_gap_where_a_loss_is_not_a_number() -> None:
    events: list[Event] = [
        {"kind": "metric", "rank": 0, "t": 3.0, "samples": 64, "metric": 0.5, "loss": float("nan")},
        {"kind": "metric", "rank": 0, "t": 2.0, "samples": 32, "metric": 0.25, "loss": 1.5},
    ]
    curve = learning(events, 1.0)
    assert curve == {"seconds": [1.0, 2.0], "samples": [32, 64], "metric": [0.25, 0.5], "loss": [1.5, None]}
    assert "NaN" not in render(race_of({"x": events}), {"x": events}), "which no browser could read"


def test_a_servers_step_is_a_round_of_the_worker_whose_samples_it_used() -> None:
    """Workers 0 and 1, server 2; at the end all average their models, in rounds without a sample."""
    steps = [{"kind": "step", "rank": 2, "t": float(n), "round": n, "samples": 4 + n, "of": n % 2} for n in range(4)]
    ends = [{"kind": "join", "rank": rank, "t": 9.0, "round": 0, "samples": 0, "bytes": 1} for rank in range(3)]
    found = batches([*steps, *ends])
    assert found["rounds"] == [0, 1, 2, 3]
    assert found["curves"] == [["rank 0", [4, None, 6, None]], ["rank 1", [None, 5, None, 7]]]


def test_the_mean_of_models_at_the_end_is_no_first_round() -> None:
    """Ranks that step alone number their own steps; the rounds of all begin at zero again."""
    found = batches(simulated("d-psgd", 1.0))
    assert [set(values) - {None} for _, values in found["curves"]] == [{32}] * 4


def test_batches_are_what_each_rank_brought() -> None:
    events = simulated("balanced", 2.0)
    found = batches(events)
    assert [name for name, _ in found["curves"]] == [f"rank {rank}" for rank in range(4)]
    brought = {(event["rank"], event["round"]): event["samples"] for event in events if event["kind"] == "join"}
    for rank, (_, values) in enumerate(found["curves"]):
        assert values == [brought[rank, number] for number in found["rounds"]]
    assert found["rounds"][-1] == max(number for (_, number), samples in brought.items() if samples)


def test_many_workers_are_told_by_least_median_and_largest() -> None:
    found = batches(simulated("balanced", 1.0, (1.0, 0.5, 0.25) * 4))
    assert [name for name, _ in found["curves"]] == ["largest", "median", "least"]
    for largest, median, least in zip(*(values for _, values in found["curves"]), strict=True):
        assert largest >= median >= least


def test_bytes_end_where_the_summary_does() -> None:
    events = simulated("ad-psgd", 1.0)
    curve = bytes_sent(events, 0.0)
    assert curve["bytes"][-1] == summarise(events, speeds=SPEEDS).bytes_sent and curve["bytes"][0] == 0
    assert curve["bytes"] == sorted(curve["bytes"])


# ---- delays


def test_a_blocking_strategy_is_never_late_and_abs_sgd_is_one_round() -> None:
    assert delays(simulated("all-reduce"))["delays"] == [0]
    found = delays(simulated("abs-sgd"))
    assert found["delays"][-1] == 1 and found["share"][-1] > 0.9
    assert delays(simulated("ad-psgd")) == {"delays": [], "share": [], "width": [1]}, "the record does not tell"


def test_delays_that_the_record_holds_are_taken_from_it() -> None:
    server: list[Event] = [
        {"kind": "step", "rank": 4, "t": t, "round": t, "samples": 10 * (1 + t % 2), "bytes": 8, "delay": t % 2}
        for t in range(8)
    ]
    found = delays([*simulated("ad-psgd", 0.5), *server])
    assert found["delays"] == [0, 1] and found["share"] == pytest.approx([1 / 3, 2 / 3], abs=1e-5)
    server[0]["delay"] = 1000
    found = delays(server)
    assert found["width"] == [32] and found["delays"] == [0, 992] and sum(found["share"]) == pytest.approx(1.0)


def test_what_was_given_up_was_not_used_late() -> None:
    events: list[Event] = [
        {"kind": "compute", "rank": 0, "t": 0.0, "end": 1.0, "samples": 8},
        {"kind": "discard", "rank": 0, "t": 1.0, "samples": 8, "reason": GIVEN_UP},
        {"kind": "compute", "rank": 0, "t": 1.0, "end": 2.0, "samples": 8},
        {"kind": "join", "rank": 0, "t": 2.0, "round": 0, "samples": 8, "bytes": 4},
        {"kind": "applied", "rank": 0, "t": 2.5, "round": 0, "samples": 8, "own": 8},
    ]
    assert delays(events) == {"delays": [0], "share": [1.0], "width": [1]}
    events[1]["reason"] = "another"
    assert delays(events)["delays"] == [0], "and what was dropped for another reason had its delay all the same"


# ---- lanes


def unpacked(text: str, kind: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype=kind)


def lanes_of(events: list[Event], workers: int = 4) -> dict[str, Any]:
    described = [{"rank": rank, "speed": SPEEDS[rank]} for rank in range(workers)]
    return lanes.timelines({"x": events}, {"x": described})["x"]


@pytest.mark.parametrize("strategy", ["all-reduce", "abs-sgd"])
def test_a_page_holds_every_interval_with_its_samples_and_round(strategy: str) -> None:
    events = simulated(strategy)
    found = lanes_of(events)
    assert found["exact"] == found["span"] and found["tick"] == 1e-6
    joins = {(event["rank"], event["round"]): event for event in events if event["kind"] == "join"}
    for rank, lane in enumerate(found["lanes"]):
        done = intervals(events)[rank]
        start, end, kind = unpacked(lane["start"], "<u4"), unpacked(lane["end"], "<u4"), unpacked(lane["kind"], "u1")
        assert start == pytest.approx([1e6 * i.t for i in done], abs=0.6)
        assert end == pytest.approx([1e6 * i.end for i in done], abs=0.6)
        assert [list(lanes.KINDS)[k] for k in kind] == [i.doing for i in done]
        samples, rounds = unpacked(lane["samples"], "<u4"), unpacked(lane["round"], "<u4")
        assert samples.sum() == sum(e["samples"] for e in events if e["kind"] == "compute" and e["rank"] == rank)
        for number in set(rounds[kind == 0]) - {lanes.NO_ROUND}:
            assert samples[(rounds == number) & (kind == 0)].sum() == joins[rank, int(number)]["samples"]
        shares = unpacked(lane["shares"], "u1").reshape(2, -1) / 255
        busy = [sum(i.end - i.t for i in done if i.doing == doing) for doing in ("computing", "communicating")]
        assert shares.mean(axis=1) * found["span"] == pytest.approx(busy, abs=0.01)


def test_beyond_the_budget_there_are_shares_and_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    events = simulated("abs-sgd")
    whole = len(json.dumps(lanes_of(events)))
    monkeypatch.setattr(lanes, "EXACT_BUDGET", 300)
    monkeypatch.setattr(lanes, "BIN_BUDGET", 4096)
    found = lanes_of(events)
    assert 0 < found["exact"] < found["span"] / 2 and found["bins"] == 1024
    kept = sum(len(unpacked(lane[part], "<u4")) for lane in found["lanes"] for part in ("start", "steps"))
    assert 300 <= kept <= 310 and len(json.dumps(found)) < whole / 3


def test_a_run_of_weeks_fits_into_32_bits() -> None:
    events: list[Event] = [
        {"kind": "compute", "rank": 0, "t": 1e6 * n, "end": 1e6 * n + 5e5, "samples": 1} for n in range(4)
    ]
    lane = lanes_of(events, 1)["lanes"][0]
    found = lanes_of(events, 1)
    assert unpacked(lane["start"], "<u4") * found["tick"] == pytest.approx([1e6 * n for n in range(4)], rel=1e-6)


def test_ranks_that_compute_nothing_serve() -> None:
    server: list[Event] = [
        {"kind": "start", "rank": 4, "t": 0.0, "pid": 0},
        {"kind": "step", "rank": 4, "t": 0.5, "round": 0, "samples": 32, "bytes": 8, "delay": 3},
    ]
    found = lanes_of([*simulated("ad-psgd", 1.0), *server])
    assert [lane["name"] for lane in found["lanes"]] == ["rank 0", "rank 1", "rank 2", "rank 3", "server 4"]
    assert len(unpacked(found["lanes"][4]["steps"], "<u4")) == 1


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), min_size=1, max_size=30))
def test_shares_never_exceed_the_whole(computed: list[tuple[float, float]]) -> None:
    events: list[Event] = [
        {"kind": "compute", "rank": 0, "t": t, "end": t + length, "samples": 1} for t, length in computed
    ]
    found = lanes_of(events, 1)
    shares = unpacked(found["lanes"][0]["shares"], "u1") / 255
    covered, until = 0.0, 0.0
    for t, length in sorted(computed):
        covered += max(t + length - max(t, until), 0.0)
        until = max(until, t + length)
    assert shares.max() <= 1 and shares[: found["bins"]].mean() * found["span"] == pytest.approx(covered, abs=0.1)


# ---- pictures and tables


def test_the_picture_is_sound_svg(tmp_path: Path) -> None:
    name = "abs-sgd:delay_cure=none:lr_rule=none:min_micro_batches=2:micro_batches=fixed <&>"
    runs = {"all-reduce": simulated("all-reduce"), name: simulated("abs-sgd"), "nothing": []}
    picture = draw_figure(race_of(runs, target=0.9), runs)
    root = ElementTree.fromstring(picture)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert name in texts and "rank 3" in texts and any(text.startswith("all-reduce, the first") for text in texts)
    assert any("nothing was recorded" in text for text in texts), "no metric"
    assert not re.search(r"nan|inf\b|var\(", picture)


def test_tables_for_papers() -> None:
    runs = {"all-reduce": simulated("all-reduce"), "a|b": simulated("abs-sgd")}
    text = render_markdown(race_of(runs, versions={"paceline": "1", "torch": "2"}, workload="digits"), runs)
    assert text.startswith("# Paceline race: digits\n") and text.endswith("paceline 1, torch 2\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any(row.startswith("| a\\|b ") for row in rows) and "## How far from the limit" not in text
    assert sum(row.startswith("| all-reduce") for row in rows) == 1 + 4 + 1


# ---- folders and the command


def paceline(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_everything_out_of_a_races_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--backend", "simulated", "--workload", "synthetic", "--seconds", "1", "--speeds", "1,0.5"]
    strategies = ["--strategies", "all-reduce,abs-sgd:delay_cure=none"]
    assert paceline(monkeypatch, "race", *options, *strategies, "--out", str(tmp_path)) == 0
    (folder,) = (tmp_path / "race").iterdir()
    page = folder / "report.html"
    written = page.read_text()
    page.unlink()
    files = [tmp_path / name for name in ("figure.svg", "tables.md", "trace.json")]
    options = [f"--png={files[0]}", f"--markdown={files[1]}", f"--trace={files[2]}"]
    assert paceline(monkeypatch, "report", str(folder), *options) == 0
    assert page.read_text() == written, "the record is all that a report needs"
    said = capsys.readouterr().out
    for file in [page, *files]:
        assert str(file) in said and file.stat().st_size > 1000
    metrics = (folder / "abs-sgd_delay_cure=none" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) > 10 and "loss" in json.loads(metrics[-1])


def test_a_runs_folder_has_its_speeds_estimated(tmp_path: Path) -> None:
    events = simulated("abs-sgd")
    write_events(tmp_path / "events", events)
    kept = read_folder(tmp_path)
    assert list(kept.runs) == ["run"] and kept.runs["run"] == read_events(tmp_path / "events")
    assert [worker["speed"] for worker in kept.race["results"][0]["workers"]] == pytest.approx(SPEEDS)
    (tmp_path / "config.toml").write_text('strategy = "abs-sgd"\nseed = 3\n[versions]\ntorch = "2"\n')
    kept = read_folder(tmp_path)
    page = render(kept.race, kept.runs)
    assert "estimated from the run itself" in page and "version: torch" in page and "Paceline run" in page
    (tmp_path / "config.toml").write_text("strategy = ")
    with pytest.raises(PacelineError, match="damaged"):
        read_folder(tmp_path)


def test_servers_are_no_workers_of_a_run(tmp_path: Path) -> None:
    step = {"round": 0, "samples": 32, "bytes": 8}
    for rank, first in ((0, 1), (4, 0)):
        events = [{**event, "rank": event["rank"] + first} for event in simulated("ad-psgd", 1.0)]
        folder = tmp_path / str(rank)
        write_events(folder / "events", [*events, {"kind": "step", "rank": rank, "t": 0.5, **step}])
        kept = read_folder(folder)
        assert [worker["rank"] for worker in kept.race["results"][0]["workers"]] == [n + first for n in range(4)]
        named = re.findall(r'"name":"((?:rank|server) \d)"', render(kept.race, kept.runs))
        assert named.count(f"server {rank}") == 1 and len(named) == 5
    assert estimated_speeds([]) == {}


def test_other_folders_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert paceline(monkeypatch, "report", str(tmp_path)) == 2
    assert "is not the folder of a race or a run" in capsys.readouterr().err
    (tmp_path / "race.json").write_text("{}")
    assert paceline(monkeypatch, "report", str(tmp_path)) == 2
    assert "damaged" in capsys.readouterr().err
    assert paceline(monkeypatch, "report", str(tmp_path), "--png", "x.pdf") == 2
    assert ".svg or .png" in capsys.readouterr().err


def test_a_report_and_a_trace_of_a_simulation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    options = ["--speeds", "1,0.5", "--seconds", "2", "--report", str(page), "--trace", str(trace)]
    assert paceline(monkeypatch, "simulate", *options) == 0
    assert "Paceline simulation" in page.read_text() and len(json.loads(trace.read_text())["traceEvents"]) > 50
    said = capsys.readouterr().out
    assert f"Report: {page}" in said and f"Trace: {trace}" in said
    assert paceline(monkeypatch, "simulate", "--speeds", "1", "--report", str(tmp_path / "none" / "page.html")) == 2


# ---- looks


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_have_contrast_in_light_and_dark() -> None:
    css = (Path(lanes.__file__).parent / "assets" / "report.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    themes = [dict(re.findall(r"--(\w+): (#\w{6})\b", block)) for block in blocks]
    assert len(themes) == 2 and themes[0].keys() == themes[1].keys()
    for theme in themes:
        for ground in ("page", "card"):
            assert contrast(theme["ink"], theme[ground]) >= 7 and contrast(theme["soft"], theme[ground]) >= 4.5
        for curve in (f"s{place}" for place in range(6)):
            assert contrast(theme[curve], theme["card"]) >= 3, curve
        assert contrast(theme["computing"], theme["idle"]) >= 2
        assert contrast(theme["computing"], theme["communicating"]) >= 1.3, "which differ in height too"


def test_a_race_that_was_stopped_says_which_folders_can_be_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_events(tmp_path / "abs-sgd" / "events", simulated("abs-sgd", 1.0))
    assert paceline(monkeypatch, "report", str(tmp_path)) == 2
    told = capsys.readouterr().err
    assert "did not finish" in told and str(tmp_path / "abs-sgd") in told
    assert paceline(monkeypatch, "report", str(tmp_path / "abs-sgd")) == 0
