"""How fast the simulator is: events a second, cost of an event and memory, for each strategy and size of cluster.

    python benchmarks/simulator.py [--seconds 60] [--workers 100,1000,10000] [--strategies abs-sgd,...]

Timing only, log-normal jitter of 0.2, micro-batches of 0.1 virtual seconds, a 10 Gbit/s network. An event is one entry
taken from the clock's heap: nearly always the end of a micro-batch. Every case runs in a process of its own, so that
its peak of memory is its own. Larger clusters are simulated for a shorter virtual time.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

from paceline.backends.simulated import simulate
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import create


def measure(strategy: str, workers: int, seconds: float) -> str:
    """One row of the table."""
    cluster = Cluster.from_speeds(
        [1.0] * workers,
        micro_batch_seconds=0.1,
        jitter=LogNormal(0.2),
        network=Network(latency=10e-6, bandwidth=1.25e9),
    )
    start = time.perf_counter()
    run = simulate(create(strategy), cluster, seconds=seconds)
    took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{strategy:<12}{workers:>8}{seconds:>9.1f}{run.events:>11,}{run.events / took:>12,.0f}"
        f"{took / run.events * 1e6:>10.2f}{peak:>9.0f}{run.share_of_ideal:>8.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual, up to 1,000 workers")
    parser.add_argument("--workers", default="100,1000,10000")
    parser.add_argument("--strategies", default="all-reduce,balanced,abs-sgd")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.workers.split(",")]
    if options.one:
        print(measure(options.strategies, sizes[0], options.seconds))
        return
    print(
        f"{'strategy':<12}{'workers':>8}{'seconds':>9}{'events':>11}{'events/s':>12}{'µs/event':>10}{'MB':>9}{'share':>8}"
    )
    for strategy in options.strategies.split(","):
        for workers in sizes:
            seconds = min(options.seconds, options.seconds * 1000 / workers)
            case = ["--one", "--strategies", strategy, "--workers", str(workers), "--seconds", str(seconds)]
            subprocess.run([sys.executable, __file__, *case], check=True)


if __name__ == "__main__":
    main()
