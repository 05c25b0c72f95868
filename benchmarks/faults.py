"""Real processes that are killed and stopped; and crashes in virtual time: swarms of them, and one at every await.

scripts/bench faults                    every strategy and kind of fault, five times; --kills 25 for the whole
scripts/bench faults --who "a worker;rank 0" --strategies gssp,abs-sgd --minutes 5
scripts/bench faults --peers --kills 3  the same SIGKILL for torchrun with DDP, torchft and hivemind
scripts/bench faults --table            what was measured so far; docs/membership.md is given the same
scripts/bench faults --swarm 10000      random clusters and crashes in virtual time
scripts/bench faults --awaits           a crash at every moment of every strategy
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Collection
from functools import partial

from parts.fault_blows import KINDS
from parts.fault_links import LINK_KINDS, one_linked_fault
from parts.fault_peers import measure_peers
from parts.fault_table import show
from parts.faults import STRATEGIES, measure, one_fault
from parts.forked import Zygote

from paceline.simulator.faults import Crash
from paceline.strategies import create
from paceline.testing_losses import SURVIVORS, Losses, check_losses, check_seed, moments

EVERY = (*KINDS, *LINK_KINDS)
SHOWN = 5  # failures that are printed in full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="of each kind, on real processes")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="some of these, with commas between them")
    parser.add_argument("--who", default=";".join(EVERY), help="is struck: some of these, with semicolons between them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no run is begun any more")
    parser.add_argument("--table", action="store_true", help="show what was measured, and put it into the docs")
    parser.add_argument("--swarm", type=int, help="play so many seeds in virtual time, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play one seed again, and show why it fails")
    parser.add_argument("--awaits", action="store_true", help="crash each rank at every moment of every strategy")
    parser.add_argument("--peers", action="store_true", help="kill ranks of other libraries: DDP, torchft, hivemind")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is ended first
    if asked.seed is not None:
        check_seed(asked.seed)
        print(f"Seed {asked.seed} is sound.")
        return
    if asked.peers:
        measure_peers(asked.kills)
        return
    if not asked.swarm and not asked.awaits:
        strategies, kinds = split(asked.strategies, ",", STRATEGIES), split(asked.who, ";", EVERY)
        if asked.table:
            show()
        else:
            with Zygote() as zygote:
                here = [kind for kind in kinds if kind in KINDS]
                measure(partial(one_fault, zygote), strategies, here, asked.kills, asked.minutes)
            linked = [kind for kind in kinds if kind in LINK_KINDS]
            measure(one_linked_fault, strategies, linked, asked.kills, asked.minutes)
        return
    began = time.perf_counter()
    played, failures = awaits() if asked.awaits else swarm(range(asked.first, asked.first + asked.swarm))
    for failure in failures[:SHOWN]:
        print(failure)
    print(f"{played} runs with crashes in {time.perf_counter() - began:.0f} s, {len(failures)} not sound")
    raise SystemExit(bool(failures))


def split(text: str, between: str, known: Collection[str]) -> list[str]:
    strange = [each for each in text.split(between) if each not in known]
    if strange:
        raise SystemExit(f"{strange[0]!r} is none of: {'; '.join(known)}")
    return text.split(between)


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
