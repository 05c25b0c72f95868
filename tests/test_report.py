"""What people see: the table, the live display and the page, from whole, partial and hostile records."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from paceline.record import Event, FileRecorder, MemoryRecorder
from paceline.report.charts import Curve, line_chart, ticks
from paceline.report.html import render, write_report
from paceline.report.progress import Progress, RunView
from paceline.report.static_lanes import common_span
from paceline.report.table import race_table, race_text, show_race
from paceline.summary import summarise

SPEEDS = [800.0, 800.0, 400.0, 200.0]


def run(seconds: float, network: float = 0.004) -> list[Event]:
    """A blocking run of four workers with micro-batches of 32."""
    recorder, now, number = MemoryRecorder(), 0.0, 0
    for rank in range(4):
        recorder.write("start", rank, 0.0, pid=rank)
    while now < seconds:
        ends = [now + 32 / speed for speed in SPEEDS]
        over = max(ends) + network
        for rank, end in enumerate(ends):
            recorder.write("compute", rank, now, end=end, samples=32)
            recorder.write("join", rank, end, round=number, samples=32, bytes=4000)
            recorder.write("wait", rank, end, end=over, round=number)
            recorder.write("applied", rank, over, round=number, samples=128, own=32)
        now, number = over, number + 1
        recorder.write("metric", 0, now, samples=128 * number, metric=1 - 1 / (1 + number), loss=1 / number)
    return recorder.events


def race(events: dict[str, list[Event]], **more: Any) -> dict[str, Any]:
    results = [
        {"strategy": name, "backend": "simulated", **summarise(each, speeds=SPEEDS, target=0.9).as_dict()}
        for name, each in events.items()
    ]
    return {"results": results, "ideal_samples_per_second": 2200.0, "speeds": [1, 1, 0.5, 0.25], "seed": 0, **more}


@pytest.fixture(scope="module")
def events() -> dict[str, list[Event]]:
    return {"all-reduce": run(20.0), "other": run(2.0)}


# ---- the table


def test_plain_text_where_there_is_no_terminal(events: dict[str, list[Event]]) -> None:
    file = io.StringIO()
    show_race(race(events), Console(file=file, width=20))  # too narrow: plain text must not be cut
    lines = file.getvalue().splitlines()
    assert lines[0].split()[:2] == ["strategy", "share"] and len({len(line) for line in lines}) == 1
    assert "35.4 %" in lines[1] or "35.5 %" in lines[1]


def test_a_table_on_a_terminal(events: dict[str, list[Event]]) -> None:
    file = io.StringIO()
    show_race(race({"a[b]": events["other"]}), Console(file=file, force_terminal=True, width=120))
    assert "a[b]" in file.getvalue() and "share of ideal" in file.getvalue()
    assert race_table(race(events)).row_count == 2


LIMIT = {
    "share": 0.25,
    "hardware": 0.355,
    "batch": 1.055,
    "statistics": None,
    "noise_scale": 1234.5,
    "comm_seconds": 0.004,
    "best_batch": 88,
    "seconds": 12.34,
}


def with_limit(race: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**race, "results": [{**result, "limit": {**LIMIT, **more}} for result in race["results"]]}


def test_the_share_of_the_limit_has_a_column(events: dict[str, list[Event]]) -> None:
    assert "of limit" in race_text(race(events)).splitlines()[0]
    assert "25.0 %" in race_text(with_limit(race(events))).splitlines()[1]
    assert "25.0 %" not in race_text(with_limit(race(events), share=None))


def test_results_without_metric_or_rounds_have_a_table() -> None:
    assert "-" in race_text(race({"nothing": []})).splitlines()[1]


# ---- the live display


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, height=30)


def shown(progress_console: Console) -> str:
    assert isinstance(progress_console.file, io.StringIO)
    return progress_console.file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_says_who_waits_for_whom(tmp_path: Path, terminal: bool) -> None:
    for rank in (0, 1):
        with FileRecorder(tmp_path, rank) as recorder:
            recorder.write("start", rank, 0.0, pid=1)
            if rank == 0:
                recorder.write("compute", 0, 0.0, end=0.5, samples=100)
                recorder.write("join", 0, 0.5, round=0, samples=100, bytes=8)
                recorder.write("warning", 0, 0.5, text="[odd] text")
    place = console(terminal)
    with Progress(tmp_path, title="abs-sgd", console=place):
        pass
    assert "waiting for rank 1" in shown(place) and "200/s" in shown(place) and "abs-sgd" in shown(place)
    assert not terminal or "[odd] text" in shown(place)


def test_the_display_of_nothing(tmp_path: Path) -> None:
    place = console(terminal=False)
    with Progress(tmp_path / "later", console=place):
        pass
    assert shown(place) == ""


def test_more_workers_than_the_screen_has_rows(tmp_path: Path) -> None:
    progress = Progress(tmp_path, console=console(terminal=True))
    for rank in range(100):
        progress.view.see({"kind": "start", "rank": rank, "t": 0.0})
    assert progress.table().row_count == 25


def test_speeds_and_states_of_a_run() -> None:
    view = RunView()
    for event in sorted(run(10.0), key=lambda e: e["t"]):
        view.see(event)
    assert view.workers[3].speed(view.now) == pytest.approx(32 / 0.164, rel=0.05)
    assert view.doing()[0] == "computing" and view.workers[0].rounds == 61
    view.see({"kind": "end", "rank": 0, "t": 10.0})
    assert view.doing()[0] == "done"


KINDS = st.sampled_from(["start", "compute", "join", "wait", "applied", "discard", "metric", "warning", "end", "new"])
FIELDS = st.dictionaries(
    st.sampled_from(["end", "samples", "round", "own", "metric", "text"]), st.none() | st.integers(0, 9) | st.text()
)


@settings(max_examples=300)
@given(st.lists(st.tuples(KINDS, st.integers(0, 3), st.floats(0, 10), FIELDS), max_size=30))
def test_no_record_makes_the_display_fall_over(parts: list[tuple[str, int, float, dict[str, Any]]]) -> None:
    progress = Progress("nowhere", console=console(terminal=True))
    for kind, rank, t, fields in parts:
        progress.view.see({"kind": kind, "rank": rank, "t": t, **fields})
        progress.line()
    progress.table()


# ---- the page


class Page(HTMLParser):
    """Checks that tags are closed in order, and gathers the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words, self.scripts = "", 0
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open.append(tag)
            self.scripts += tag == "script"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words += data


