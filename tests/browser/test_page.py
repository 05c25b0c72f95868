"""The report in a real browser: it loads without a complaint, zooms by every means, and bears a million events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.simulated import simulate
from paceline.record import Event, MemoryRecorder
from paceline.report.html import write_report
from paceline.simulator.cluster import Cluster
from paceline.strategies import create
from paceline.summary import summarise

SPEEDS = [1600.0, 1600.0, 800.0, 400.0]
Visit = Callable[..., Any]


def race_of(runs: dict[str, list[Event]], speeds: list[float], **more: Any) -> dict[str, Any]:
    results = [{"strategy": name, **summarise(events, speeds=speeds).as_dict()} for name, events in runs.items()]
    return {"results": results, "workload": "digits", **more}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A race of three strategies on four workers; one has a long name."""
    runs: dict[str, list[Event]] = {}
    names = {"all-reduce": "all-reduce", "abs-sgd": "abs-sgd:delay_cure=none:lr_rule=none", "ad-psgd": "ad-psgd"}
    for strategy, name in names.items():
        recorder = MemoryRecorder()
        cluster = Cluster.from_speeds([1, 1, 0.5, 0.25], micro_batch_seconds=0.02)
        simulate(create(strategy), cluster, seconds=20.0, recorder=recorder)
        for moment in range(1, 20):
            values = {"samples": 1000 * moment, "metric": 1 - 1 / (1 + moment), "loss": 2 / moment}
            recorder.write("metric", 0, float(moment), **values)
        runs[name] = recorder.events
    race = race_of(runs, SPEEDS, target=0.9)
    race["results"][0]["limit"] = dict.fromkeys(
        ("share", "hardware", "batch", "statistics", "noise_scale", "comm_seconds", "best_batch"), 0.5
    ) | {"seconds": 4.0}
    file = tmp_path_factory.mktemp("page") / "report.html"
    write_report(file, race, runs)
    return file


