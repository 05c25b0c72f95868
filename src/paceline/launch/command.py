"""`paceline run`: a user's script on several processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launch.local import Launch, launch
from paceline.launch.roles import environment_of_servers
from paceline.launch.surroundings import new_run
from paceline.report.progress import Progress


def run_script(
    command: list[str],
    nproc: int,
    folder: Path,
    port: int,
    join_timeout: float,
    *,
    servers: int = 0,
    report: bool = False,
) -> int:
    """Run the script on every rank; its exit code is the first failure's, or 0.

    Args:
        command: the script and its arguments.
        nproc: how many ranks learn.
        folder: where the run's own folder is made.
        port: of the control plane.
        join_timeout: seconds to wait for every rank to arrive.
        servers: ranks beside these that serve.
        report: whether to write a report into the run's folder at the end, however it ends.
    """
    if not Path(command[0]).is_file():
        raise PacelineError(f"There is no script {command[0]}.", remedy="Usage: paceline run --nproc 4 script.py.")
    run_folder = new_run(folder)
    with Progress(run_folder / "events"):
        started = [sys.executable, *command]
        serving = environment_of_servers(servers)
        ranks = nproc + servers
        outcome = launch(started, ranks, run_folder, port=port, environment=serving, join_timeout=join_timeout)
    print(f"The run's folder: {run_folder}")
    if report:
        _report(run_folder)
    explain(outcome, run_folder)
    return exit_code(outcome)


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
        for line in outcome.last_words[failed][-15:]:
            print(f"  {line}", file=sys.stderr)
        print(f"All logs: {folder / 'logs'}", file=sys.stderr)


def exit_code(outcome: Launch) -> int:
    if outcome.first_failed is None:
        return 0
    code = outcome.exit_codes[outcome.first_failed]
    return code if code > 0 else 128 - code  # as a shell tells of a signal