def test_the_page_is_whole_small_and_needs_no_network(tmp_path: Path, events: dict[str, list[Event]]) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(path, race(events, workload="digits", target=0.9), events)
    text = path.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert not re.search(r"""(src|href)\s*=\s*["']|<link|@import|url\(|fetch\(|XMLHttpRequest""", text)
    assert "default-src 'none'" in text and "Copyright (c) 2022 Leon Sorokin" in text, "uPlot's licence goes with it"
    words = Page(text).words
    for expected in ("Paceline race: digits", "all-reduce", "in flight at the end", "yes", "Who did what when"):
        assert expected in words


def test_the_page_says_how_far_from_the_limit_each_stayed(events: dict[str, list[Event]]) -> None:
    words = Page(render(with_limit(race(events)), events)).words
    for expected in ("How far from the limit", "statistics", "105.5 %", "noise scale 1,234 samples", "best batch 88"):
        assert expected in words
    assert "an all-reduce 4.0 ms" in words and "to the target 12.3 s" in words
    nothing = dict.fromkeys(("share", "batch", "statistics", "noise_scale", "best_batch", "seconds"))
    unknown = Page(render(with_limit(race(events), **nothing), events)).words
    assert "noise scale - samples" in unknown and "to the target -" not in unknown
    assert "time of the limit to the target is not known" in unknown and "not known" not in words
    assert "How far from the limit" not in render(race(events), events), "a race that does not know it"


def test_all_text_is_escaped() -> None:
    bad = "<b>&\"'"
    warned = [*run(1.0), {"kind": "warning", "rank": 0, "t": 0.5, "text": bad}]
    page = render(race({bad: warned}, workload=bad, note=bad, failed={bad: bad}), {bad: warned})
    assert bad not in page and "&lt;b&gt;" in page
    Page(page)


def test_no_name_ends_the_script_that_holds_it() -> None:
    bad = "</script><script>alert(1)</script><!--"
    page = render(race({bad: run(1.0)}), {bad: run(1.0)})
    assert bad not in page and Page(page).scripts == Page(render(race({"x": run(1.0)}), {"x": run(1.0)})).scripts


def test_a_race_without_events_or_with_hundreds_of_workers_has_a_page() -> None:
    Page(render(race({"none": []}), {}))
    many = summarise([], speeds=[1.0] * 300).as_dict()
    assert "276 more are not shown" in render({"results": [{"strategy": "x", **many}]}, {})


def test_what_does_not_add_up_is_said() -> None:
    twice = [*run(1.0), {"kind": "discard", "rank": 0, "t": 1.0, "samples": 5, "reason": "?"}]
    assert "applied or discarded" in Page(render(race({"x": twice}), {"x": twice})).words


def test_a_share_that_cannot_be_is_explained(events: dict[str, list[Event]]) -> None:
    found = race(events)
    assert "More than 100 %" not in Page(render(found, events)).words
    found["results"][0]["share_of_ideal"] = 2.8
    assert "More than 100 %: alone, workers were slower" in Page(render(found, events)).words


def test_who_did_not_come_to_an_end_is_named() -> None:
    ended = [{"kind": kind, "rank": rank, "t": 0.0} for rank in range(4) for kind in ("start", "end")]
    assert "has no end" not in Page(render(race({"x": ended}), {"x": ended})).words
    died = [event for event in ended if event["kind"] == "start" or event["rank"] not in (1, 3)]
    words = Page(render(race({"x": died}), {"x": died})).words
    assert "The record of ranks 1, 3 has no end: the process was killed or lost" in words


def test_a_setting_without_a_value_is_no_gap() -> None:
    words = Page(render({"results": [], "options": {"target": ""}}, {})).words
    assert "option: target-" in words.replace(" -", "-")


def test_all_lanes_of_a_picture_show_the_same_seconds(events: dict[str, list[Event]]) -> None:
    span = common_span(events.values())
    assert span < 10.0 and f"{span:g}" in ("2", "3", "4", "5")
    assert common_span([]) == 1.0


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_cover_the_range_with_few_round_numbers(low: float, span: float) -> None:
    marks = ticks(low, low + span)
    assert marks[0] <= low + 1e-6 * span + 1e-9 * abs(low) and marks[-1] >= low + span * (1 - 1e-6) - 1e-9 * abs(low)
    assert 2 <= len(marks) <= 8


@pytest.mark.parametrize("points", [[(0.0, 0.5)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, float("nan")), (2.0, 0.5)]])
def test_odd_curves_can_be_drawn(points: list[tuple[float, float]]) -> None:
    svg = line_chart([Curve("a", points), Curve("b", [])], x_label="x", y_label="y")
    assert "nan" not in svg
    ElementTree.fromstring(svg)


def test_a_long_curve_is_thinned_but_keeps_its_end() -> None:
    svg = line_chart([Curve("a", [(float(i), i / 10_000) for i in range(10_001)])], x_label="x", y_label="y")
    assert svg.count("L") < 310 and "466.0 12.0" in svg