class Timeline:
    """The first timeline of a page, in the middle of the screen."""

    def __init__(self, page: Any) -> None:
        self.page = page
        page.evaluate("document.querySelector('canvas[tabindex]').scrollIntoView({block: 'center'})")
        box = page.evaluate("document.querySelector('canvas[tabindex]').getBoundingClientRect().toJSON()")
        self.left, self.top, self.width = box["left"], box["top"], box["width"]

    def at(self, part: float, row: int = 0) -> tuple[float, float]:
        """A point of a lane; the names take up to 132 pixels on its left."""
        names = 66 if self.width < 560 else 132
        return self.left + names + part * (self.width - names - 10), self.top + 16 + 29 * row

    def seen(self) -> tuple[float, float]:
        """From when to when; after the next picture is drawn."""
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        told = self.page.evaluate("Object.assign({}, document.querySelector('canvas[tabindex]').dataset)")
        return float(told["from"]), float(told["to"])

    def drawn(self) -> str:
        self.seen()
        return str(self.page.evaluate("document.querySelector('canvas[tabindex]').dataset.drawn"))

    def says(self) -> str:
        self.seen()
        return str(self.page.evaluate("document.querySelector('.readout').textContent"))

    def all_alike(self) -> bool:
        said = (
            "[...document.querySelectorAll('canvas[tabindex]')].map(each => each.dataset.from + ' ' + each.dataset.to)"
        )
        return len(set(self.page.evaluate(said))) == 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_loads_without_errors_or_requests(
    visit: Visit, page_file: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    page = visit(page_file, width=width, dark=dark, phone=width < 500)
    page.wait_for("document.querySelectorAll('.uplot').length === 11")  # learning 4, pace 2, batches 3, delays 2
    assert page.trouble == []
    assert page.evaluate("document.documentElement.scrollWidth") == width, "nothing sticks out"
    assert page.evaluate("document.querySelectorAll('canvas[tabindex]').length") == 3
    told = page.evaluate("document.querySelectorAll('[data-chart=delays].empty').length")
    assert told == 1, "how late ad-psgd is, the record does not tell"
    assert len(page_file.read_bytes()) < 2_000_000
    page.picture(tmp_path / f"{width}-{dark}.png")


def test_a_legend_names_the_curves_and_tells_values_only_of_what_is_pointed_at(visit: Visit, page_file: Path) -> None:
    page = visit(page_file)
    chart = "document.querySelector('[data-chart=loss-seconds]')"
    page.wait_for(f"{chart}.querySelector('.u-legend') !== null")
    shown = f"""[...{chart}.querySelectorAll('.u-series')]
        .filter(row => getComputedStyle(row).visibility === 'visible').map(row => row.textContent)"""
    assert page.evaluate(shown) == ["all-reduce", "abs-sgd:delay_cure=none:lr_rule=none", "ad-psgd"]
    dashes = f"[...{chart}.querySelectorAll('.u-marker')].map(each => each.style.background)"
    (none, whole, *dashed) = page.evaluate(dashes)
    assert none == "none" and whole == "var(--s0)" and all("gradient" in each for each in dashed)
    page.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
    box = page.evaluate(f"{chart}.querySelector('.u-over').getBoundingClientRect().toJSON()")
    page.mouse("mouseMoved", box["left"] + box["width"] * 0.5, box["top"] + 50)
    page.wait_for(f"{chart}.querySelectorAll('td:empty').length === 0")
    over, *_ = page.evaluate(shown)
    # The axis begins at zero, though the first value is of second 1: the middle of 0 to 19 s is told.
    assert over in ("seconds9 s", "seconds10 s")


def test_a_drag_a_wheel_and_buttons_zoom(visit: Visit, page_file: Path) -> None:
    page = visit(page_file)
    timeline = Timeline(page)
    start, end = timeline.seen()
    assert start == 0 and end == pytest.approx(20.0, abs=0.5) and "shares" in timeline.drawn()
    page.drag(timeline.at(0.25), timeline.at(0.5))
    from_, to = timeline.seen()
    assert from_ == pytest.approx(end / 4, rel=0.02) and to == pytest.approx(end / 2, rel=0.02)
    assert timeline.all_alike()
    page.evaluate("document.querySelector('canvas[tabindex]').focus()")
    for _ in range(12):
        page.mouse("mouseWheel", *timeline.at(0.5), deltaX=0, deltaY=-100)
    closer_from, closer_to = timeline.seen()
    assert closer_to - closer_from < (to - from_) / 10 and from_ < closer_from < closer_to < to
    assert timeline.drawn() == "intervals intervals intervals intervals"
    page.mouse("mouseWheel", *timeline.at(0.5), deltaX=200, deltaY=0)
    assert timeline.seen()[0] > closer_from
    page.evaluate("document.querySelector('[data-zoom=out]').click()")
    assert timeline.seen()[1] - timeline.seen()[0] == pytest.approx(2 * (closer_to - closer_from), rel=1e-6)
    page.evaluate("document.querySelector('[data-zoom=all]').click()")
    assert timeline.seen() == (start, end)
    assert page.trouble == []


def test_a_wheel_scrolls_the_page_until_it_is_asked_to_zoom(visit: Visit, page_file: Path) -> None:
    page = visit(page_file)
    timeline = Timeline(page)
    whole = timeline.seen()
    page.mouse("mouseWheel", *timeline.at(0.5), deltaX=0, deltaY=-100)
    assert timeline.seen() == whole
    page.mouse("mouseWheel", *Timeline(page).at(0.5), deltaX=0, deltaY=-100, modifiers=2)  # Ctrl
    assert timeline.seen() != whole


def test_pointing_tells_worker_state_time_samples_and_round(visit: Visit, page_file: Path) -> None:
    page = visit(page_file)
    timeline = Timeline(page)
    page.drag(timeline.at(0.001), timeline.at(0.02))
    page.mouse("mouseMoved", *timeline.at(0.5, row=3))
    said = timeline.says()
    assert said.startswith("rank 3 · computing · ") and "32 samples" in said and "round " in said and "(80 ms)" in said
    from_, to = timeline.seen()
    blocked = next(part / 50 for part in range(50) if ((from_ + part / 50 * (to - from_)) % 0.0836) > 0.06)
    page.mouse("mouseMoved", *timeline.at(blocked))
    assert timeline.says().startswith("rank 0 · idle · "), "the slowest of an all-reduce lets the others wait"


def test_everything_works_by_keyboard(visit: Visit, page_file: Path) -> None:
    page = visit(page_file)
    timeline = Timeline(page)
    page.evaluate("document.querySelector('canvas[tabindex]').focus()")
    whole = timeline.seen()
    for _ in range(7):
        page.press("+")
    from_, to = timeline.seen()
    assert to - from_ == pytest.approx((whole[1] - whole[0]) / 128)
    page.press("ArrowRight")
    assert timeline.seen()[0] > from_
    page.press("ArrowDown")
    page.press("ArrowDown")
    first = timeline.says()
    assert first.startswith("rank 1 · ")
    page.press(".")
    assert timeline.says() != first and timeline.says().startswith("rank 1 · ")
    page.press(",")
    assert timeline.says() == first
    page.press("-")
    page.press("0")
    assert timeline.seen() == whole and page.trouble == []


def test_two_fingers_zoom_and_one_pans(visit: Visit, page_file: Path) -> None:
    page = visit(page_file, width=390, phone=True)
    timeline = Timeline(page)
    whole = timeline.seen()
    page.touch("touchStart", timeline.at(0.4), timeline.at(0.6))
    for step in range(1, 7):
        page.touch("touchMove", timeline.at(0.4 - 0.05 * step), timeline.at(0.6 + 0.05 * step))
    page.touch("touchEnd")
    from_, to = timeline.seen()
    assert (to - from_) / (whole[1] - whole[0]) == pytest.approx(0.25, abs=0.06), "0.2 of the width became 0.8 of it"
    page.touch("touchStart", timeline.at(0.8))
    for step in range(1, 5):
        page.touch("touchMove", timeline.at(0.8 - 0.1 * step))
    page.touch("touchEnd")
    assert timeline.seen()[0] > from_ and page.trouble == []


def test_the_page_follows_the_theme(visit: Visit, page_file: Path) -> None:
    page = visit(page_file)
    timeline = Timeline(page)
    look = "[...document.querySelector('canvas[tabindex]').getContext('2d').getImageData(160, 26, 1, 1).data].join()"
    timeline.seen()
    light = page.evaluate(look)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    timeline.seen()
    assert page.evaluate(look) != light


def a_million_events() -> list[Event]:
    """Eight workers that compute a micro-batch of a millisecond, join, and apply: 41,667 times."""
    events: list[Event] = []
    for rank in range(8):
        for number in range(41_667):
            t = number * 0.0015
            events.append({"kind": "compute", "rank": rank, "t": t, "end": t + 0.001, "samples": 32})
            events.append({"kind": "join", "rank": rank, "t": t + 0.001, "round": number, "samples": 32, "bytes": 100})
            events.append(
                {"kind": "applied", "rank": rank, "t": t + 0.0014, "round": number, "samples": 256, "own": 32}
            )
    return events


def test_a_million_events_stay_usable(visit: Visit, tmp_path: Path) -> None:
    events = a_million_events()
    assert len(events) > 1_000_000
    file = tmp_path / "report.html"
    write_report(file, race_of({"all-reduce": events}, [32_000.0] * 8), {"all-reduce": events})
    assert file.stat().st_size < 2_000_000
    page = visit(file)
    timeline = Timeline(page)
    whole = timeline.seen()
    assert timeline.drawn() == " ".join(["shares"] * 8) and "first" in timeline.says()
    page.mouse("mouseMoved", *timeline.at(0.9, row=5))
    assert timeline.says().startswith("rank 5 · ") and "computing 67 %" in timeline.says()
    page.evaluate("document.querySelector('canvas[tabindex]').focus()")
    for _ in range(40):
        page.mouse("mouseWheel", *timeline.at(0.0), deltaX=0, deltaY=-100)
    assert timeline.seen()[1] < whole[1] / 1000 and timeline.drawn() == " ".join(["intervals"] * 8)
    before = timeline.seen()
    for _ in range(5):
        page.press("ArrowRight")
    assert timeline.seen()[0] == pytest.approx(before[0] + (before[1] - before[0]), rel=1e-3) and page.trouble == []
