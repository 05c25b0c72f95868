"""The parts of the report that are words and tables. Every text that comes from outside is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.record import Event
from paceline.report.words import (
    NOTHING,
    amount,
    count,
    limit_rows,
    milliseconds,
    percent,
    race_rows,
    ranks,
    seconds,
    size,
)
from paceline.summary import account

COLOURS = 6
"""Of the style sheet, for strategies and workers in turn."""
MAX_WORKERS = 24
STATES = ("computing", "communicating", "idle")
SHARE_NOTE = (
    "Share of ideal: samples used, divided by what all workers could have computed in the same time, each at its "
    "own speed alone. To target: when the held-out metric first reached it. Idle: mean over the workers."
)
BUSY_NOTE = (
    "More than 100 %: alone, workers were slower than in the race. Others had the machine while they were measured; "
    "compare strategies with each other only, or race again when it is idle."
)
MOST_OF_IDEAL = 1.05
"""More than measuring a worker alone can be wrong by."""
LIMIT_NOTE = (
    "Of limit: the least time to the target that any method needs on this cluster, divided by this strategy's. It "
    "is the product of three. Hardware: the share of ideal. Batch: what its batches cost against the best one "
    "(above 100 % for smaller ones, which need fewer samples and more communication). Statistics: samples that a "
    "run without delay needs at its batch, divided by what it needed."
)
NO_LIMIT_NOTE = (
    "The time of the limit to the target is not known: how many steps it takes at least is told by a blocking "
    "strategy, such as all-reduce, that reached the target in the same race."
)
ACCOUNT_NOTE = (
    "Every computed sample was applied, was discarded for a reason that was reported, or was still in flight."
)


def settings(race: Mapping[str, Any]) -> str:
    """What the run was given, whatever it was: all of the race's fields but the results."""
    entries = []
    for name, value in race.items():
        if name not in ("results", "title", "note", "failed") and value not in (None, {}):
            fields = {f"{name.removesuffix('s')}: {key}": each for key, each in value.items()} if _is(value) else None
            for field, each in (fields or {name: value}).items():
                entries.append(f"<div><dt>{escape(field.replace('_', ' '))}</dt><dd>{escape(_value(each))}</dd></div>")
    backends = sorted({str(result["backend"]) for result in race["results"] if "backend" in result})
    if backends:
        entries.append(f"<div><dt>backend</dt><dd>{escape(', '.join(backends))}</dd></div>")
    return f'<dl class="settings card">{"".join(entries)}</dl>'


def _is(value: Any) -> bool:
    return isinstance(value, dict)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        shown = ", ".join(_value(each) for each in value[:12])
        return f"{shown}, … ({len(value)})" if len(value) > 12 else shown
    return f"{value:,.6g}" if isinstance(value, float) else str(value) or NOTHING


def results(race: dict[str, Any]) -> str:
    header, rows = race_rows(race)
    best = max((result["share_of_ideal"] for result in race["results"]), default=0.0)
    lines = []
    for index, (row, result) in enumerate(zip(rows, race["results"], strict=True)):
        cells = [escape(cell) for cell in row]
        share = result["share_of_ideal"]
        cells[0] = dot(index) + cells[0]
        width = 100 * min(max(share, 0.0), 1.0)
        cells[1] = f'<span class="bar"><i><b style="width:{width:.1f}%"></b></i>{cells[1]}</span>'
        lines.append(_row("td", cells, ' class="best"' if share == best and len(rows) > 1 else ""))
    failed = "".join(
        f'<p class="bad">{escape(str(name))} did not finish: {escape(str(error))}</p>'
        for name, error in race.get("failed", {}).items()
    )
    busy = f'<p class="bad">{BUSY_NOTE}</p>' if best > MOST_OF_IDEAL else ""
    return f'<div class="card">{_table(header, lines)}{busy}<p class="soft note">{SHARE_NOTE}</p>{failed}</div>'


