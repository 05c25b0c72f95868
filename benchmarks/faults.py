"""Faults in virtual time: a swarm of random crashes, or one at every await of every strategy; counts what breaks."""

from __future__ import annotations

import argparse
import time

from paceline.simulator.faults import Crash
from paceline.strategies import create
from paceline.testing_losses import SURVIVORS, Losses, check_losses, check_seed, moments

SHOWN = 5  # failures that are printed in full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swarm", type=int, default=1000, help="play so many seeds, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play one seed again, and show why it fails")
    parser.add_argument("--awaits", action="store_true", help="crash each rank at every moment of every strategy")
    asked = parser.parse_args()
    if asked.seed is not None:
        check_seed(asked.seed)
        print(f"Seed {asked.seed} is sound.")
        return
    began = time.perf_counter()
    played, failures = awaits() if asked.awaits else swarm(range(asked.first, asked.first + asked.swarm))
    for failure in failures[:SHOWN]:
        print(failure)
    print(f"{played} runs with crashes in {time.perf_counter() - began:.0f} s, {len(failures)} not sound")
    raise SystemExit(bool(failures))


def swarm(seeds: range) -> tuple[int, list[str]]:
    failures = []
    for seed in seeds:
        try:
            check_seed(seed)
        except AssertionError as error:
            failures.append(str(error))
    return len(seeds), failures


def awaits() -> tuple[int, list[str]]:
    """Just before each moment and just after it, each rank in turn."""
    played, failures = 0, []
    for text in SURVIVORS:
        strategy = create(text)
        for turn, moment in enumerate(moments(strategy, Losses())):
            for rank in range(len(Losses().speeds)):
                losses = Losses(crashes=(Crash(at=moment + (1e-9 if turn % 2 else 0.0), rank=rank),), seed=turn)
                played += 1
                try:
                    check_losses(strategy, losses)
                except Exception as error:
                    failures.append(f"{text}, {losses}: {error}")
    return played, failures


if __name__ == "__main__":
    main()
