"""SIGTERM under `paceline run`: to one rank it means that this rank leaves, to the launcher that the run ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.record import read_events
from paceline.run import checkpoint
from paceline.summary import account


def test_a_rank_that_gets_sigterm_leaves_and_the_others_go_on(
    script: Callable[..., Path], launched: Callable[..., Any]
) -> None:
    path = script(
        each="if RANK == 1 and number == 5: os.kill(os.getpid(), signal.SIGTERM)",
        strategy="abs-sgd",
        length="epochs=4",
    )
    outcome, folder = launched(path, 3)
    assert outcome.ok and outcome.ended and (outcome.left, outcome.lost) == ([1], []), outcome.last_words
    assert outcome.exit_codes == [0, 0, 0]
    books = account(read_events(folder / "events"))
    assert (books.computed, books.applied, books.errors) == (4 * 64, 4 * 64, ())


def test_sigterm_to_the_launcher_ends_the_run_and_leaves_a_checkpoint(
    script: Callable[..., Path], paceline: Callable[..., Any], tmp_path: Path
) -> None:
    path = script()
    command = paceline("run", "--nproc", "2", str(path))
    command.wait_for_ranks(path, 2, tmp_path)
    command.process.send_signal(signal.SIGTERM)
    code, _, complained = command.finish()
    assert code == 128 + signal.SIGTERM, complained
    assert not any(Path(f"/proc/{pid}").exists() for pid in command.ranks)
    (folder,) = (tmp_path / "runs" / "run").iterdir()
    found = checkpoint.newest([folder], must_exist=True)
    assert found is not None and found[1].values["samples_applied"] > 0


def test_if_all_ranks_are_told_to_leave_the_command_says_so(
    script: Callable[..., Path], paceline: Callable[..., Any], tmp_path: Path
) -> None:
    path = script()
    command = paceline("run", "--nproc", "2", str(path))
    command.wait_for_ranks(path, 2, tmp_path)
    for rank in command.ranks:
        os.kill(rank, signal.SIGTERM)
    code, _, complained = command.finish()
    assert code == 128 + signal.SIGTERM, complained
    assert "Rank 0 left on notice." in complained and "Rank 1 left on notice." in complained
    assert "Nobody stayed to the end." in complained
