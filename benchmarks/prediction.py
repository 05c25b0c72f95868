"""Does the simulator predict the processes? The same race on both, strategy by strategy.

    scripts/bench prediction [--seconds 20] [--speeds 1,1,0.5,0.25] [--workload digits]

Prints the share of ideal of each strategy on real processes and in the simulator, and their difference.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from paceline.race.race import run_race
from paceline.race.spec import BACKENDS, RaceSpec
from paceline.strategies import STRATEGIES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--speeds", default="1,1,0.5,0.25")
    parser.add_argument("--workload", default="digits")
    options = parser.parse_args()
    speeds = tuple(float(speed) for speed in options.speeds.split(","))
    shares: dict[str, dict[str, float]] = {}
    micro_batch_seconds = None
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as out:
        for backend in BACKENDS:
            spec = RaceSpec(
                strategies=tuple(STRATEGIES),
                speeds=speeds,
                backend=backend,
                seconds=options.seconds,
                workload=options.workload,
                micro_batch_seconds=micro_batch_seconds,
            )
            race = run_race(spec, Path(out))
            micro_batch_seconds = race["micro_batch_seconds"]
            shares[backend] = {result["strategy"]: result["share_of_ideal"] for result in race["results"]}
    print(f"\n{'share of ideal':14}{'processes':>12}{'simulated':>12}{'difference':>12}")
    for strategy in STRATEGIES:
        real, simulated = (shares[backend][strategy] for backend in BACKENDS)
        print(f"{strategy:14}{real:12.3f}{simulated:12.3f}{simulated - real:+12.3f}")


if __name__ == "__main__":
    main()
