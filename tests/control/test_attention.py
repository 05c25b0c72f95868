"""Who is given up as stuck, and who is not."""

from __future__ import annotations

import time

import pytest

from paceline.control.attention import Attention, stuck


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_rank_tells_how_long_it_is_busy_and_waits(clock: list[float]) -> None:
    attention = Attention()
    assert attention.report() == {"busy": 0.0, "waits": 0.0, "longest": 0.0}, "it has not begun"
    clock[0] += 50
    attention.look()
    clock[0] += 3
    assert attention.report() == {"busy": 3.0, "waits": 0.0, "longest": 0.0}
    attention.look()
    attention.wait(True)
    clock[0] += 1
    attention.look()
    attention.wait(True)
    clock[0] += 1
    assert attention.report() == {"busy": 1.0, "waits": 2.0, "longest": 3.0}
    attention.wait(False)
    assert attention.report()["waits"] == 0.0


def test_what_a_script_does_after_training_keeps_nobody_waiting(clock: list[float]) -> None:
    attention = Attention()
    attention.look()
    attention.rest()
    clock[0] += 1000
    attention.look()
    clock[0] += 1000
    assert attention.report() == {"busy": 0.0, "waits": 0.0, "longest": 0.0}


def test_several_may_be_stuck_and_nobody_is_if_all_are() -> None:
    busy, waiting = {"busy": 61.0, "waits": 0.0, "longest": 1.0}, {"busy": 0.0, "waits": 61.0, "longest": 1.0}
    assert stuck({0: busy, 1: waiting, 2: busy}, 60.0) == {0: 61.0, 2: 61.0}
    assert stuck({0: busy, 1: busy}, 60.0) == {}
    assert stuck({0: busy, 1: waiting}, 0.0) == {}, "nobody is to be given up"
