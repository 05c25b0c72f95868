"""`paceline limit`: what no method can beat on a cluster, and how near to it each kind of method can come.

Everything here is *at best*: devices without jitter, shares that fit, and gradients that lose nothing by being late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from paceline.errors import PacelineError
from paceline.report.table import as_table, as_text, show
from paceline.report.words import NOTHING, amount, milliseconds, percent
from paceline.rules.limit import Limit, limit, samples_by, split, time_for


@dataclass(frozen=True)
class Method:
    """A way to train: updates over `batch` samples, one every `step_seconds`."""

    name: str
    batch: int
    step_seconds: float

    def as_dict(self, bound: Limit) -> dict[str, Any]:
        """With its share of the limit, split into what its devices use and what its batch costs."""
        hardware = self.batch / (bound.speed * self.step_seconds)
        return {
            "method": self.name,
            "batch": self.batch,
            "step_seconds": self.step_seconds,
            "hardware": hardware,
            "batch_share": split(bound, hardware=hardware, batch=self.batch).batch,
            "share": bound.share(self.batch, self.step_seconds),
        }


def methods(speeds: Sequence[float], comm_seconds: float, micro_batch: int) -> list[Method]:
    """The three kinds of strategies there are.

    Args:
        speeds: of each worker, samples a second.
        comm_seconds: what an all-reduce takes.
        micro_batch: samples in a micro-batch.

    >>> for method in methods([100.0, 50.0], comm_seconds=0.1, micro_batch=10):
    ...     print(method)
    Method(name='all-reduce', batch=20, step_seconds=0.30000000000000004)
    Method(name='balanced', batch=20, step_seconds=0.24000000000000002)
    Method(name='abs-sgd', batch=15, step_seconds=0.1)
    """
    together = len(speeds) * micro_batch
    # Slow workers take smaller micro-batches: a round lasts as long as one of the fastest, or as the all-reduce.
    overlapped = max(micro_batch / max(speeds), comm_seconds)
    return [
        Method("all-reduce", together, micro_batch / min(speeds) + comm_seconds),
        Method("balanced", together, time_for(together, speeds) + comm_seconds),
        Method("abs-sgd", samples_by(overlapped, speeds), overlapped),
    ]


def show_limit(
    speeds: Sequence[float],
    *,
    noise_scale: float | None,
    comm_seconds: float,
    micro_batch_seconds: float,
    micro_batch: int,
) -> dict[str, Any]:
    """Print the limit of a cluster, and return what `--json` holds.

    Args:
        speeds: of the workers, relative to one that needs `micro_batch_seconds`.
        noise_scale: in samples.
        comm_seconds: what an all-reduce takes.
        micro_batch_seconds: of a worker with speed 1.
        micro_batch: samples in a micro-batch.
    """
    if not speeds:
        raise PacelineError("There are no workers.", remedy="Give their speeds, for example --speeds 1,1,0.5,0.25.")
    if noise_scale is None:
        raise PacelineError(
            "The limit depends on the noise of the gradients.",
            remedy="Give --noise-scale in samples: `paceline race` measures it and writes it into its report.",
        )
    if not 0 < micro_batch_seconds < float("inf"):
        raise PacelineError("A micro-batch must take more than zero seconds, and not for ever.")
    rates = [speed * micro_batch / micro_batch_seconds for speed in speeds]
    bound = limit(rates, noise_scale, comm_seconds)
    lines = [method.as_dict(bound) for method in methods(rates, comm_seconds, micro_batch)]
    print(_headline(bound, len(speeds)))
    header, rows = _rows(bound, lines)
    show(as_table(header, rows, [True]), as_text(header, rows))
    print(_what_binds(bound))
    return {
        "samples_per_second": bound.speed,
        "noise_scale": _finite(bound.noise_scale),
        "comm_seconds": bound.comm_seconds,
        "best_batch": _finite(bound.batch),
        "step_seconds": _finite(bound.step_seconds),
        "seconds_per_step_min": _finite(bound.seconds_per_step_min),
        "binds": bound.binds,
        "methods": lines,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if isfinite(value) else None


def _headline(bound: Limit, workers: int) -> str:
    return (
        f"{workers} {'worker' if workers == 1 else 'workers'}, {amount(bound.speed)} samples a second together; "
        f"noise scale {amount(bound.noise_scale)} samples; an all-reduce takes {milliseconds(bound.comm_seconds)}."
    )


def _rows(bound: Limit, lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["at best", "batch", "step", "updates/s", "hardware", "batch share", "of limit", "time"]
    known = isfinite(bound.step_seconds)
    step, updates = (bound.step_seconds, amount(1 / bound.step_seconds)) if known else (None, NOTHING)
    rows = [["limit", amount(bound.batch), milliseconds(step), updates, NOTHING, NOTHING, percent(1.0), "1.00 x"]]
    rows += [
        [
            line["method"],
            amount(line["batch"]),
            milliseconds(line["step_seconds"]),
            amount(1 / line["step_seconds"]),
            percent(line["hardware"]),
            percent(line["batch_share"]),
            percent(line["share"]),
            f"{1 / line['share']:.2f} x",
        ]
        for line in lines
    ]
    return header, rows


def _what_binds(bound: Limit) -> str:
    """One sentence: which of the three to change."""
    if bound.binds == "noise":
        part = bound.noise_scale / (bound.batch + bound.noise_scale) if isfinite(bound.noise_scale) else 1.0
        return (
            f"The noise of the gradients binds: averaging it away takes {percent(part)} of the limit's time, so that "
            "samples a second count, and a quicker update saves little."
        )
    if bound.binds == "communication":
        return (
            f"Communication binds: no update is quicker than the all-reduce, and by then {amount(bound.batch)} samples "
            "are computed anyway, enough to leave little noise; a faster network helps most."
        )
    return (
        f"The devices bind: the best update waits {milliseconds(bound.compute_seconds)} for its "
        f"{amount(bound.batch)} samples, longer than for the network; faster devices help most."
    )
