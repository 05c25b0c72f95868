"""`paceline run`: a user's script on several processes of this machine, or of several."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.door import Door, open_door
from paceline.launch.hosts import FIRST, Hosts, Launcher
from paceline.launch.last_words import last_error
from paceline.launch.local import Launch, Place, ended_by_sigterm, place_alone, run_ranks
from paceline.launch.roles import environment_of_servers
from paceline.launch.surroundings import new_run
from paceline.ray.cluster import RayCluster
from paceline.report.progress import Progress

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds before a restart; each is twice as long as the one before
NOBODY_ELSEWHERE: Mapping[int, str] = {}


def run_script(
    command: list[str],
    nproc: int,
    folder: Path,
    *,
    servers: int = 0,
    replace: int = 0,
    restarts: int = 0,
    report: bool = False,
    hosts: Hosts | RayCluster | Door | None = None,
    **launching: Any,
) -> int:
    """Run the script on every rank of this host; its exit code is the first failure's, or 0.

    Args:
        command: the script and its arguments.
        nproc: how many ranks of this host learn.
        folder: where the run's own folder is made.
        servers: ranks beside these that serve.
        replace: how often a rank that was lost is started again, to join the run.
        restarts: how often a run that has failed is started again.
        report: whether to write a report into the run's folder at the end, however it ends.
        hosts: which of several hosts this is, the Ray cluster to run on, or the running training to join; None for one
            machine.
        launching: port and time-outs; see `launch`.
    """
    if not Path(command[0]).is_file():
        raise PacelineError(f"There is no script {command[0]}.", remedy="Usage: paceline run --nproc 4 script.py.")
    with ended_by_sigterm(), _starts(nproc, servers, folder, hosts, replace, launching) as next_start:
        for attempt in range(restarts + 1):
            with next_start() as start:
                with Progress(start.folder / "events"):
                    outcome = start.run(command)
                print(f"The run's folder: {start.folder}")
            if report:
                _report(start.folder)
            explain(outcome, start.folder, start.where)
            if outcome.ok or attempt == restarts:
                break
            _pause(attempt, restarts)
    return exit_code(outcome)


@dataclass(frozen=True)
class Start:
    """One start of all ranks that this launcher is answerable for.

    Args:
        folder: the run's.
        run: runs the script with its arguments on each of them, until all have ended.
        where: the machines of those ranks that are not on this one.
    """

    folder: Path
    run: Callable[[list[str]], Launch]
    where: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of_processes(cls, place: Place, replace: int, where: Mapping[int, str]) -> Start:
        """As child processes of this one."""
        return cls(place.folder, lambda command: run_ranks([sys.executable, *command], place, replace=replace), where)


NextStart = Callable[[], AbstractContextManager[Start]]


@contextmanager
def _starts(
    nproc: int,
    servers: int,
    folder: Path,
    hosts: Hosts | RayCluster | Door | None,
    replace: int,
    launching: dict[str, Any],
) -> Iterator[NextStart]:
    """Where ranks are: on this machine alone, on several hosts, where Ray places them, or with others that run."""
    if hosts is None:

        @contextmanager
        def alone() -> Iterator[Start]:
            environment = environment_of_servers(servers)
            placed = place_alone(nproc + servers, new_run(folder), environment=environment, **launching)
            with placed as place, open_door(place):
                yield Start.of_processes(place, replace, {})

        yield alone
        return
    if isinstance(hosts, RayCluster):
        with hosts.connected():

            @contextmanager
            def in_ray() -> Iterator[Start]:
                with hosts.team(new_run(folder), replace=replace, **launching) as team:
                    yield Start(team.folder, team.run_script, team.where)

            yield in_ray
        return
    if isinstance(hosts, Door):

        @contextmanager
        def among_others() -> Iterator[Start]:
            place = hosts.place(nproc, folder)
            print(f"Ranks {', '.join(map(str, place.ranks))} join the run in {place.folder}.", flush=True)
            yield Start.of_processes(place, replace, {})

        yield among_others
        return
    with Launcher(hosts, nproc, servers, folder, **launching) as launcher:

        @contextmanager
        def among_hosts() -> Iterator[Start]:
            with launcher.place() as (place, seat), open_door(place) if hosts.node_rank == FIRST else nullcontext():
                place_here = f"Node rank {hosts.node_rank} of {hosts.nnodes}"
                print(f"{place_here}: ranks {', '.join(map(str, seat.ranks))} of {seat.world_size}.", flush=True)
                yield Start.of_processes(
                    place, replace, {rank: host for rank, host in enumerate(seat.where) if rank not in seat.ranks}
                )

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


def explain(outcome: Launch, folder: Path, where: Mapping[int, str] = NOBODY_ELSEWHERE) -> None:
    """Say last what went wrong first. `where`: the machines of ranks that are not on this one."""

    def named(rank: int) -> str:
        return f"Rank {rank} on {where[rank]}" if rank in where else f"Rank {rank}"

    for rank in outcome.lost:
        print(f"{named(rank)} was lost ({outcome.how(rank)}); the run went on without it.", file=sys.stderr)
    for rank in outcome.left:
        print(
            f"{named(rank)} left on notice{'; the run went on without it' if outcome.ended else ''}.", file=sys.stderr
        )
    if not outcome.ended:
        print("Nobody stayed to the end. With run.resume() the run goes on from its checkpoint.", file=sys.stderr)
    failed = outcome.first_failed
    if failed is not None:
        first = next(iter(outcome.elsewhere)) if outcome.first_elsewhere else failed
        print(f"\n{named(first)} failed first ({outcome.how(first)}).", end=" ", file=sys.stderr)
        says = "Its last words:" if first == failed else f"Its log is there. The last words of rank {failed} here:"
        print(says, file=sys.stderr)
        for line in last_error(outcome.last_words[failed]):
            print(f"  {line}", file=sys.stderr)
        print(f"All logs: {folder / 'logs'}", file=sys.stderr)


def exit_code(outcome: Launch) -> int:
    if outcome.first_failed is None:
        return 0 if outcome.ended else 128 + signal.SIGTERM
    code = outcome.exit_code(outcome.first_failed)
    return code if code > 0 else 128 - code  # as a shell tells of a signal
