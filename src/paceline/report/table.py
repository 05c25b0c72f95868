"""Results on the terminal, and as plain aligned text where there is none (logs, pipes, CI)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.report.words import race_rows


def as_table(header: Sequence[str], rows: Sequence[Sequence[str]], best: Sequence[bool] = ()) -> Table:
    """A rich table with names in the first column and numbers in the others; the rows marked as best stand out."""
    # Little padding: a terminal may have no more than 80 columns, and rich cuts off what does not fit.
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", collapse_padding=True, pad_edge=False)
    for place, column in enumerate(header):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for place, row in enumerate(rows):
        # Text, not str: rich would read square brackets in a name as markup
        table.add_row(*map(Text, row), style="bold green" if place < len(best) and best[place] else "")
    return table


def as_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as plain text.

    >>> print(as_text(["name", "size"], [["a", "10"], ["long", "9"]]))
    name  size
    a       10
    long     9
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        name, *numbers = row
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def race_table(race: dict[str, Any]) -> Table:
    """The race's results; the best share of ideal stands out."""
    header, rows = race_rows(race)
    shares = [result["share_of_ideal"] for result in race["results"]]
    return as_table(header, rows, [share == max(shares) and len(rows) > 1 for share in shares])


def race_text(race: dict[str, Any]) -> str:
    """The same as plain text.

    >>> result = {"strategy": "abs-sgd", "share_of_ideal": 0.97, "time_to_target": None, "final_metric": 0.95,
    ...           "final_loss": 0.2, "samples_applied": 12345, "rounds": 80, "workers": [{"idle": 0.02}],
    ...           "limit": {"share": 0.75}}
    >>> print(race_text({"results": [result]}))
    strategy  share of ideal  of limit  to target  metric   loss  samples   idle  rounds
    abs-sgd           97.0 %    75.0 %          -   0.950  0.200   12,345  2.0 %      80
    """
    return as_text(*race_rows(race))


def show_race(race: dict[str, Any], console: Console | None = None) -> None:
    show(race_table(race), race_text(race), console)


def show(table: Table, text: str, console: Console | None = None) -> None:
    """Print what suits the place: the table on a terminal, the plain text elsewhere."""
    console = console or Console()
    if console.is_terminal:
        console.print(table)
    else:
        console.file.write(text + "\n")
