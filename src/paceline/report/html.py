"""The race's report: one HTML file that needs no network, no script and no server, and can be mailed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.record import Event
from paceline.report.charts import COLOURS, Curve, legend, line_chart
from paceline.report.style import CSS
from paceline.report.timeline import common_span, state_legend, timeline
from paceline.report.words import amount, count, limit_rows, milliseconds, race_rows, seconds, size
from paceline.summary import account, window_of


def write_report(path: Path | str, race: dict[str, Any], events_by_strategy: dict[str, list[Event]]) -> None:
    """Write the report of a race.

    Args:
        path: of the HTML file; its folder is made.
        race: what `paceline race --json` writes; a `target` in it is drawn into the charts.
        events_by_strategy: the events of each strategy's run. A strategy without events has no timeline.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(race, events_by_strategy), encoding="utf-8")


def render(race: dict[str, Any], events_by_strategy: dict[str, list[Event]]) -> str:
    """The report as text."""
    results = race["results"]
    title = f"Paceline race: {race.get('workload', 'workload')}"
    body = [
        f"<h1>{escape(title)}</h1>",
        '<p class="soft">Each strategy in turn on the same cluster, with the same model and order of data.</p>',
        _settings(race),
        "<h2>Result</h2>",
        _results(race),
        _limit(results),
        "<h2>Learning</h2>",
        _learning(results, events_by_strategy, race.get("target")),
        "<h2>Who did what when</h2>",
        _timelines(results, events_by_strategy),
        "<h2>Where the samples went</h2>",
        _account(results, events_by_strategy),
    ]
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(title)}</title><style>{CSS}</style>'
    main = "\n".join(body)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{main}\n</main></body></html>\n'


def _settings(race: dict[str, Any]) -> str:
    """What the race was given, whatever it was: all of the race's fields but the results."""
    entries = []
    for name, value in race.items():
        if name != "results" and value not in (None, {}):
            text = _value(value)
            entries.append(f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(text)}</dd></div>")
    backends = sorted({str(result["backend"]) for result in race["results"] if "backend" in result})
    if backends:
        entries.append(f"<div><dt>backend</dt><dd>{escape(', '.join(backends))}</dd></div>")
    return f'<dl class="settings card">{"".join(entries)}</dl>'


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = ", ".join(_value(each) for each in value[:12])
        return f"{shown}, … ({len(value)})" if len(value) > 12 else shown
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _results(race: dict[str, Any]) -> str:
    header, rows = race_rows(race)
    best = max((result["share_of_ideal"] for result in race["results"]), default=0.0)
    lines = []
    for index, (row, result) in enumerate(zip(rows, race["results"], strict=True)):
        cells = [escape(cell) for cell in row]
        share = result["share_of_ideal"]
        cells[0] = _dot(index) + cells[0]
        width = 100 * min(max(share, 0.0), 1.0)
        cells[1] = f'<span class="bar"><i><b style="width:{width:.1f}%"></b></i>{cells[1]}</span>'
        lines.append(_row("td", cells, ' class="best"' if share == best and len(rows) > 1 else ""))
    what = (
        "Share of ideal: samples used, divided by what all workers could have computed in the same time, each at its "
        "own speed alone. To target: when the held-out metric first reached it. Idle: mean over the workers."
    )
    return f'<div class="card">{_table(header, lines)}<p class="soft note">{what}</p></div>'


def _limit(results: Sequence[dict[str, Any]]) -> str:
    header, rows = limit_rows(results)
    if not rows:
        return ""
    lines = [_row("td", [escape(cell) for cell in row]) for row in rows]
    common = next(result["limit"] for result in results if "limit" in result)  # but for the shares it is equal in all
    facts = [
        f"noise scale {amount(common['noise_scale'])} samples",
        f"an all-reduce {milliseconds(common['comm_seconds'])}",
        f"best batch {amount(common['best_batch'])} samples",
        f"time of the limit to the target {seconds(common['seconds'])}",
    ]
    what = (
        "Of limit: the least time to the target that any method needs on this cluster, divided by this strategy's. It "
        "is the product of three. Hardware: the share of ideal. Batch: what its batches cost against the best one "
        "(above 100 % for smaller ones, which need fewer samples and more communication). Statistics: samples that a "
        "run without delay needs at its batch, divided by what it needed."
    )
    notes = "".join(f'<p class="soft note">{text}</p>' for text in (f"This race: {', '.join(facts)}.", what))
    return f'<h2>How far from the limit</h2><div class="card">{_table(header, lines)}{notes}</div>'


def _learning(results: Sequence[dict[str, Any]], events: dict[str, list[Event]], target: float | None) -> str:
    by_time, by_samples = [], []
    for result in results:
        name = str(result["strategy"])
        start, _ = window_of(events.get(name, []))
        metrics = sorted((e for e in events.get(name, []) if e["kind"] == "metric"), key=lambda e: e["t"])
        by_time.append(Curve(name, [(e["t"] - start, e["metric"]) for e in metrics]))
        by_samples.append(Curve(name, [(e["samples"], e["metric"]) for e in metrics]))
    charts = [
        line_chart(by_time, x_label="seconds", y_label="held-out metric", target=target),
        line_chart(by_samples, x_label="samples applied", y_label="held-out metric", target=target),
    ]
    cards = "".join(f'<div class="card">{chart}</div>' for chart in charts)
    return f'{legend([str(result["strategy"]) for result in results], target)}<div class="charts">{cards}</div>'


def _timelines(results: Sequence[dict[str, Any]], events: dict[str, list[Event]]) -> str:
    cards, span = [state_legend()], common_span(events.values())
    for index, result in enumerate(results):
        name = str(result["strategy"])
        lanes = timeline(events.get(name, []), result, span)
        cards.append(f'<div class="card"><h3>{_dot(index)}{escape(name)}</h3>{lanes}</div>')
    return "".join(cards)


def _account(results: Sequence[dict[str, Any]], events: dict[str, list[Event]]) -> str:
    header = ["strategy", "computed", "applied", "discarded", "in flight at the end", "sent", "adds up"]
    lines, problems = [], []
    for result in results:
        name = str(result["strategy"])
        books = account(events.get(name, []))
        numbers = [count(n) for n in (books.computed, books.applied, books.discarded, books.in_flight)]
        verdict = '<span class="bad">no</span>' if books.errors else "yes"
        lines.append(_row("td", [escape(name), *numbers, size(result["bytes_sent"]), verdict]))
        problems += [f'<p class="bad">{escape(name)}: {escape(error)}.</p>' for error in books.errors[:5]]
    what = "Every computed sample was applied, was discarded for a reason that was reported, or was still in flight."
    note = f'<p class="soft note">{what}</p>'
    return f'<div class="card">{_table(header, lines)}{note}{"".join(problems)}</div>'


def _dot(index: int) -> str:
    """The colour by which the charts know the strategy."""
    return f'<i class="dot" style="background:var(--s{index % COLOURS})"></i>'


def _table(header: Sequence[str], lines: Sequence[str]) -> str:
    head = _row("th", [escape(cell) for cell in header])
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table></div>'


def _row(cell: str, texts: Sequence[str], attributes: str = "") -> str:
    return f"<tr{attributes}>" + "".join(f"<{cell}>{text}</{cell}>" for text in texts) + "</tr>"
