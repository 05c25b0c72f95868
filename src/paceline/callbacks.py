"""Where the numbers of a run go while it runs: an interface of three methods, and two that fill it in.

`metrics.jsonl` in the run's folder is always written. TensorBoard, W&B, MLflow and whatever else are callbacks:

    paceline.Run(strategy="abs-sgd", callbacks=[TensorBoard()])

All are called on rank 0, by one thread of their own, which training never waits for. One that raises an error is
reported once and left out from then on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, Protocol

from paceline.errors import PacelineError
from paceline.record import Event

EVERY_SECONDS = 1.0
"""Of the run's own time, real or virtual: often enough for a curve, rare enough for any service that stores it."""


class Callback(Protocol):
    """What a user fills in; docs/reports.md has W&B and MLflow."""

    def begin(self, info: dict[str, Any]) -> None:
        """Training begins. `info` has the strategy with its options, the workers, the data, the versions, and `folder`,
        the run's own, and `began`, the `time.time()` that the run's seconds count from."""

    def scalars(self, samples: int, values: dict[str, float]) -> None:
        """Numbers by name, after so many samples over all ranks: those of `Scalars`, or a `metric` and `loss` that were
        reported, which may be of an earlier moment. `seconds` is always among them."""

    def end(self, summary: dict[str, Any]) -> None:
        """It is over: the last numbers, and in `error` what ended it, empty when nothing did."""


class Scalars:
    """Turns the events of a rank into numbers, at most every `EVERY_SECONDS`.

    | name               | what                                                                          |
    |--------------------|-------------------------------------------------------------------------------|
    | seconds            | since the run began                                                           |
    | rounds             | steps of the model so far                                                     |
    | samples_per_second | over all ranks, since the last time                                           |
    | samples_per_round  | the same, a step                                                              |
    | computing, waiting | shares of this rank's time, since the last time                               |
    | discarded          | samples of this rank so far                                                   |
    | noise_scale        | of the gradients, in samples, as last estimated                               |

    Args:
        applied: samples over all ranks so far; None adds up those of the events, which must be all ranks' then if the
            ranks step alone.

    >>> scalars = Scalars()
    >>> run = [{"kind": "start", "rank": 0, "t": 0.0},
    ...        {"kind": "compute", "rank": 0, "t": 0.0, "end": 1.5, "samples": 30},
    ...        {"kind": "applied", "rank": 0, "t": 2.0, "round": 0, "samples": 60, "own": 30}]
    >>> [scalars.see(event) for event in run][-1]
    (60, {'seconds': 2.0, 'rounds': 1, 'samples_per_second': 30.0, 'samples_per_round': 60.0, 'computing': 0.75, \
'waiting': 0.0, 'discarded': 0})
    """

    def __init__(self, applied: Callable[[], int] | None = None) -> None:
        self._applied, self._told = applied, 0
        self.rounds = self._discarded = 0
        self.last: dict[str, float] = {}
        self._began: float | None = None
        self._busy = {"computing": 0.0, "waiting": 0.0}
        self._noise: float | None = None
        self._before = (0, 0)

    @property
    def samples(self) -> int:
        """Applied so far, over all ranks."""
        return self._told if self._applied is None else self._applied()

    def see(self, event: Event) -> tuple[int, dict[str, float]] | None:
        """The samples and the numbers, if it is time for some."""
        first = event["rank"] == 0
        match event["kind"]:
            case "start" if first:
                self._began, self._before = event["t"], (self.samples, 0)
            case "compute" | "wait" if first:
                self._busy["computing" if event["kind"] == "compute" else "waiting"] += event["end"] - event["t"]
            case "discard" if first:
                self._discarded += event["samples"]
            case "noise" if event["squared_norm"] > 0:
                self._noise = max(event["variance"] / event["squared_norm"], 0.0)
            case "metric":
                values = {"seconds": event["t"], "metric": event["metric"], "loss": event["loss"]}
                self.last |= values
                return event["samples"], values
            case "applied" | "step" if first or event["kind"] == "step":
                self._told += event["samples"]
                self.rounds += first and event["samples"] > 0
                if first and self._began is not None and event["t"] - self._began >= EVERY_SECONDS:
                    return self._window(event["t"], event["t"] - self._began)
        return None

    def _window(self, t: float, length: float) -> tuple[int, dict[str, float]]:
        samples, rounds = self.samples, self.rounds
        more, steps = samples - self._before[0], rounds - self._before[1]
        values = {"seconds": t, "rounds": rounds, "samples_per_second": more / length}
        if steps:
            values["samples_per_round"] = more / steps
        # A micro-batch may have begun before the window did.
        values |= {name: min(busy / length, 1.0) for name, busy in self._busy.items()}
        values["discarded"] = self._discarded
        if self._noise is not None:
            values["noise_scale"] = self._noise
        self._began, self._before, self._busy = t, (samples, rounds), dict.fromkeys(self._busy, 0.0)
        self.last |= values
        return samples, values

    def summary(self, error: str = "") -> dict[str, Any]:
        """What `Callback.end` is told."""
        told: dict[str, Any] = {"samples": self.samples, "rounds": self.rounds, "error": error}
        return told | {name: self.last[name] for name in ("seconds", "metric", "loss") if name in self.last}


class JsonLines:
    """`metrics.jsonl` in the run's folder: one JSON object a line, with `samples` and the values.

    Args:
        file: another place for it.
    """

    def __init__(self, file: Path | str | None = None) -> None:
        self._path = None if file is None else Path(file)
        self._file: IO[str] | None = None

    def begin(self, info: dict[str, Any]) -> None:
        path = self._path or Path(info["folder"]) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", buffering=1)  # whoever watches sees whole lines

    def scalars(self, samples: int, values: dict[str, float]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({"samples": samples, **values}) + "\n")

    def end(self, summary: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard in `tb/` of the run's folder, by tensorboardX; steps are samples over all ranks.

    Args:
        folder: another place for them.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise PacelineError(
                "For TensorBoard the package tensorboardX is missing.",
                remedy="Install it with: pip install 'paceline[tensorboard]'.",
            ) from None
        self._folder, self._new_writer = folder, SummaryWriter
        self._writer: Any = None
        self._began = 0.0

    def begin(self, info: dict[str, Any]) -> None:
        self._began = float(info["began"])
        self._writer = self._new_writer(str(self._folder or Path(info["folder"]) / "tb"))
        told = {name: value for name, value in info.items() if name != "folder"}
        self._writer.add_text("run", f"```\n{json.dumps(told, indent=1, default=str)}\n```")

    def scalars(self, samples: int, values: dict[str, float]) -> None:
        moment = self._began + values["seconds"]
        for name, value in values.items():
            if name != "seconds":
                self._writer.add_scalar(name, value, samples, walltime=moment)

    def end(self, summary: dict[str, Any]) -> None:
        self._writer.close()


def replay(events: Iterable[Event], callback: Callback, info: dict[str, Any]) -> None:
    """Tell a callback of a run that is over: a simulated one, or any whose events were kept.

    Args:
        events: of all ranks, in order of time.
        callback: to be told.
        info: for its `begin`.
    """
    scalars = Scalars()
    callback.begin(info)
    for event in events:
        told = scalars.see(event)
        if told is not None:
            callback.scalars(*told)
    callback.end(scalars.summary())
