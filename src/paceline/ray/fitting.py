"""`fit`: a training function on workers that Ray places, with the conventions of Ray Train."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.last_words import last_error
from paceline.launch.local import Launch, ended_by_sigterm
from paceline.launch.surroundings import new_run
from paceline.ray.cluster import RayCluster, import_ray
from paceline.ray.needs import Wanted, needs_of
from paceline.ray.reporting import Report


@dataclass(frozen=True)
class Result:
    """What came of a training; the first five as in `ray.train.Result`.

    Args:
        metrics: that were reported last, by the first rank of those that are here; None if nobody has reported.
        checkpoint: the directory that was reported last, else the newest whole one of `run.save()`, if any.
        error: why training failed, or None.
        path: the run's folder.
        history: all metrics of that rank, in order.
        lost: the ranks that the run went on without, and how each ended.
    """

    metrics: dict[str, Any] | None
    checkpoint: Path | None
    error: PacelineError | None
    path: Path
    history: list[dict[str, Any]] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)


class TrainingFailed(PacelineError):  # noqa: N818  # Ray's own is called TrainingFailedError
    """Raised by `fit`; `result` is what there was until then, the last checkpoint above all."""

    result: Result


def fit(
    train_function: Callable[..., object],
    config: Mapping[str, Any] | None = None,
    *,
    workers: Wanted = 1,
    servers: Wanted = 0,
    placement: str = "PACK",
    name: str = "fit",
    out: str | Path = "runs",
    address: str | None = None,
    **launching: Any,
) -> Result:
    """Call the function in every worker, and wait for all.

    The function is the one that you would give to Ray Train: it makes its model and data and trains; around the loop
    stands `with paceline.Run(...)`. It may tell how it goes with `paceline.ray.report`.

    Args:
        train_function: takes the config, or nothing.
        config: for the function.
        workers: how many, of one core each; or a list of what each needs, which may differ:
            `[{"GPU": 1, "accelerator_type:A100": 0.001}, {"CPU": 4}, {"CPU": 2, "label_selector": {"pool": "old"}}]`.
        servers: further processes that serve, for strategies with servers; told as workers are.
        placement: `PACK` on few nodes, `SPREAD` over many, or their strict forms.
        name: the run's folder is OUT/NAME/TIME.
        out: where runs are kept; a place that all nodes share, if there are several.
        address: of a running cluster; by default that of `RAY_ADDRESS`, or one is started here. If this process is
            connected to Ray already, that one is used.
        launching: port, time-outs, and `replace`, how often a worker that was lost is started again: see `launch`.

    Returns:
        The result. A run that went on without lost workers has not failed; `result.lost` names them.

    Raises:
        TrainingFailed: with the first error of all, and the result until then.
    """
    import_ray()
    cluster = RayCluster(
        address, needs_of(workers, "workers", 1), needs_of(servers, "servers", 0), placement, functions=True
    )
    call = functools.partial(
        train_function, *([dict(config or {})] if inspect.signature(train_function).parameters else [])
    )
    with ended_by_sigterm(), cluster.connected():
        with cluster.team(new_run(Path(out) / name), **launching) as team:
            outcome = team.run_function(call)
            reports = team.control.reports()
        return _result(outcome, reports, team.folder, team.where)


def _result(outcome: Launch, reports: list[Report], folder: Path, where: Mapping[int, str]) -> Result:
    failed = outcome.first_failed
    error = None
    if failed is not None:
        words = "\n".join(last_error(outcome.last_words[failed]))
        error = TrainingFailed(
            f"Rank {failed} on {where[failed]} failed first ({outcome.how(failed)}).\n{words}".rstrip()
        )
    lost = {rank: outcome.how(rank) for rank in outcome.lost}
    counted = min((told.rank for told in reports if told.rank not in lost), default=None)
    if counted is None:  # whoever has reported was lost
        counted = min((told.rank for told in reports), default=None)
    history = [told.metrics for told in reports if told.rank == counted]
    result = Result(history[-1] if history else None, _checkpoint(reports, folder), error, folder, history, lost)
    if error is not None:
        error.result = result
        raise error
    return result


def _checkpoint(reports: list[Report], folder: Path) -> Path | None:
    reported = [told.checkpoint for told in reports if told.checkpoint is not None]
    if reported:
        return reported[-1]
    from paceline.run.checkpoint import read_latest

    found = read_latest(folder / "checkpoints")
    return None if found is None else found[0]
