"""The race: each strategy in turn on the same cluster, and one table and report of all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from paceline.callbacks import JsonLines, replay
from paceline.errors import PacelineError
from paceline.launch.command import explain
from paceline.launch.local import launch
from paceline.launch.roles import environment_of_servers
from paceline.launch.surroundings import new_run
from paceline.race.emulation import COMPUTE_SHARE, LEAST_MICRO_BATCH_SECONDS, compute_seconds, solo_speed
from paceline.race.limit_of_race import contribution_bytes, measured_comm_seconds, shares_of_limit
from paceline.race.simulated import race_simulated
from paceline.race.spec import RaceSpec
from paceline.record import Event, read_events, write_events
from paceline.report.folder import strategy_folder
from paceline.report.html import write_report
from paceline.report.progress import Progress
from paceline.report.table import show_race
from paceline.simulator.cluster import Cluster
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.summary import summarise
from paceline.versions import versions
from paceline.workloads.workload import Workload


@dataclass(frozen=True)
class Course:
    """What all strategies of a race have in common, after the solo speeds are known."""

    spec: RaceSpec
    workload: Workload
    cluster: Cluster
    speeds: Sequence[float]  # samples a second of each worker alone

    @property
    def target(self) -> float:
        return self.workload.target if self.spec.target is None else self.spec.target


def run_race(spec: RaceSpec, out: Path) -> dict[str, Any]:
    """Run the race, print its table, write its report; the result is what `--json` holds."""
    workload = spec.load_workload()
    course = lay_out(spec, workload)
    folder = new_run(out / "race")
    (folder / "config.toml").write_text(tomli_w.dumps(_settings(course)))
    results, events, failed = [], {}, dict[str, PacelineError]()
    for strategy in spec.strategies:
        try:
            events[strategy] = _run_strategy(course, strategy, folder / strategy_folder(strategy))
            results.append(_result(course, strategy, events[strategy]))
        except PacelineError as error:  # the others are not to be lost with it
            print(f"{strategy}: {error}", flush=True)
            failed[strategy] = error
    if not results:
        raise next(iter(failed.values()))
    _add_limits(course, results, events)
    race = {
        "results": results,
        "ideal_samples_per_second": sum(course.speeds),
        "speeds": [device.speed for device in course.cluster.devices],
        "workload": spec.workload,
        "seed": spec.seed,
        "metric": workload.metric_name,
        "target": course.target,
        "failed": {strategy: str(error) for strategy, error in failed.items()},
        "micro_batch_seconds": course.cluster.micro_batch_seconds,
        **spec.learning(workload),
        "versions": versions(),
    }
    (folder / "race.json").write_text(json.dumps(race, indent=1) + "\n")
    show_race(race)
    write_report(folder / "report.html", race, events)
    print(f"Report: {folder / 'report.html'}")
    return race


def _run_strategy(course: Course, strategy: str, folder: Path) -> list[Event]:
    strategy = on_the_graph_of(course.cluster, strategy)
    course = replace(course, cluster=course.spec.with_servers(course.cluster, create(strategy)))
    if course.spec.backend == "processes":
        return _on_processes(course, strategy, folder)
    happened = race_simulated(course.spec, course.workload, course.cluster, strategy)
    write_events(folder / "events", happened)
    replay(happened, JsonLines(folder / "metrics.jsonl"), {})
    for text in dict.fromkeys(event["text"] for event in happened if event["kind"] in ("warning", "note")):
        print(f"{strategy}: {text}")
    return happened


def on_the_graph_of(cluster: Cluster, strategy: str) -> str:
    """The strategy; on the graph that a cluster file describes, if it needs one and names none itself."""
    chosen = create(strategy)
    needs_one = chosen.steps_alone and hasattr(chosen, "graph")
    if cluster.graph is None or not needs_one or "graph=" in strategy:
        return strategy
    return f"{strategy}:graph={cluster.graph.in_a_word(cluster.workers)}"


def lay_out(spec: RaceSpec, workload: Workload) -> Course:
    """Choose how long a micro-batch takes, and find what every worker can do alone."""
    if spec.backend == "simulated":
        cluster = spec.build_cluster(spec.micro_batch_seconds or LEAST_MICRO_BATCH_SECONDS)
        speeds = [workload.micro_batch / cluster.mean_seconds(rank) for rank in range(cluster.workers)]
        return Course(spec, workload, cluster, speeds)
    base = spec.micro_batch_seconds
    if base is None:
        base = max(LEAST_MICRO_BATCH_SECONDS, compute_seconds(workload, spec) / COMPUTE_SHARE)
    cluster = spec.build_cluster(base)
    if spec.cluster and (cluster.faults or cluster.network != Network()):
        print("Note: network and faults of a cluster file act only in the simulator; processes emulate its devices.")
    print(f"Measuring each of {cluster.workers} workers alone ...", flush=True)
    speeds = [solo_speed(workload, spec, cluster.mean_seconds(rank)) for rank in range(cluster.workers)]
    return Course(spec, workload, cluster, speeds)


def _on_processes(course: Course, strategy: str, folder: Path) -> list[Event]:
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(course.spec.to_json())
    command = [sys.executable, "-m", "paceline.race.worker", str(folder / "spec.json"), strategy]
    command.append(repr(course.cluster.micro_batch_seconds))
    with Progress(folder / "events", title=strategy):
        serving = environment_of_servers(course.cluster.servers)
        outcome = launch(command, course.cluster.ranks, folder, environment=serving, quiet=True)
    if not outcome.ok:
        explain(outcome, folder)
        raise PacelineError(
            f"The strategy {strategy} did not finish: rank {outcome.first_failed} failed first.",
            where=str(folder / "logs"),
        )
    return read_events(folder / "events")


def _result(course: Course, strategy: str, events: list[Event]) -> dict[str, Any]:
    summary = summarise(events, speeds=course.speeds, seconds=course.spec.seconds, target=course.target)
    return {"strategy": strategy, "backend": course.spec.backend, **summary.as_dict()}


def _add_limits(course: Course, results: list[dict[str, Any]], events: dict[str, list[Event]]) -> None:
    """How far from the limit each stayed: that takes the events of all of them."""
    limits = shares_of_limit(
        results,
        events,
        speeds=course.speeds,
        comm_seconds=_comm_seconds(course, events),
        target=course.target,
    )
    for result, share in zip(results, limits, strict=True):
        result["limit"] = share


def _comm_seconds(course: Course, events: dict[str, list[Event]]) -> float | None:
    """What an all-reduce takes: in the simulator the network says so, on processes it is measured."""
    workers = course.cluster.workers
    if course.spec.backend == "simulated":
        return course.cluster.network.all_reduce_seconds(workers, contribution_bytes(events.values()))
    return 0.0 if workers == 1 else measured_comm_seconds(events.values())


def _settings(course: Course) -> dict[str, Any]:
    """The race as a configuration: TOML knows no null, so what is not set is left out."""
    spec = json.loads(course.spec.to_json())
    chosen = {"target": course.target, "micro_batch_seconds": course.cluster.micro_batch_seconds}
    learning = course.spec.learning(course.workload)
    return {key: value for key, value in {**spec, **chosen, **learning}.items() if value is not None}
