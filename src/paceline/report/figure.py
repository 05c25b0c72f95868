"""The report as one picture for papers: learning, share of ideal, and who did what when, in light colours.

A picture cannot be zoomed and must look the same everywhere, so it is not the page's canvas but SVG; a PNG is that very
picture as pixels, by resvg (the extra `plot`), without a browser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.record import Event
from paceline.report.charts import HEIGHT, INK, SOFT, WIDTH, Curve, line_chart, stroke
from paceline.report.series import learning, share_of_ideal
from paceline.report.static_lanes import COLOURS, common_span, draw_lanes, lanes_height
from paceline.summary import window_of

MARGIN, GAP = 24, 24
PAGE = 2 * MARGIN + 2 * WIDTH + GAP
LETTER, LINE = 7.6, 24
"""Of the legend, at 14 points: the width that a letter takes at most on average, and the height of a row."""


def draw_figure(race: Mapping[str, Any], runs: Mapping[str, Sequence[Event]]) -> str:
    """The picture as SVG.

    Args:
        race: as in `write_report`.
        runs: the events of each strategy's run.
    """
    names = [str(result["strategy"]) for result in race["results"]]
    shown = {name: runs.get(name, []) for name in names}
    target = race.get("target")
    legend, y = _legend(names, target)
    parts = [legend]
    for place, chart in enumerate(_charts(race, shown, target)):
        x = MARGIN + place % 2 * (WIDTH + GAP)
        parts.append(f'<g transform="translate({x} {y + place // 2 * (HEIGHT + GAP)})">{chart}</g>')
    y += 2 * (HEIGHT + GAP)
    span = common_span(events for events in shown.values() if events)
    for name, events in shown.items():
        if events:
            parts.append(_text(MARGIN, y + 14, f"{name}, the first {span:g} s", INK, 15))
            parts.append(
                f'<g transform="translate({MARGIN} {y + 26})">{draw_lanes(events, span, PAGE - 2 * MARGIN)}</g>'
            )
            y += 26 + lanes_height(events) + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PAGE} {y}" width="{PAGE}" height="{y}" '
        f'font-family="system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif">'
        f'<rect width="{PAGE}" height="{y}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _charts(race: Mapping[str, Any], runs: Mapping[str, Sequence[Event]], target: float | None) -> list[str]:
    learned = {name: learning(events, window_of(events)[0]) for name, events in runs.items()}
    ideal = {str(r["strategy"]): sum(worker["speed"] for worker in r["workers"]) for r in race["results"]}
    paces = {name: share_of_ideal(events, ideal[name]) for name, events in runs.items()}

    def chart(found: Mapping[str, Any], x: str, y: str, labels: tuple[str, str], target: float | None = None) -> str:
        curves = [
            Curve(name, [(a, b) for a, b in zip(each[x], each[y], strict=True) if b is not None])
            for name, each in found.items()
        ]
        svg = line_chart(curves, x_label=labels[0], y_label=labels[1], target=target)
        return svg.replace("<svg ", f'<svg width="{WIDTH}" height="{HEIGHT}" ', 1)

    return [
        chart(learned, "seconds", "metric", ("seconds", "held-out metric"), target),
        chart(learned, "samples", "metric", ("samples applied", "held-out metric"), target),
        chart(learned, "seconds", "loss", ("seconds", "held-out loss")),
        chart(paces, "seconds", "share", ("seconds", "share of ideal"), 1.0),
    ]


def _legend(names: Sequence[str], target: float | None) -> tuple[str, int]:
    """Names beside a piece of their lines, in as many rows as they need; and where the picture goes on."""
    entries = [(stroke(index), name) for index, name in enumerate(names)]
    entries.append(
        (f'stroke="{INK}" stroke-dasharray="5 4"', "ideal" if target is None else f"target {target:g}, ideal")
    )
    boxes = [(f'fill="{colour}"', state) for state, colour in COLOURS.items()]
    parts, x, y = [], MARGIN, MARGIN
    for look, name in [*entries, *boxes]:
        wide = 34 + int(LETTER * len(name)) + 22
        if x > MARGIN and x + wide > PAGE - MARGIN:
            x, y = MARGIN, y + LINE
        d = "h26" if "stroke" in look else "m8 -6h12v12h-12z"
        parts.append(f'<path d="M{x} {y}{d}" stroke-width="3" {look}/>{_text(x + 34, y + 5, name, INK, 14)}')
        x += wide
    return "".join(parts), y + LINE


def _text(x: float, y: float, said: str, colour: str, points: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{points}" fill="{colour or SOFT}">{escape(said)}</text>'
