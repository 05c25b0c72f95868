"""`paceline run`: a user's script on several processes of this machine, or of several."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.hosts import Hosts, Launcher
from paceline.launch.local import Launch, Place, ended_by_sigterm, place_alone, run_ranks
from paceline.launch.roles import environment_of_servers
from paceline.launch.surroundings import new_run
from paceline.report.progress import Progress

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a restart; each is twice as long as the one before
TRACEBACK = "Traceback (most recent call last)"
CHAINED = ("During handling of the above", "The above exception was the direct cause")


def run_script(
    command: list[str],
    nproc: int,
    folder: Path,
    *,
    servers: int = 0,
    restarts: int = 0,
    report: bool = False,
    hosts: Hosts | None = None,
    **launching: Any,
) -> int:
    """Run the script on every rank of this host; its exit code is the first failure's, or 0.

    Args:
        command: the script and its arguments.
        nproc: how many ranks of this host learn.
        folder: where the run's own folder is made.
        servers: ranks beside these that serve.
        restarts: how often a run that has failed is started again.
        report: whether to write a report into the run's folder at the end, however it ends.
        hosts: which of several hosts this is; None for one machine.
        launching: port and time-outs; see `launch`.
    """
    if not Path(command[0]).is_file():
        raise PacelineError(f"There is no script {command[0]}.", remedy="Usage: paceline run --nproc 4 script.py.")
    with ended_by_sigterm(), _places(nproc, servers, folder, hosts, launching) as next_place:
        for attempt in range(restarts + 1):
            with next_place() as (place, where):
                with Progress(place.folder / "events"):
                    outcome = run_ranks([sys.executable, *command], place)
                print(f"The run's folder: {place.folder}")
            if report:
                _report(place.folder)
            explain(outcome, place.folder, where)
            if outcome.ok or attempt == restarts:
                break
            _pause(attempt, restarts)
    return exit_code(outcome)


NextPlace = Callable[[], AbstractContextManager[tuple[Place, list[str]]]]
"""The ranks of this host in the next attempt, as long as a block lasts, and the name of every rank's host."""


@contextmanager
def _places(
    nproc: int, servers: int, folder: Path, hosts: Hosts | None, launching: dict[str, Any]
) -> Iterator[NextPlace]:
    """Where ranks are: on this machine alone, or on several hosts."""
    if hosts is None:

        @contextmanager
        def alone() -> Iterator[tuple[Place, list[str]]]:
            environment = environment_of_servers(servers)
            with place_alone(nproc + servers, new_run(folder), environment=environment, **launching) as place:
                yield place, []

        yield alone
        return
    with Launcher(hosts, nproc, servers, folder, **launching) as launcher:

        @contextmanager
        def among_hosts() -> Iterator[tuple[Place, list[str]]]:
            with launcher.place() as (place, seat):
                place_here = f"Node rank {hosts.node_rank} of {hosts.nnodes}"
                print(f"{place_here}: ranks {', '.join(map(str, seat.ranks))} of {seat.world_size}.", flush=True)
                yield place, seat.where

        yield among_hosts


def _pause(attempt: int, restarts: int) -> None:
    """Whatever has ended a run may need a moment to be over, and a run that fails at once must not fill the disk."""
    seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)
    what_then = "A script that calls run.resume() goes on from the last checkpoint."
    print(f"\nRestart {attempt + 1} of {restarts}, in {seconds:g} s. {what_then}", file=sys.stderr, flush=True)
    time.sleep(seconds)


def _report(folder: Path) -> None:
    from paceline.report.folder import report_of_folder

    try:
        print(f"Report: {report_of_folder(folder)[0]}")
    except PacelineError as error:  # the script's own outcome matters more
        print(f"There is no report: {error}", file=sys.stderr)


def explain(outcome: Launch, folder: Path, where: Sequence[str] = ()) -> None:
    """Say last what went wrong first. `where`: the name of each rank's host, with several."""

    def named(rank: int) -> str:
        return f"Rank {rank} on {where[rank]}" if rank in outcome.elsewhere and where else f"Rank {rank}"

    for rank in outcome.lost:
        print(f"{named(rank)} was lost ({outcome.how(rank)}); the run went on without it.", file=sys.stderr)
    failed = outcome.first_failed
    if failed is not None:
        first = next(iter(outcome.elsewhere)) if outcome.first_elsewhere else failed
        print(f"\n{named(first)} failed first ({outcome.how(first)}).", end=" ", file=sys.stderr)
        says = "Its last words:" if first == failed else f"Its log is there. The last words of rank {failed} here:"
        print(says, file=sys.stderr)
        for line in last_error(outcome.last_words[failed]):
            print(f"  {line}", file=sys.stderr)
        print(f"All logs: {folder / 'logs'}", file=sys.stderr)


def last_error(lines: list[str]) -> list[str]:
    """The last traceback and what follows it; the last few lines if there is none.

    >>> last_error(["Loading", "Traceback (most recent call last):", "  File ...", "ValueError: bad"])
    ['Traceback (most recent call last):', '  File ...', 'ValueError: bad']
    """
    starts = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    while len(starts) > 1 and lines[starts[-1] - 2].startswith(CHAINED):  # it was raised while another was handled
        starts.pop()
    return lines[starts[-1] :] if starts else lines[-15:]


def exit_code(outcome: Launch) -> int:
    if outcome.first_failed is None:
        return 0
    code = outcome.exit_code(outcome.first_failed)
    return code if code > 0 else 128 - code  # as a shell tells of a signal
