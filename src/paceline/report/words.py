"""Numbers as people read them: the table, the live display and the page must say the same thing the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NOTHING = "-"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f} %"


def seconds(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f} s"


def milliseconds(value: float | None) -> str:
    """
    >>> milliseconds(0.0123), milliseconds(2.5), milliseconds(None)
    ('12.3 ms', '2,500 ms', '-')
    """
    return NOTHING if value is None else f"{1000 * value:,.{1 if value < 1 else 0}f} ms"


def number(value: float | None) -> str:
    """A metric or a loss.

    >>> number(0.91666), number(None)
    ('0.917', '-')
    """
    return NOTHING if value is None else f"{value:.3f}"


def count(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def amount(value: float | None) -> str:
    """About so many, of what need not be whole.

    >>> amount(0.25), amount(44), amount(12345.6), amount(float("inf"))
    ('0.25', '44', '12,346', '∞')
    """
    if value is None or value == float("inf"):
        return NOTHING if value is None else "∞"
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def size(value: int) -> str:
    """Bytes.

    >>> size(999), size(123_456_789)
    ('999 B', '123.5 MB')
    """
    amount, unit = float(value), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def ranks(numbers: Sequence[int]) -> str:
    """
    >>> ranks([3]), ranks([0, 1, 2]), ranks([0, 1, 2, 3, 4, 5])
    ('rank 3', 'ranks 0, 1, 2', 'ranks 0, 1, 2, 3 and 2 more')
    """
    shown = ", ".join(map(str, numbers[:4]))
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{more}"


def race_rows(race: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The race's results as a header and rows of text."""
    header = ["strategy", "share of ideal", "of limit", "to target", "metric", "loss", "samples", "idle", "rounds"]
    return header, [_race_row(result) for result in race["results"]]


def limit_rows(results: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """How far from the limit each result stayed, as a header and rows of text; results that do not say it have none."""
    header = ["strategy", "of limit", "hardware", "batch", "statistics"]
    keys = ("share", "hardware", "batch", "statistics")
    rows = [[str(r["strategy"]), *(percent(r["limit"][key]) for key in keys)] for r in results if "limit" in r]
    return header, rows


def _race_row(result: dict[str, Any]) -> list[str]:
    idle = [worker["idle"] for worker in result["workers"]]
    return [
        str(result["strategy"]),
        percent(result["share_of_ideal"]),
        percent(result["limit"]["share"] if "limit" in result else None),
        seconds(result["time_to_target"]),
        number(result["final_metric"]),
        number(result["final_loss"]),
        count(result["samples_applied"]),
        percent(sum(idle) / len(idle) if idle else None),
        count(result["rounds"]),
    ]
