"""`paceline run --replace`: a rank that was killed or stopped comes back as a newcomer, under the real launcher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.roles import environment_of_servers
from paceline.record import read_events
from paceline.strategies import create
from paceline.summary import account

JOINS = 'JOINS = os.environ.get("PACELINE_JOINS") == "1"'
HELPER = "if RANK == 1 and not JOINS and number == 5: os.kill(os.getpid(), signal.{signal})"


@pytest.mark.parametrize(
    ("strategy", "signal"), [("all-reduce", "SIGKILL"), ("all-reduce", "SIGSTOP"), ("ssp", "SIGKILL")]
)
def test_a_rank_that_is_lost_is_started_again_and_joins(
    strategy: str,
    signal: str,
    script: Callable[..., Path],
    launched: Callable[..., Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The run lasts until the newcomer has computed, however long it takes to start; then all leave their loops."""
    waits = "\n        if JOINS and number == 3: (run.folder / 'joined').touch(); break"
    waits += "\n        if not JOINS and number > 20 and (run.folder / 'joined').exists(): break"
    path = script(first=JOINS, each=HELPER.format(signal=signal) + waits, strategy=strategy, length="epochs=100000")
    serving = environment_of_servers(create(strategy).servers_for(2))
    outcome, folder = launched(path, 3, heartbeat_timeout=60.0, replace=2, environment=serving)
    assert outcome.ok and outcome.lost == [] and outcome.exit_codes == [0, 0, 0], outcome.last_words
    assert "it is started again, to join the run (1 of 2)" in capfd.readouterr().err
    books = account(read_events(folder / "events"))
    assert books.errors == ()
    assert "Rank 1 takes part from round" in "".join(str(event) for event in read_events(folder / "events"))
