"""How a training function tells metrics and checkpoints to the driver that has called `fit`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from paceline.errors import PacelineError

_boards: list[Board] = []
REPORTED = "reported"


@dataclass(frozen=True)
class Report:
    """What one call of `report` said."""

    rank: int
    metrics: dict[str, Any]
    checkpoint: Path | None = None


class Board:
    """Where the reports of this process go, as long as its block lasts.

    Args:
        control: the actor that keeps them.
        rank: of this process.
        folder: the run's.
    """

    def __init__(self, control: Any, rank: int, folder: Path) -> None:
        self._control, self._rank, self._folder = control, rank, folder
        self._kept = 0

    def tell(self, metrics: Mapping[str, Any], checkpoint: Path | None) -> None:
        import ray

        kept = None if checkpoint is None else self._keep(checkpoint)
        ray.get(self._control.report.remote(Report(self._rank, dict(metrics), kept)))

    def _keep(self, checkpoint: Path) -> Path:
        """A copy in the run's folder, whole or not at all; after those of a process in whose place this one is."""
        self._kept += 1
        while (kept := self._folder / REPORTED / f"rank-{self._rank:04d}-{self._kept:06d}").exists():
            self._kept += 1
        aside = kept.with_name(f".{kept.name}.part")
        try:
            shutil.copytree(checkpoint, aside)
            aside.rename(kept)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise PacelineError(
                f"The checkpoint {checkpoint} could not be kept in {kept}: {error}.",
                remedy="Give a directory that exists, and enough room to fit(out=...).",
            ) from error
        return kept

    def __enter__(self) -> Self:
        _boards.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _boards.remove(self)


def report(metrics: Mapping[str, Any], checkpoint: str | os.PathLike[str] | Any = None) -> None:
    """Tell the driver how training goes, as `ray.train.report` does; returns when the driver's side has it.

    Unlike there, ranks need not call it equally often, and it is no barrier: fast ranks go through their loops more
    often than slow ones. The first rank of those that are here counts for metrics, so `if run.rank == 0:` may stand
    before it, or not.

    Args:
        metrics: numbers and texts by name.
        checkpoint: a directory with whatever you have saved, or a `ray.train.Checkpoint` of one; it is copied into the
            run's folder. What `run.save()` writes is there already and needs no report.
    """
    if not _boards:
        raise PacelineError(
            "There is nobody to report to.",
            cause="report() tells the driver of paceline.ray.fit, and this process was not started by it.",
            remedy="Under other launchers use run.report() or Run(callbacks=...).",
        )
    directory = None if checkpoint is None else Path(getattr(checkpoint, "path", checkpoint))
    _boards[-1].tell(metrics, directory)
