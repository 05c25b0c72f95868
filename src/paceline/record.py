"""The one record of what happened. Progress, report, trace and race all read it; both backends write it.

Every event is a flat dictionary with `kind`, `rank` and `t` (seconds since the run began, wall or virtual):

| kind     | further fields                | meaning                                                              |
|----------|-------------------------------|----------------------------------------------------------------------|
| start    | pid                           | the rank is ready for its first micro-batch                          |
| compute  | end, samples                  | one micro-batch was computed from `t` to `end`                       |
| join     | round, samples, bytes         | the rank started the collective of the round with so many samples    |
| wait     | end, round                    | the rank stood still from `t` to `end` for the round's collective    |
| applied  | round, samples, own           | a step over `samples` of all ranks, `own` of them this rank's        |
| discard  | samples, reason               | computed, but not used                                               |
| metric   | samples, metric, loss         | held-out metric and loss of a snapshot taken at `t`                  |
| warning  | text                          | something that the user should know                                  |
| end      |                               | the rank is done                                                     |
"""

from __future__ import annotations

from typing import Any, Protocol

Event = dict[str, Any]


class Recorder(Protocol):
    """Where a rank's events go. Writing never blocks training."""

    def write(self, kind: str, rank: int, t: float, **fields: Any) -> None: ...
