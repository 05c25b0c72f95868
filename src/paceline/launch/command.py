"""`paceline run`: a user's script on several processes of this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launch.local import Launch, launch
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
    **launching: Any,
) -> int:
    """Run the script on every rank; its exit code is the first failure's, or 0.

    Args:
        command: the script and its arguments.
        nproc: how many ranks learn.
        folder: where the run's own folder is made.
        servers: ranks beside these that serve.
        restarts: how often a run that has failed is started again.
        report: whether to write a report into the run's folder at the end, however it ends.
        launching: port and time-outs; see `launch`.
    """
    if not Path(command[0]).is_file():
        raise PacelineError(f"There is no script {command[0]}.", remedy="Usage: paceline run --nproc 4 script.py.")
    launching |= {"environment": environment_of_servers(servers)}
    for attempt in range(restarts + 1):
        run_folder = new_run(folder)
        with Progress(run_folder / "events"):
            outcome = launch([sys.executable, *command], nproc + servers, run_folder, **launching)
        print(f"The run's folder: {run_folder}")
        if report:
            _report(run_folder)
        explain(outcome, run_folder)
        if outcome.ok or attempt == restarts:
            break
        _pause(attempt, restarts)
    return exit_code(outcome)


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


def explain(outcome: Launch, folder: Path) -> None:
    """Say last what went wrong first."""
    for rank in outcome.lost:
        print(f"Rank {rank} was lost ({outcome.how(rank)}); the run went on without it.", file=sys.stderr)
    failed = outcome.first_failed
    if failed is not None:
        print(f"\nRank {failed} failed first ({outcome.how(failed)}). Its last words:", file=sys.stderr)
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
    code = outcome.exit_codes[outcome.first_failed]
    return code if code > 0 else 128 - code  # as a shell tells of a signal
