"""The race's result on the terminal, and as plain aligned text where there is none (logs, pipes, CI)."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.report.words import race_rows


def race_table(race: dict[str, Any]) -> Table:
    """A rich table; the best share of ideal stands out."""
    header, rows = race_rows(race)
    shares = [result["share_of_ideal"] for result in race["results"]]
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for column in header:
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    for row, share in zip(rows, shares, strict=True):
        # Text, not str: rich would read square brackets in a name as markup
        table.add_row(*map(Text, row), style="bold green" if share == max(shares) and len(rows) > 1 else "")
    return table


def race_text(race: dict[str, Any]) -> str:
    """The same as plain text.

    >>> result = {"strategy": "abs-sgd", "share_of_ideal": 0.97, "time_to_target": None, "final_metric": 0.95,
    ...           "final_loss": 0.2, "samples_applied": 12345, "rounds": 80, "workers": [{"idle": 0.02}]}
    >>> print(race_text({"results": [result]}))
    strategy  share of ideal  to target  metric   loss  samples   idle  rounds
    abs-sgd           97.0 %          -   0.950  0.200   12,345  2.0 %      80
    """
    header, rows = race_rows(race)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in [header, *rows]:
        name, *numbers = row
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def show_race(race: dict[str, Any], console: Console | None = None) -> None:
    """Print the result as it suits the place: a table on a terminal, plain text elsewhere."""
    console = console or Console()
    if console.is_terminal:
        console.print(race_table(race))
    else:
        console.file.write(race_text(race) + "\n")
