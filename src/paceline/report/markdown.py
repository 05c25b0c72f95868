"""The report's tables as Markdown, to paste into a paper's draft, a README or a pull request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.record import Event
from paceline.report.words import count, limit_rows, percent, race_rows, size
from paceline.summary import account


def render_markdown(race: dict[str, Any], runs: Mapping[str, Sequence[Event]]) -> str:
    """All tables of the report, and below them what they were made with."""
    title = race.get("title", f"Paceline race: {race.get('workload', 'workload')}")
    parts = [f"# {title}", str(race["note"]) if "note" in race else "", "## Result", table(*race_rows(race))]
    limits = limit_rows(race["results"])
    if limits[1]:
        parts += ["## How far from the limit", table(*limits)]
    parts += ["## Workers", table(*_workers(race)), "## Where the samples went", table(*_account(race, runs))]
    made_with = ", ".join(f"{name} {version}" for name, version in race.get("versions", {}).items())
    return "\n\n".join(part for part in [*parts, made_with] if part) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up as plain text too.

    >>> print(table(["strategy", "idle"], [["abs-sgd", "2.0 %"], ["a|b", "30.0 %"]]))
    | strategy |   idle |
    |:---------|-------:|
    | abs-sgd  |  2.0 % |
    | a\\|b     | 30.0 % |
    """
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *others = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("| " + " | ".join([first.strip().ljust(widths[0]), *others]) + " |")
    rule = "|:" + "-" * (widths[0] + 1) + "".join(f"|{'-' * (width + 1)}:" for width in widths[1:]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _workers(race: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["strategy", "rank", "samples a second alone", "samples used", "computing", "communicating", "idle"]
    rows = []
    for result in race["results"]:
        for worker in result["workers"]:
            shares = [percent(worker[state]) for state in ("computing", "communicating", "idle")]
            told = [str(worker["rank"]), f"{worker['speed']:,.0f}", count(worker["samples"]), *shares]
            rows.append([str(result["strategy"]), *told])
    return header, rows


def _account(race: Mapping[str, Any], runs: Mapping[str, Sequence[Event]]) -> tuple[list[str], list[list[str]]]:
    header = ["strategy", "computed", "applied", "discarded", "in flight at the end", "sent", "adds up"]
    rows = []
    for result in race["results"]:
        name = str(result["strategy"])
        books = account(runs.get(name, []))
        numbers = [count(n) for n in (books.computed, books.applied, books.discarded, books.in_flight)]
        rows.append([name, *numbers, size(result["bytes_sent"]), "no" if books.errors else "yes"])
    return header, rows
