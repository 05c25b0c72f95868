"""Who computed, communicated and stood idle when: a lane a worker.

The bars are SVG that stretches to the page's width, the words are HTML that does not, so both stay readable on a
telephone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from paceline.record import Event
from paceline.report.charts import ticks
from paceline.report.words import percent, seconds
from paceline.summary import Interval, intervals, window_of

MAX_LANES = 24
MAX_INTERVALS = 1500
"""Over all lanes: as many as the eye can use and a page should carry."""
LEGIBLE = 60
"""Intervals in a lane, on average."""
WIDTH = 1000
STATES = ("computing", "communicating", "idle")


def timeline(events: Sequence[Event], result: dict[str, Any], span: float) -> str:
    """The first `span` seconds of the run as lanes, then the shares of each worker over the whole run."""
    workers = result["workers"][:MAX_LANES]
    left_out = len(result["workers"]) - len(workers)
    note = f'<p class="soft">The first {len(workers)} workers; {left_out} more are not shown.</p>' if left_out else ""
    done = intervals(events)
    if not done:
        return _whole_run(workers, result["seconds"]) + note
    start, end = window_of(events)
    lanes = "".join(_lane(worker, done.get(worker["rank"], []), events, start, span) for worker in workers)
    whole = "The whole run" if span >= end - start else f"The first {span:g} s of {seconds(end - start)}"
    return f"<h4>{whole}</h4>{lanes}{_axis(span)}{_whole_run(workers, result['seconds'])}{note}"


def state_legend() -> str:
    entries = [f'<span><i class="swatch {state}"></i>{state}</span>' for state in STATES]
    line = '<svg class="lone" viewBox="0 0 6 12" aria-hidden="true"><path class="step" d="M3 0V12"/></svg>'
    return f'<div class="legend">{"".join(entries)}<span>{line}a step of the model</span></div>'


def common_span(runs: Iterable[Sequence[Event]]) -> float:
    """How many seconds to show of every run: the same, so that they can be compared, and few enough to be legible.

    It is a round number, for the sake of the axis.
    """
    longest = 0.0
    legible = math.inf
    for events in runs:
        start, end = window_of(events)
        longest = max(longest, end - start)
        lanes = [lane for rank, lane in intervals(events).items() if rank < MAX_LANES]
        ends = sorted(interval.end for lane in lanes for interval in lane if interval.end > start)
        limit = min(MAX_INTERVALS, LEGIBLE * max(len(lanes), 1))
        if len(ends) > limit:
            legible = min(legible, ends[limit] - start)
    if legible < longest:
        power = 10.0 ** math.floor(math.log10(legible))
        return max(factor * power for factor in (1, 2, 3, 4, 5, 8) if factor * power <= legible)
    return longest or 1.0


def _axis(span: float) -> str:
    marks = [value for value in ticks(0.0, span) if value <= span]
    texts = [f'<span style="left:{100 * value / span:.2f}%">{value:g} s</span>' for value in marks]
    return f'<div class="lane"><span></span><div class="ticks">{"".join(texts)}</div></div>'


def _lane(worker: dict[str, Any], done: Sequence[Interval], events: Sequence[Event], start: float, span: float) -> str:
    paths = []
    for state in STATES[:2]:  # idle is the lane's own ground
        boxes = [_box(interval, start, span) for interval in done if interval.doing == state]
        paths.append(f'<path class="{state}" d="{"".join(boxes)}"/>')
    rank = worker["rank"]
    times = [e["t"] for e in events if e["kind"] in ("applied", "step") and e["rank"] == rank and e["samples"]]
    steps = "".join(f"M{(t - start) / span * WIDTH:.1f} 0V10" for t in times if start <= t <= start + span)
    bars = f'{"".join(paths)}<path class="step" d="{steps}"/>'
    svg = f'<svg viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" role="img">{bars}</svg>'
    return f'<div class="lane"><span>{_name(worker)}</span>{svg}</div>'


def _box(interval: Interval, start: float, span: float) -> str:
    left = max((interval.t - start) / span, 0.0) * WIDTH
    right = min((interval.end - start) / span, 1.0) * WIDTH
    if right <= left:
        return ""
    gap = min(1.2, (right - left) / 5)  # so that one micro-batch can be told from the next
    return f"M{left:.1f} 1h{right - left - gap:.1f}v8H{left:.1f}z"


def _whole_run(workers: Sequence[dict[str, Any]], length: float) -> str:
    lanes = "".join(_shares(worker) for worker in workers)
    return f"<h4>Shares of the whole run, {seconds(length)}: computing</h4>{lanes}"


def _shares(worker: dict[str, Any]) -> str:
    boxes, left = [], 0.0
    for state in STATES:
        width = worker[state] * WIDTH
        boxes.append(f'<path class="{state}" d="M{left:.1f} 0h{width:.1f}v10H{left:.1f}z"/>')
        left += width
    words = ", ".join(f"{state} {percent(worker[state])}" for state in STATES)
    title = f"<title>rank {worker['rank']}: {words}</title>"
    svg = f'<svg viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" role="img">{title}{"".join(boxes)}</svg>'
    return f'<div class="lane whole"><span>{_name(worker)}</span>{svg}<span>{percent(worker["computing"])}</span></div>'


def _name(worker: dict[str, Any]) -> str:
    return f"rank {escape(str(worker['rank']))} <small>{worker['speed']:,.0f}/s</small>"
