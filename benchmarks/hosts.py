"""Four hosts with slow links, as network namespaces: what every strategy makes of them, measured and simulated.

    scripts/bench hosts [--strategies all-reduce,abs-sgd,ddp] [--seconds 20] [--nproc 2 [--flat]] [--results FILE]
    scripts/bench hosts --extrapolate --data FOLDER [--plot FILE.svg]

Three links of 1 Gbit/s and one of 100 Mbit/s; 10 ms between two of the first three hosts, 50 ms to the fourth; devices
of equal speed. Needs root (see `scripts/hosts`). With --extrapolate only the simulator runs, on up to 1,024 hosts with
the recorded times of a real cluster.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from parts.four_hosts import LINKS, Ground
from parts.hosts_rank import DDP, PARAMETERS
from parts.many_hosts import extrapolated, picture, table

from paceline.race.links import reason_against
from paceline.strategies import STRATEGIES

COMPRESSED = ("all-reduce:compress=int8", "abs-sgd:compress=int8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategies", default=",".join([DDP, *STRATEGIES, *COMPRESSED]))
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--micro-batch-seconds", type=float, default=0.2)
    parser.add_argument("--nproc", type=int, default=1, help="workers on each host")
    parser.add_argument("--flat", action="store_true", help="sums in one ring of all workers, to compare with")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there already is not measured again")
    parser.add_argument("--extrapolate", action="store_true", help="to many hosts, in the simulator")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with traces/pai_job_1.csv, …")
    parser.add_argument("--plot", type=Path, help="file of the picture of --extrapolate")
    options = parser.parse_args()
    if options.extrapolate:
        extrapolate(options.data / "traces", options.plot)
    else:
        measure(options)


def extrapolate(traces: Path, plot: Path | None) -> None:
    if not (traces / "pai_job_1.csv").exists():
        print(f"Skipped: the recorded jobs are not in {traces}.")
        return
    found = []
    for each in extrapolated(traces):
        found.append(each)
        print(
            f"{each.links:50}{each.strategy:30}{each.hosts:6}{each.share:8.3f}{each.samples_per_round:14,.0f}"
            f"{each.seconds_per_round:10.2f} s",
            flush=True,
        )
    print(f"\n{table(found)}")
    if plot:
        plot.write_text(picture(found))


def measure(options: argparse.Namespace) -> None:
    why_not = reason_against()
    if why_not:
        print(f"Skipped: no hosts can be emulated, because {why_not}.")
        return
    ground = Ground(options.seconds, options.micro_batch_seconds, options.nproc, options.flat)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}; {PARAMETERS:,} parameters, {ground.workers} workers "
        f"on {len(LINKS)} hosts, micro-batches of {options.micro_batch_seconds:g} s, {options.seconds:g} s each",
        flush=True,
    )
    setting = {key: getattr(options, key) for key in ("nproc", "seconds", "micro_batch_seconds", "flat")}
    known = measured_before(options.results, setting)
    print(f"{'share of ideal':36}{'measured':>10}{'predicted':>11}{'difference':>12}{'held-out':>10}{'load':>7}")
    for strategy in options.strategies.split(","):
        found = known.get(strategy)
        if found is None:
            found = {"strategy": strategy, **setting, **ground.measured(strategy), "load": os.getloadavg()[0]}
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
        predicted = ground.predicted(strategy, found.get("noise", ()))
        metric = "" if found["metric"] is None else f"{found['metric']:.3f}"
        print(
            f"{strategy:36}{found['share']:10.3f}{predicted:11.3f}{predicted - found['share']:+12.3f}"
            f"{metric:>10}{found['load']:7.1f}",
            flush=True,
        )


def measured_before(results: Path | None, setting: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each strategy's last measurement with the same setting."""
    if results is None or not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["strategy"]: line for line in lines if all(line[key] == value for key, value in setting.items())}


if __name__ == "__main__":
    main()
