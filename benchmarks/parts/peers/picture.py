"""The timelines of a race as one small picture: who computed, communicated and stood idle when."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.record import read_events
from paceline.report.charts import INK
from paceline.report.folder import strategy_folder
from paceline.report.static_lanes import COLOURS, draw_lanes, lanes_height

WIDTH, MARGIN, TITLE = 860, 16, 24
SPAN = 2.0  # seconds: single micro-batches can be told apart


def draw(race_folder: Path) -> str:
    """As SVG, from the folder that `paceline race` has written."""
    race = json.loads((race_folder / "race.json").read_text())
    parts, y = [_legend()], MARGIN + TITLE
    for result in race["results"]:
        events = read_events(race_folder / strategy_folder(result["strategy"]) / "events")
        said = f"{result['strategy']}: {result['share_of_ideal']:.0%} of ideal"
        parts.append(f'<text x="{MARGIN}" y="{y + 14}" font-size="15" fill="{INK}">{said}</text>')
        lanes = draw_lanes(events, SPAN, WIDTH - 2 * MARGIN)
        parts.append(f'<g transform="translate({MARGIN} {y + TITLE})">{lanes}</g>')
        y += TITLE + lanes_height(events) + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'font-family="system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif">'
        f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _legend() -> str:
    parts = []
    for place, (state, colour) in enumerate(COLOURS.items()):
        x = MARGIN + 140 * place
        parts.append(
            f'<rect x="{x}" y="{MARGIN - 6}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 18}" y="{MARGIN + 5}" font-size="13" fill="{INK}">{state}</text>'
        )
    return "".join(parts)