def limits(found: Sequence[dict[str, Any]]) -> str:
    header, rows = limit_rows(found)
    if not rows:
        return ""
    lines = [_row("td", [escape(cell) for cell in row]) for row in rows]
    common = next(result["limit"] for result in found if "limit" in result)  # but for the shares it is equal in all
    facts = [
        f"noise scale {amount(common['noise_scale'])} samples",
        f"an all-reduce {milliseconds(common['comm_seconds'])}",
        f"best batch {amount(common['best_batch'])} samples",
    ]
    if common["seconds"] is not None:
        facts.append(f"time of the limit to the target {seconds(common['seconds'])}")
    told = [f"Here: {', '.join(facts)}.", *([NO_LIMIT_NOTE] if common["seconds"] is None else []), LIMIT_NOTE]
    notes = "".join(f'<p class="soft note">{text}</p>' for text in told)
    return f'<h2>How far from the limit</h2><div class="card">{_table(header, lines)}{notes}</div>'


def shares(workers: Sequence[Mapping[str, Any]], length: float) -> str:
    """What each worker did with the whole run, as bars."""
    lanes = "".join(_shares(worker) for worker in workers[:MAX_WORKERS])
    left_out = len(workers) - MAX_WORKERS
    note = f'<p class="soft note">{left_out} more are not shown.</p>' if left_out > 0 else ""
    return f"<h4>Shares of the whole run, {seconds(length)}; in figures: computing</h4>{lanes}{note}"


def _shares(worker: Mapping[str, Any]) -> str:
    words = ", ".join(f"{state} {percent(worker[state])}" for state in STATES)
    bars = "".join(f'<i class="{state}" style="width:{100 * worker[state]:.2f}%"></i>' for state in STATES)
    name = f"rank {escape(str(worker['rank']))} <small>{worker['speed']:,.0f}/s</small>"
    title = f"rank {worker['rank']}: {words}"
    bar = f'<div class="shares" role="img" aria-label="{title}" title="{title}">{bars}</div>'
    return f'<div class="lane"><span>{name}</span>{bar}<span>{percent(worker["computing"])}</span></div>'


def samples(found: Sequence[Mapping[str, Any]], runs: Mapping[str, Sequence[Event]]) -> str:
    """The account: where every computed sample went."""
    header = ["strategy", "computed", "applied", "discarded", "in flight at the end", "sent", "adds up"]
    lines, problems = [], []
    for result in found:
        name = str(result["strategy"])
        books = account(runs.get(name, []))
        numbers = [count(n) for n in (books.computed, books.applied, books.discarded, books.in_flight)]
        verdict = '<span class="bad">no</span>' if books.errors else "yes"
        lines.append(_row("td", [escape(name), *numbers, size(result["bytes_sent"]), verdict]))
        problems += [f'<p class="bad">{escape(name)}: {escape(error)}.</p>' for error in books.errors[:5]]
    note = f'<p class="soft note">{ACCOUNT_NOTE}</p>'
    return f'<div class="card">{_table(header, lines)}{note}{"".join(problems)}</div>'


def warnings(found: Sequence[Mapping[str, Any]], runs: Mapping[str, Sequence[Event]]) -> str:
    """Who did not come to an end, and what the user was told, once each."""
    lines = []
    for result in found:
        name = str(result["strategy"])
        events = runs.get(name, [])
        told = dict.fromkeys(str(event["text"]) for event in events if event["kind"] == "warning")
        lines += [f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for text in [*_unended(events), *list(told)[:10]]]
    return f'<h2>Warnings</h2><div class="card"><ul>{"".join(lines)}</ul></div>' if lines else ""


def _unended(events: Sequence[Event]) -> list[str]:
    begun, ended = ({event["rank"] for event in events if event["kind"] == kind} for kind in ("start", "end"))
    left = sorted(begun - ended)
    if not left:
        return []
    return [f"The record of {ranks(left)} has no end: the process was killed or lost, or the run still went on."]


def dot(index: int) -> str:
    """The colour by which the charts know the strategy."""
    return f'<i class="dot" style="background:var(--s{index % COLOURS})"></i>'


def _table(header: Sequence[str], lines: Sequence[str]) -> str:
    head = _row("th", [escape(cell) for cell in header])
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table></div>'


def _row(cell: str, texts: Sequence[str], attributes: str = "") -> str:
    return f"<tr{attributes}>" + "".join(f"<{cell}>{text}</{cell}>" for text in texts) + "</tr>"
