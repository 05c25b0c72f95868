"""What a rank that failed has to say: the last error among the lines that it wrote."""

from __future__ import annotations

TRACEBACK = "Traceback (most recent call last)"
CHAINED = ("During handling of the above", "The above exception was the direct cause")


def last_error(lines: list[str]) -> list[str]:
    """The last traceback and what follows it; the last few lines if there is none.

    >>> last_error(["Loading", "Traceback (most recent call last):", "  File ...", "ValueError: bad"])
    ['Traceback (most recent call last):', '  File ...', 'ValueError: bad']
    """
    starts = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    while len(starts) > 1 and lines[starts[-1] - 2].startswith(CHAINED):  # it was raised while another was handled
        starts.pop()
    return lines[starts[-1] :] if starts else lines[-15:]
