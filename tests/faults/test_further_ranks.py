"""`paceline run --join`: a rank more than the run began with, under the real launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.launch.door import FILE, Door, open_door
from paceline.launch.local import Place
from paceline.launch.roles import environment_of_servers
from paceline.record import read_events
from paceline.summary import account

JOINS = 'JOINS = os.environ.get("PACELINE_JOINS") == "1"'
UNTIL_IT_HAS_COMPUTED = (
    "if JOINS and number == 3: (run.folder / 'joined').touch(); break"
    "\n        if not JOINS and number > 20 and (run.folder / 'joined').exists(): break"
)


@pytest.mark.parametrize(("strategy", "servers"), [("all-reduce", 0), ("ssp", 1)])
def test_a_rank_more_takes_part(
    strategy: str, servers: int, script: Callable[..., Path], paceline: Callable[..., Any], tmp_path: Path
) -> None:
    """The run lasts until the newcomer has computed, however long it takes to start; then all leave their loops."""
    path = script(first=JOINS, each=UNTIL_IT_HAS_COMPUTED, strategy=strategy, length="epochs=100000")
    first = paceline("run", "--nproc", "2", "--servers", str(servers), str(path))
    first.wait_for_ranks(path, 2 + servers, tmp_path, sign="start")
    (folder,) = tmp_path.glob("runs/run/*")
    door = folder / FILE
    secret = json.loads(door.read_text())["secret"]
    assert door.stat().st_mode & 0o077 == 0, "only its owner may read the secret"
    second = paceline("run", "--join", str(folder), "--nproc", "1", str(path))
    for command in (second, first):
        code, said, complained = command.finish()
        assert code == 0, complained
        assert secret not in said + complained
    assert not door.exists()
    events = read_events(folder / "events")
    newcomer = 2 + servers
    assert {event["rank"] for event in events if event["kind"] == "compute"} == {0, 1, newcomer}
    assert account(events).errors == ()
    assert f"Rank {newcomer} takes part from round" in "".join(str(event) for event in events)
    assert (folder / "logs" / f"rank-000{newcomer}.log").exists()


def test_a_run_that_is_over_cannot_be_joined(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="There is no run to join in"):
        Door.of_options(tmp_path, None, {})


def test_options_of_a_start_do_not_fit(tmp_path: Path) -> None:
    card = {"folder": str(tmp_path), "secret": "00", "control": "h:1", "origin": "0.0"}
    place = Place(range(3), 3, card, environment_of_servers(1))
    with open_door(place):
        door = Door.of_options(tmp_path, None, {"--master": None})
        assert door is not None and door.world_size == 3 and door.card == place.card
        assert door.environment == place.environment, "a further rank knows who serves"
        with pytest.raises(PacelineError, match="--servers and --join do not fit together"):
            Door.of_options(tmp_path, None, {"--servers": 1})
