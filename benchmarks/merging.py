"""Merges of a large model on real processes: what they weigh, how long they take, and what each rank needs of memory.

    scripts/bench merging [--workload xmc-generated:like=amazon-670k] [--workers 4] [--micro-batch 8] [--updates 4]
                          [--merges 3] [--strategies adaptive-sgd:overlap,adaptive-sgd]

A training of one pass over generated rows, as many as the merges want, with plain SGD and one thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from parts.ranks import launch

from paceline.record import read_events

MIB = 2**20


def measure(options: argparse.Namespace, strategy: str) -> None:
    mega_batch = options.workers * options.micro_batch * options.updates
    text = f"{strategy}:mega_batch={mega_batch}"
    with tempfile.TemporaryDirectory() as folder:
        arguments = [options.workload, text, str(options.micro_batch), str(mega_batch * options.merges), folder]
        launch(str(Path(__file__).parent / "parts" / "merging_rank.py"), arguments, options.workers)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if len({each["check"] for each in found}) != 1:
        raise SystemExit("the ranks ended with different models")
    show(text, found, read_events(Path(found[0]["folder"]) / "events"))


def show(strategy: str, found: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    size = found[0]["parameters"]
    print(f"\n{strategy}: {size:,} weights, {4 * size / MIB:.0f} MiB, load {os.getloadavg()[0]:.1f}")
    print("peak memory of the ranks: " + ", ".join(f"{each['peak'] / MIB:.0f} MiB" for each in found))
    print("processor time of the ranks: " + ", ".join(f"{each['cpu']:.1f} s" for each in found))
    joined: dict[int, list[float]] = {}
    applied: dict[int, list[float]] = {}
    moved: dict[int, int] = {}
    waits = 0.0
    for event in events:
        if event["kind"] == "join":
            joined.setdefault(event["round"], []).append(event["t"])
            moved[event["round"]] = max(moved.get(event["round"], 0), event["bytes"])
        elif event["kind"] == "applied":
            applied.setdefault(event["round"], []).append(event["t"])
        elif event["kind"] == "wait":
            waits += event["end"] - event["t"]
    for number in sorted(joined):
        last = max(joined[number])
        print(
            f"merge {number}: the first rank joined {last - min(joined[number]):.1f} s before the last; "
            f"{max(applied[number]) - last:.1f} s later all had the merged model; "
            f"the rank that had moved most brought {moved[number] / MIB:.0f} MiB"
        )
    whole = sum(event["t"] for event in events if event["kind"] == "end") - sum(
        event["t"] for event in events if event["kind"] == "start"
    )
    computing = sum(each["computing"] for each in found)
    print(
        f"of all ranks' time {computing / whole:.0%} was computing, {waits / whole:.0%} waiting for a merge", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="xmc-generated:like=amazon-670k")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--updates", type=int, default=4, help="of each worker, between two merges")
    parser.add_argument("--merges", type=int, default=3)
    parser.add_argument("--strategies", default="adaptive-sgd:overlap,adaptive-sgd")
    options = parser.parse_args()
    for strategy in options.strategies.split(","):
        measure(options, strategy)


if __name__ == "__main__":
    main()
