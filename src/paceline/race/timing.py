"""`paceline simulate`: timing only, in virtual time, without torch."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import cycle, islice
from math import inf
from pathlib import Path
from typing import Any

from paceline.backends.learners import TimingLearner
from paceline.backends.simulated import Simulation, simulate
from paceline.errors import PacelineError
from paceline.race.spec import ONE_MACHINE, with_servers
from paceline.record import Event, MemoryRecorder
from paceline.report.words import count, percent
from paceline.simulator.cluster import Cluster
from paceline.simulator.cluster_file import read_cluster
from paceline.strategies import create
from paceline.versions import versions

BYTES_PER_PARAMETER = 4
DEFAULT_MICRO_BATCH_SECONDS = 0.1


def cluster_of(
    workers: int | None,
    speeds: tuple[float, ...],
    file: Path | None,
    micro_batch_seconds: float | None,
    seed: int | None,
) -> Cluster:
    """The cluster that the options describe; with a number of workers the devices are repeated in turn."""
    if bool(speeds) == (file is not None):
        raise PacelineError("Give either speeds or a cluster file.", remedy="For example --speeds 1,1,0.5,0.25.")
    if file is not None:
        if micro_batch_seconds is not None:
            raise PacelineError("A cluster file says itself how long a micro-batch takes.", where=str(file))
        cluster = read_cluster(file)
    else:
        seconds = DEFAULT_MICRO_BATCH_SECONDS if micro_batch_seconds is None else micro_batch_seconds
        cluster = Cluster.from_speeds(speeds, micro_batch_seconds=seconds, network=ONE_MACHINE)
    if workers is not None:
        cluster = replace(cluster, devices=tuple(islice(cycle(cluster.devices), workers)))
    return cluster if seed is None else replace(cluster, seed=seed)


def simulate_timing(
    strategy: str,
    cluster: Cluster,
    *,
    seconds: float,
    micro_batch: int,
    parameters: int,
    servers: int | None = None,
    report: Path | None = None,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Simulate, print a summary, and return what `--json` holds: a race of one strategy without metrics.

    Args:
        strategy: name and options.
        cluster: to simulate.
        seconds: of virtual time.
        micro_batch: samples in a micro-batch.
        parameters: of the model; they decide what an all-reduce costs.
        servers: for a strategy that has some; None is as many as the cluster's file says or the strategy takes.
        report, trace: files to write. Either needs every single event, which costs time and memory.
    """
    if not 0 < seconds < inf:
        raise PacelineError(f"A simulation of {seconds:g} seconds is not possible.", remedy="Give more than zero.")
    cluster = with_servers(cluster, create(strategy), servers)
    recorder = MemoryRecorder() if report or trace else None
    learner = TimingLearner(nbytes=parameters * BYTES_PER_PARAMETER)
    began = time.perf_counter()
    outcome = time_strategy(strategy, cluster, learner, seconds=seconds, micro_batch=micro_batch, recorder=recorder)
    rate = outcome.events / (time.perf_counter() - began)
    served = f" and {cluster.servers} servers" if cluster.servers else ""
    print(
        f"{strategy} on {cluster.workers} workers{served} for {outcome.seconds:.2f} virtual seconds: "
        f"{percent(outcome.share_of_ideal)} of ideal, {count(outcome.rounds)} rounds, "
        f"{count(outcome.samples_applied)} samples; {count(outcome.events)} events at {count(round(rate))} a second."
    )
    result = {
        "results": [_result(strategy, cluster, micro_batch, outcome)],
        "ideal_samples_per_second": outcome.ideal_samples_per_second,
        "speeds": [device.speed for device in cluster.devices],
        "workload": "timing only",
        "seed": cluster.seed,
        "events": outcome.events,
        "events_per_second": rate,
        "versions": versions(),
    }
    if recorder is not None:
        _write_files(result, {strategy: recorder.events}, report, trace)
    return result


def time_strategy(
    strategy: str,
    cluster: Cluster,
    learner: TimingLearner,
    *,
    seconds: float,
    micro_batch: int,
    recorder: MemoryRecorder | None = None,
) -> Simulation:
    """What becomes of a strategy on a cluster that has the servers that it needs; the learner says what a gradient
    weighs."""
    return simulate(
        create(strategy),
        cluster,
        micro_batch=micro_batch,
        seconds=seconds,
        learners=[learner] * cluster.ranks,
        recorder=recorder,
    )


def _write_files(result: dict[str, Any], runs: dict[str, list[Event]], report: Path | None, trace: Path | None) -> None:
    from paceline.report.html import write_report
    from paceline.report.trace import write_trace

    if report is not None:
        words = {"title": "Paceline simulation", "note": "Virtual time, timing only: nothing was learned."}
        write_report(report, words | result, runs)
        print(f"Report: {report}")
    if trace is not None:
        write_trace(trace, runs)
        print(f"Trace: {trace}")


def _result(strategy: str, cluster: Cluster, micro_batch: int, outcome: Simulation) -> dict[str, Any]:
    workers = []
    for rank, totals in enumerate(outcome.workers):
        computing, communicating = totals.computing / outcome.seconds, totals.communicating / outcome.seconds
        workers.append(
            {
                "rank": rank,
                "speed": micro_batch / cluster.mean_seconds(rank),
                "samples": totals.applied,
                "computing": computing,
                "communicating": communicating,
                "idle": max(0.0, 1 - computing - communicating),
            }
        )
    return {
        "strategy": strategy,
        "backend": "simulated",
        "seconds": outcome.seconds,
        "share_of_ideal": outcome.share_of_ideal,
        "time_to_target": None,
        "final_metric": None,
        "final_loss": None,
        "rounds": outcome.rounds,
        "samples_computed": outcome.samples_computed,
        "samples_applied": outcome.samples_applied,
        "samples_discarded": outcome.samples_discarded,
        "bytes_sent": outcome.bytes_sent,
        "workers": workers,
    }
