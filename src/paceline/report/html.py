"""The report: one HTML file with all that it needs inside. No network, no server; it can be mailed.

Words and tables are written here and are there without scripts. Curves are drawn by uPlot (50 kB, in `assets/` with its
licence), the timeline by a script of our own: both can be zoomed, which a picture cannot. Pictures for papers are drawn
by `figure.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.record import Event
from paceline.report import sections
from paceline.report.lanes import timelines
from paceline.report.series import curves_of

SCRIPTS = ("uplot.min.js", "lanes.js", "timeline.js", "charts.js")
STYLES = ("uplot.min.css", "report.css")
# The page may not load anything from anywhere, whatever stands in a record.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
HOW = (
    "Drag to zoom in, double-click to see all; a wheel zooms after a click, or with Ctrl. On a touch screen pinch and "
    "drag. With keys: + and −, ← and →, 0 for all, ↑ and ↓ for the worker, comma and full stop for the interval."
)
DELAYS = (
    "Steps of the model between reading the parameters and using the gradient; what a strategy does to cure the delay "
    "is not taken into account."
)
PACE = (
    "Samples count when they are applied, evenly since the step before: after a start or a stall, what had been under "
    "way for long can stand above 100 %."
)
NO_METRIC = "No held-out metric was recorded. In a training script run.report(metric, loss) puts one into the record."
BUTTONS = {"left": ("←", "earlier"), "right": ("→", "later"), "in": ("+", "zoom in"), "out": ("−", "zoom out")}


def write_report(path: Path | str, race: dict[str, Any], events_by_strategy: dict[str, list[Event]]) -> None:
    """Write the report of a race, a run or a simulation.

    Args:
        path: of the HTML file; its folder is made.
        race: what `paceline race --json` writes; a `target` in it is drawn into the charts, and a `title` and a `note`
            stand at the top.
        events_by_strategy: the events of each strategy's run. A strategy without events has no timeline.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(race, events_by_strategy), encoding="utf-8")


def render(race: dict[str, Any], events_by_strategy: Mapping[str, Sequence[Event]]) -> str:
    """The report as text."""
    found = race["results"]
    runs = {str(result["strategy"]): events_by_strategy.get(str(result["strategy"]), []) for result in found}
    title = str(race.get("title", f"Paceline race: {race.get('workload', 'workload')}"))
    note = race.get("note", "Each strategy in turn on the same cluster, with the same model and order of data.")
    body = [
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(str(note))}</p></header>',
        "<noscript><p>The tables need no scripts; the charts and the timeline do.</p></noscript>",
        "<h2>Result</h2>",
        sections.results(race),
        "<h2>Learning</h2>",
        _learning(runs),
        "<h2>Pace and traffic</h2>",
        _charts("share", "bytes"),
        f'<p class="soft">{PACE}</p>',
        "<h2>Who did what when</h2>",
        _timelines(found, runs),
        "<h2>Samples of each worker in each round</h2>",
        _of_each_run("batches", found),
        "<h2>How late gradients were used</h2>",
        _of_each_run("delays", found),
        f'<p class="soft">{DELAYS}</p>',
        sections.limits(found),
        "<h2>Where the samples went</h2>",
        sections.samples(found, runs),
        sections.warnings(found, runs),
        "<h2>Settings and versions</h2>",
        sections.settings(race),
    ]
    return _page(title, "\n".join(body), _data(race, runs))


def _page(title: str, body: str, data: dict[str, Any]) -> str:
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        *(f"<style>{_asset(name)}</style>" for name in STYLES),
    ]
    # Inside a script element only `</` and `<!` have a meaning.
    told = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = [
        f'<script type="application/json" id="data">{told}</script>',
        f"<script>/* uPlot:\n{_asset('uplot.LICENSE')}\n*/</script>",
        *(f"<script>{_asset(name)}</script>" for name in SCRIPTS),
    ]
    main = f"<main>\n{body}\n</main>"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{"".join(head)}</head>\n<body>{main}\n'
        + "\n".join(scripts)
        + "\n</body></html>\n"
    )


def _data(race: Mapping[str, Any], runs: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """What the scripts draw."""
    workers = {str(result["strategy"]): result["workers"] for result in race["results"]}
    lanes = timelines({name: events for name, events in runs.items() if events}, workers)
    limits = [result["limit"].get("seconds") for result in race["results"] if "limit" in result]
    return {
        "target": race.get("target"),
        "limit": limits[0] if limits else None,
        "runs": [
            {
                "name": str(result["strategy"]),
                "timeline": lanes.get(str(result["strategy"])),
                **curves_of(runs[str(result["strategy"])], result),
            }
            for result in race["results"]
        ],
    }


def _charts(*kinds: str) -> str:
    cards = "".join(f'<div class="card"><div data-chart="{kind}"></div></div>' for kind in kinds)
    return f'<div class="charts">{cards}</div>'


def _learning(runs: Mapping[str, Sequence[Event]]) -> str:
    if not any(event["kind"] == "metric" for events in runs.values() for event in events):
        return f'<div class="card soft">{NO_METRIC}</div>'
    return _charts("metric-seconds", "metric-samples", "loss-seconds", "loss-samples")


def _of_each_run(kind: str, found: Sequence[Mapping[str, Any]]) -> str:
    cards = [
        f'<div class="card"><h3>{sections.dot(index)}{escape(str(result["strategy"]))}</h3>'
        f'<div data-chart="{kind}" data-run="{index}"></div></div>'
        for index, result in enumerate(found)
    ]
    return f'<div class="charts runs">{"".join(cards)}</div>'


def _timelines(found: Sequence[Mapping[str, Any]], runs: Mapping[str, Sequence[Event]]) -> str:
    cards = [_controls()] if any(runs.values()) else []
    for index, result in enumerate(found):
        name = str(result["strategy"])
        lanes = '<p class="soft">There are no events of this run.</p>'
        if runs[name]:
            label = escape(f"Timeline of {name}: a lane for each worker. Arrow keys move, plus and minus zoom.")
            canvas = f'<canvas tabindex="0" role="img" aria-label="{label}"></canvas>'
            readout = '<p class="readout soft" aria-live="polite"></p>'
            lanes = f'<div class="timeline" data-run="{index}">{canvas}{readout}</div>'
        whole = sections.shares(result["workers"], result["seconds"])
        cards.append(f'<div class="card"><h3>{sections.dot(index)}{escape(name)}</h3>{lanes}{whole}</div>')
    return "".join(cards)


def _controls() -> str:
    buttons = [
        f'<button type="button" data-zoom="{kind}" aria-label="{label}" title="{label}">{sign}</button>'
        for kind, (sign, label) in BUTTONS.items()
    ]
    buttons.append('<button type="button" data-zoom="all">all</button>')
    states = [f'<span><i class="swatch {state}"></i>{state}</span>' for state in sections.STATES]
    states.append('<span><i class="swatch step"></i>a step of the model</span>')
    return (
        f'<div class="controls"><div class="legend">{"".join(states)}</div><div>{"".join(buttons)}</div></div>'
        f'<p class="soft">{HOW} All timelines show the same seconds.</p>'
    )


def _asset(name: str) -> str:
    return files("paceline.report").joinpath("assets", name).read_text(encoding="utf-8").strip()
