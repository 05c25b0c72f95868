"""Paceline and what people use today: same model, data, cluster and tuning grid, side by side on real processes.

    scripts/bench peers                 everything that today's file does not hold yet, or only disturbed
    scripts/bench peers --quick         a few methods on two clusters, in minutes
    scripts/bench peers --methods ddp,abs-sgd --clusters static
    scripts/bench peers --tables        only make the tables of the file again
    scripts/bench peers --picture DIR   draw docs/timeline.svg from a race's folder

Every device is emulated as in a race: it computes, then sleeps for what a slower one would still need. Each method is
tuned on the static cluster over the same grid of micro-batches and learning rates: all settings with one seed, the
best two with all seeds. The best one is then used on all clusters. Peers live in environments of their own in
.venv/peers, which this script makes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

from parts.peers.course import (
    CLUSTERS,
    PIECE,
    PIECE_SECONDS,
    TRACES,
    Race,
    load_workload,
)
from parts.peers.methods import METHODS, SEEDS, Method
from parts.peers.outcomes import FINALISTS, TUNED_ON, Book, Outcome, collect
from parts.peers.picture import draw
from parts.peers.sessions import (
    Failure,
    NotInstalledError,
    can_be_apart,
    command_of,
    environment,
    run_session,
    versions_of,
)
from parts.peers.tables import RESULTS, ROOT, write_tables

from paceline.errors import no_such
from paceline.options import split_name
from paceline.race.emulation import solo_speed
from paceline.strategies import STRATEGIES
from paceline.versions import versions

SECONDS = 24.0
JOBS = 6
START_SECONDS = 8.0  # of a session on 2 cores; for the estimate that is printed first
# Micro-batches and learning rates, for all the same.
GRID = ((4, 0.05), (4, 0.1), (4, 0.2), (8, 0.2))
ATTEMPTS = 2
QUICK_METHODS = ("ddp", "ddp-balanced", "post-local-sgd", "all-reduce", "local-sgd:by_speed", "abs-sgd")
QUICK_CLUSTERS = ("static", "straggler")


class Comparison:
    """Runs what the book does not hold yet.

    Args:
        book: of outcomes.
        options: of the command line.
    """

    def __init__(self, book: Book, options: argparse.Namespace) -> None:
        self.book, self.options, self._stop = book, options, threading.Event()
        self.others = [name for name in options.clusters if name != TUNED_ON]
        self.apart = can_be_apart()
        if not self.apart:
            print("Without rights to make namespaces: bytes are not known, and peers see this machine's network.")
        book.begin(about(self.apart, options))

    def seeds(self, method: Method) -> range:
        """That the method races with."""
        return range(self.options.seeds or method.seeds)

    def run(self, methods: Sequence[Method]) -> None:
        """Those first who have the most races; who needs the processors for itself comes last."""
        together = sorted((each for each in methods if not each.alone), key=lambda each: -each.seeds)
        self.all_of([partial(self.whole, method) for method in together])
        for method in methods:
            if method.alone:
                self.whole(method)

    def whole(self, method: Method) -> None:
        """All races of a method: whenever it is ended, what is there is whole, seed by seed."""
        self.tune(method)
        self.race(method, self.others)

    def minutes(self, methods: Sequence[Method]) -> float:
        """About how long all of it takes, if the file is empty and nothing is disturbed."""
        settings, total = len(self.options.grid), 0.0
        for method in methods:
            seeds = len(self.seeds(method))
            tuning, sessions = settings + min(FINALISTS, settings) * (seeds - 1), min(seeds, 2) + 1
            races = tuning + len(self.others) * seeds
            seconds = races * self.options.seconds + sessions * START_SECONDS
            total += seconds / (1 if method.alone else self.options.jobs) / 60
        return total

    def all_of(self, sessions: Sequence[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(self.options.jobs) as pool:
            try:
                for done in [pool.submit(each) for each in sessions]:
                    done.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def tune(self, method: Method) -> None:
        """Every setting with the first seed; those that did best with all seeds. The best of these is also what the
        method has reached on this cluster."""
        settings = [Race(method.name, TUNED_ON, size, lr, 0, self.options.seconds) for size, lr in self.options.grid]
        self.session(method, settings)
        others = [replace(each, seed=seed) for each in self.book.finalists(settings) for seed in self.seeds(method)[1:]]
        self.session(method, others)

    def race(self, method: Method, clusters: Sequence[str]) -> None:
        best = self.book.best(method.name)
        if best is not None:
            self.session(
                method, [replace(best, cluster=name, seed=seed) for seed in self.seeds(method) for name in clusters]
            )

    def session(self, method: Method, races: Sequence[Race]) -> None:
        """Run those that are not in the book, or were disturbed too much. What fails or is disturbed gets a second
        chance; what fails again is noted, and the others go on."""
        for _ in range(ATTEMPTS):
            known = self.book.outcomes
            races = [race for race in races if race not in known or known[race].disturbed]
            if not races or self._stop.is_set():
                return
            try:
                failure = self.attempt(method, environment(method.package), races)
            except NotInstalledError as error:
                failure = Failure(str(error))
            if failure is not None and not self._stop.is_set():
                self.book.fail(method.name, failure.reason)
                print(f"{method.name} on {races[0].cluster}: {failure.reason}", flush=True)

    def attempt(self, method: Method, python: Path, races: Sequence[Race]) -> Failure | None:
        with tempfile.TemporaryDirectory(prefix="paceline-peers-") as top:
            folder, traces = Path(top) / "session", self.options.traces

            def note(number: int) -> None:
                outcome = collect(races[number], folder / str(number), traces, apart=self.apart)
                self.book.add(outcome)
                show(outcome)

            command = command_of(python, method.module, apart=self.apart)
            failure = run_session(races, command, folder, traces, note, self._stop)
            if failure is not None and self.options.keep_log:
                print((folder / "log").read_text()[-6000:])
            return failure


def show(outcome: Outcome) -> None:
    race, reached = outcome.race, outcome.time_to_target
    told = "not reached" if reached is None else f"{reached:.2f} s"
    print(
        f"{race.method:24} {race.cluster:10} micro-batch {race.micro_batch:2} rate {race.lr:<5g} seed {race.seed}: "
        f"target {told:11} share of ideal {outcome.share_of_ideal:.3f} accuracy {outcome.final:.3f} "
        f"overslept {1000 * outcome.overslept:.1f} ms",
        flush=True,
    )


def about(apart: bool, options: argparse.Namespace) -> dict[str, object]:
    found = versions()
    for package in sorted({method.package for method in METHODS if method.name in options.methods} - {""}):
        with contextlib.suppress(NotInstalledError):
            found |= versions_of(environment(package), ("accelerate", "torchft", "hivemind", "ray"))
    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2),
        "races_at_once": options.jobs,
        "seeds": min(options.seeds or SEEDS, SEEDS),  # that a cell needs
        "versions": found,
        "speed_alone": round(speed_alone(), 4),
        "traffic_apart": apart,
    }


def speed_alone() -> float:
    """Of a device with nobody beside it, as a part of what its emulation promises."""
    workload = replace(load_workload(), micro_batch=PIECE)
    return solo_speed(workload, Race("all-reduce", "equal", PIECE, GRID[0][1], 0, SECONDS).spec(), PIECE_SECONDS) * (
        PIECE_SECONDS / PIECE
    )


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: text.split(",")  # noqa: E731
    today = f"{date.today().isoformat()}.jsonl"
    parser.add_argument("--methods", type=names)
    parser.add_argument("--clusters", type=names, help=f"of {', '.join(CLUSTERS)}; each is tuned on {TUNED_ON}")
    parser.add_argument("--seeds", type=int, help="of every method; by default what each has in the list of methods")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a race")
    parser.add_argument("--jobs", type=int, default=JOBS, help="races at the same time: workers sleep most of the time")
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--picture", type=Path, metavar="DIR", help="a folder that `paceline race` has written")
    parser.add_argument("--keep-log", action="store_true", help="print the log of a session that failed")
    options = parser.parse_args()
    quick = options.quick
    options.methods = options.methods or list(QUICK_METHODS if quick else (method.name for method in METHODS))
    options.clusters = options.clusters or list(QUICK_CLUSTERS if quick else CLUSTERS)
    for name in options.clusters:
        if name not in CLUSTERS:
            parser.error(str(no_such("cluster", name, CLUSTERS)))
    options.seeds = options.seeds or (1 if quick else None)
    options.grid = GRID[1:2] if quick else GRID
    options.out = options.out or (
        Path(tempfile.gettempdir()) / f"paceline-peers-quick-{today}" if quick else RESULTS / today
    )
    racing = not options.tables and options.picture is None
    if racing and "traces" in options.clusters and not (options.traces / "pai_job_1.csv").exists():
        print(f"The recorded jobs are not in {options.traces}: the cluster `traces` is left out.")
        options.clusters.remove("traces")
    return options


def method_of(name: str) -> Method:
    """A method of the list, or a strategy of Paceline's with other options."""
    listed = {method.name: method for method in METHODS}
    if name not in listed and split_name(name)[0] not in STRATEGIES:
        sys.exit(str(no_such("method", name, listed)))
    return listed.get(name) or Method(name, "paceline")


def main() -> None:
    options = options_of()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: sessions are ended first
    if options.picture is not None:
        (ROOT / "docs" / "timeline.svg").write_text(draw(options.picture))
        return
    book = Book(options.out)
    if not options.tables:
        methods = [method_of(name) for name in options.methods]
        for method in methods:
            print(f"{method.name}: {method.configuration}")
        comparison = Comparison(book, options)
        print(f"All of it takes about {comparison.minutes(methods):.0f} minutes; what the file holds is not run again.")
        comparison.run(methods)
    print(write_tables(book, options.out.with_suffix(".md")))


if __name__ == "__main__":
    main()
