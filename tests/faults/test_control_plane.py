"""The control plane's process is killed while ranks train: it comes back, and every sample still counts once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import hosted
from paceline.record import read_events
from paceline.summary import account

KILLING = """
def kill_control():
    found = None
    while found is None:
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                parent = int(open(f"/proc/{entry}/stat").read().rpartition(")")[2].split()[1])
                if parent == os.getppid() and "paceline.control" in open(f"/proc/{entry}/cmdline").read():
                    found = int(entry)
            except OSError:
                pass
    os.kill(found, signal.SIGKILL)
"""


@pytest.mark.parametrize(("strategy", "moments"), [("all-reduce", (5, 20)), ("abs-sgd", (9,))])
def test_a_run_survives_its_control_plane(
    strategy: str,
    moments: tuple[int, ...],
    script: Callable[..., Path],
    launched: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = script(
        first=KILLING,
        each=f"if RANK == 1 and number in {moments}: kill_control()",
        strategy=strategy,
        length="epochs=8",
    )
    outcome, folder = launched(path, 2)
    assert outcome.ok, outcome.last_words
    accounts = account(read_events(folder / "events"))
    assert (accounts.computed, accounts.applied, accounts.errors) == (8 * 64, 8 * 64, ())
    assert sum("is started again" in record.getMessage() for record in caplog.records) == len(moments)
    assert not (folder / "control.journal").exists()


def test_a_control_plane_that_is_gone_for_good_ends_the_run_in_bounded_time(
    script: Callable[..., Path], launched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "MOST_RESTARTS", 0)
    path = script(first=KILLING, each="if RANK == 1 and number == 5: kill_control()", strategy="all-reduce")
    outcome, _ = launched(path, 2, return_timeout=1.0)
    assert not outcome.ok and 0 not in outcome.exit_codes
    said = " ".join(line for words in outcome.last_words.values() for line in words)
    assert "The connection to the control service is gone" in said and "did not come back within 1 s" in said
