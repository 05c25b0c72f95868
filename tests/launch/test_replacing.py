"""Which ranks are started again, when, and whose process is ended because its rank is lost."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.control.membership import ON_NOTICE
from paceline.launch.replacing import Replacing


def state(
    present: list[int], lost: dict[int, str] | None = None, joining: tuple[int, ...] = (), admits: bool = True
) -> dict[str, Any]:
    told = {str(rank): why for rank, why in (lost or {}).items()}
    return {"present": present, "lost": told, "joining": list(joining), "admits": admits, "servers": [3]}


def test_pauses_double_for_a_rank_that_dies_again_and_there_is_an_end() -> None:
    replacing = Replacing(4)
    here = state([0, 2], {1: "killed"})
    due = []
    for now in (0.0, 10.0, 20.0):
        assert replacing.plan(1, "ended by SIGKILL", here, now) and replacing.waiting
        due.append(next(pause for pause in (0.0, 1.0, 2.0, 4.0) if replacing.due(now + pause) == [1]))
    assert due == [0.0, 1.0, 2.0] and not replacing.waiting
    assert replacing.plan(2, "ended by SIGKILL", here, 30.0) and replacing.due(30.0) == [2], "another rank is at once"
    assert not replacing.plan(0, "ended by SIGKILL", here, 40.0), "that were four"


@pytest.mark.parametrize(
    "now",
    [state([1], {0: "killed"}, admits=False), state([1], {0: "killed"}, joining=(1,)), state([], {0: "a", 1: "b"})],
    ids=["a strategy that takes none", "nobody is there to let it in", "nobody is there"],
)
def test_nobody_is_started_who_could_not_join(now: dict[str, Any]) -> None:
    assert not Replacing(3).plan(0, "ended by SIGKILL", now, 0.0)


def test_a_server_is_not_started_again_and_the_user_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert not Replacing(3).plan(3, "ended by SIGKILL", state([0, 1, 2], {3: "killed"}), 0.0)
    assert (
        "Rank 3 was lost (ended by SIGKILL). A server is not replaced; start the run again" in capsys.readouterr().err
    )


def test_a_stopped_process_is_ended_but_not_one_that_is_about_to_join_or_has_left() -> None:
    replacing = Replacing(3)
    assert replacing.stranded(state([0, 1, 2])) == []
    assert replacing.stranded(state([0, 2], {1: "it gave no sign of life for 2 s"})) == [1]
    assert replacing.plan(1, "ended by SIGKILL", state([0, 2], {1: "silent"}), 0.0)
    assert replacing.stranded(state([0, 1, 2], {1: "silent"}, joining=(1,))) == [], "it has not taken part yet"
    assert replacing.stranded(state([0, 2], {1: "silent", 2: ON_NOTICE})) == []
    assert replacing.stranded(state([0, 1, 2])) == []
    assert replacing.stranded(state([0, 2], {1: "killed"})) == [1], "it was, and is lost again"
