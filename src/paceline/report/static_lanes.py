"""Who computed, communicated and stood idle when, as SVG: the timeline of a picture, which cannot be zoomed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from paceline.record import Event
from paceline.report.charts import INK, SOFT, ticks
from paceline.summary import Interval, intervals, window_of

MAX_LANES = 8
LEGIBLE = 60
"""Intervals in a lane, on average."""
COLOURS = {"computing": "#009e73", "communicating": "#e69f00", "idle": "#d5d9df"}
LANE, GAP, NAMES, AXIS = 18, 4, 64, 24


def common_span(runs: Iterable[Sequence[Event]]) -> float:
    """How many seconds to show of every run: the same, so that they can be compared, and few enough to be legible.

    It is a round number, for the sake of the axis.
    """
    longest, legible = 0.0, math.inf
    for events in runs:
        start, end = window_of(events)
        longest = max(longest, end - start)
        lanes = list(intervals(events).values())[:MAX_LANES]
        ends = sorted(interval.end for lane in lanes for interval in lane if interval.end > start)
        limit = LEGIBLE * max(len(lanes), 1)
        if len(ends) > limit:
            legible = min(legible, ends[limit] - start)
    if legible < longest:
        power = 10.0 ** math.floor(math.log10(legible))
        return max(factor * power for factor in (1, 2, 3, 4, 5, 8) if factor * power <= legible)
    return longest or 1.0


def lanes_height(events: Sequence[Event]) -> int:
    return min(len(intervals(events)), MAX_LANES) * (LANE + GAP) + AXIS


def draw_lanes(events: Sequence[Event], span: float, width: float) -> str:
    """The first `span` seconds of the run as an SVG group, `width` wide and `lanes_height` high."""
    start, _ = window_of(events)
    done = list(intervals(events).items())[:MAX_LANES]
    scale = (width - NAMES) / span
    parts = []
    for row, (rank, lane) in enumerate(done):
        y = row * (LANE + GAP)
        ground = f'<rect x="{NAMES}" y="{y}" width="{width - NAMES:.1f}" height="{LANE}" fill="{COLOURS["idle"]}"/>'
        parts += [_text(0, y + 14, f"rank {rank}", INK, "start"), ground]
        parts += [_boxes(lane, state, start, span, scale, y) for state in ("computing", "communicating")]
        parts.append(_steps(events, rank, start, span, scale, y))
    floor = len(done) * (LANE + GAP) + 12
    for value in (mark for mark in ticks(0.0, span) if mark <= span):
        anchor = "end" if value == span else "middle" if value else "start"
        parts.append(_text(NAMES + value * scale, floor, f"{value:g} s", SOFT, anchor))
    return f"<g>{''.join(parts)}</g>"


def _boxes(lane: Sequence[Interval], state: str, start: float, span: float, scale: float, y: float) -> str:
    height = LANE if state == "computing" else LANE / 2  # heights differ as well as colours: prints are grey
    boxes = []
    for interval in lane:
        left = max(interval.t - start, 0.0) * scale
        right = min(interval.end - start, span) * scale
        if interval.doing == state and right > left:
            gap = min(1.0, (right - left) / 5)  # so that one micro-batch can be told from the next
            boxes.append(
                f"M{NAMES + left:.1f} {y + LANE}h{right - left - gap:.1f}v-{height:g}h-{right - left - gap:.1f}z"
            )
    return f'<path fill="{COLOURS[state]}" d="{"".join(boxes)}"/>' if boxes else ""


def _steps(events: Sequence[Event], rank: int, start: float, span: float, scale: float, y: float) -> str:
    times = [e["t"] - start for e in events if e["kind"] in ("applied", "step") and e["rank"] == rank and e["samples"]]
    marks = "".join(f"M{NAMES + t * scale:.1f} {y}v{LANE}" for t in times if 0 <= t <= span)
    return f'<path stroke="{INK}" d="{marks}"/>' if marks else ""


def _text(x: float, y: float, said: str, colour: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="13" fill="{colour}" text-anchor="{anchor}">{said}</text>'
