"""Which processes a launcher takes for stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from paceline.launch.stops import STOPPED, Stops, state_of_process


def test_who_goes_on_in_time_is_not_named() -> None:
    states = {71: "S", 72: "T"}
    stops = Stops(looks=3, state_of=states.__getitem__)
    pids = {0: 71, 1: 72}
    assert [stops.look(pids), stops.look(pids)] == [[], []]
    states[72] = "R"
    assert stops.look(pids) == []
    states[72] = "T"
    assert [stops.look(pids) for _ in range(4)] == [[], [], [1], []], "it is counted anew, and named once"


def test_a_successor_begins_anew() -> None:
    stops = Stops(looks=2, state_of={71: "S", 72: "T", 73: "T"}.__getitem__)
    assert [stops.look({0: 71, 1: 72}) for _ in range(2)] == [[], [1]]
    assert [stops.look({0: 71, 1: 73}) for _ in range(2)] == [[], [1]]


def test_a_job_that_is_suspended_as_a_whole_loses_nobody() -> None:
    """Also when the launcher goes on before its ranks do, one after the other."""
    states = {71: "T", 72: "T"}
    stops = Stops(looks=2, state_of=states.__getitem__)
    assert [stops.look({0: 71, 1: 72}) for _ in range(5)] == [[]] * 5
    states[71] = "R"
    assert stops.look({0: 71, 1: 72}) == []
    states[72] = "R"
    assert stops.look({0: 71, 1: 72}) == []
    assert stops.look({}) == []


def test_the_kernel_tells_of_a_stopped_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert state_of_process(process.pid) == STOPPED
    finally:
        process.kill()
        process.wait()
    assert state_of_process(process.pid) == ""
