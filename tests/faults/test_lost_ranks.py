"""A rank dies, raises, hangs or never comes: the others say so by name, in bounded time, and nothing stays behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.control.service import CONNECTION_CLOSED
from paceline.record import read_events
from paceline.summary import account

Script = Callable[..., Path]
Launched = Callable[..., Any]


def log_of(folder: Path, rank: int) -> str:
    return (folder / "logs" / f"rank-{rank:04d}.log").read_text()


def test_a_killed_rank_is_named_by_all_others(script: Script, launched: Launched) -> None:
    path = script(each="if RANK == 1 and number == 5: os.kill(os.getpid(), signal.SIGKILL)", strategy="frail")
    outcome, folder = launched(path, 3)
    assert outcome.first_failed == 1 and outcome.how(1) == "ended by SIGKILL"
    assert outcome.exit_codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        said = outcome.last_words[rank][-1]
        # Ranks break off one after the other, so that the last to look may hear of several.
        assert "The run cannot go on without a lost rank (" in said and "rank 1: ended by SIGKILL" in said
        assert f"Where: rank {rank}, after round" in log_of(folder, rank)


def test_a_rank_that_never_comes_is_named(script: Script, launched: Launched) -> None:
    path = script(first="if RANK == 1: time.sleep(600)")
    outcome, _ = launched(path, 2, join_timeout=2.0, grace=1.0)
    assert outcome.first_failed == 0
    assert outcome.exit_codes == [1, -signal.SIGTERM]
    assert "Only 1 of 2 ranks arrived within 2 s; missing: rank 1." in outcome.last_words[0][-1]


def test_a_rank_that_hangs_is_named_and_ended(script: Script, launched: Launched) -> None:
    path = script(each="if RANK == 1 and number == 5: os.kill(os.getpid(), signal.SIGSTOP)", strategy="frail")
    outcome, _ = launched(path, 2, heartbeat_timeout=60.0, grace=1.0)
    assert outcome.first_failed == 0
    assert outcome.exit_codes == [1, -signal.SIGKILL]
    assert "rank 1: it was stopped, and did not go on for 1 s" in outcome.last_words[0][-1]


def test_a_rank_that_raises_speaks_last(script: Script, paceline: Callable[..., Any], tmp_path: Path) -> None:
    path = script(each="assert RANK != 1 or number != 5, 'my own mistake'", strategy="frail")
    code, _, complained = paceline("run", "--nproc", "2", str(path)).finish()
    assert code == 1
    last = complained[complained.rindex("Rank 1 failed first (ended with exit code 1). Its last words:") :]
    assert "Traceback (most recent call last):" in last
    assert "AssertionError: my own mistake" in last
    assert str(tmp_path / "runs" / "run") in last
    assert "(rank 1: AssertionError: my own mistake)" in complained, "the other rank says why, too"


FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
    "raised": ("raise ValueError('my own mistake')", "ValueError: my own mistake"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "it was stopped, and did not go on for 1 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_go_on(script: Script, launched: Launched, fault: str) -> None:
    """Without rank 1, and with all samples."""
    deed, reason = FAULTS[fault]
    path = script(each=f"if RANK == 1 and number == 5: {deed}", strategy="all-reduce", length="epochs=4")
    outcome, folder = launched(path, 3, heartbeat_timeout=60.0, grace=1.0)
    assert outcome.ok and outcome.lost == [1], outcome.last_words
    events = read_events(folder / "events")
    ((lost, why),) = [(event["rank"], event["reason"]) for event in events if event["kind"] == "lost"]
    assert lost == 1 and why in (reason, CONNECTION_CLOSED), "what the launcher has seen may be told a little late"
    applied = [event["samples"] for event in events if event["kind"] == "applied" and event["rank"] == 0]
    assert sum(applied) == 4 * 64 and not account(events).errors


@pytest.mark.parametrize("to_all", [True, False], ids=["as a terminal does", "to the launcher alone"])
def test_ctrl_c_ends_all(script: Script, paceline: Callable[..., Any], tmp_path: Path, to_all: bool) -> None:
    path = script()
    command = paceline("run", "--nproc", "2", str(path))
    command.wait_for_ranks(path, 2, tmp_path)
    (os.killpg if to_all else os.kill)(command.process.pid, signal.SIGINT)
    code, _, complained = command.finish()
    assert code == 130, complained
    assert not any(Path(f"/proc/{pid}").exists() for pid in command.ranks)


def test_a_killed_launcher_takes_its_ranks_with_it(
    script: Script, paceline: Callable[..., Any], tmp_path: Path, wait: Callable[..., Any], is_alive: Callable[..., Any]
) -> None:
    path = script()
    command = paceline("run", "--nproc", "2", str(path))
    command.wait_for_ranks(path, 2, tmp_path)
    command.process.kill()
    wait(lambda: not any(map(is_alive, command.ranks)), "the ranks to end")


def test_garbage_on_the_control_port_disturbs_nobody(script: Script, launched: Launched, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    over = threading.Event()
    thrown = []

    def throw() -> None:
        chance = random.Random(0)
        greetings = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PACELINE" + bytes(64), b"", b"\x00" * 70_000]
        while not over.wait(0.02):
            with socket.socket() as stranger:
                stranger.settimeout(1)
                try:
                    stranger.connect(("127.0.0.1", port))
                    stranger.sendall(chance.choice(greetings) + chance.randbytes(chance.randrange(2000)))
                    thrown.append(1)
                except OSError:
                    continue  # not up yet, or it hung up on us

    thread = threading.Thread(target=throw)
    thread.start()
    try:
        outcome, folder = launched(script(length="epochs=6"), 2, port=port)
    finally:
        over.set()
        thread.join()
    assert outcome.ok, outcome.last_words
    assert len(thrown) > 20
    accounts = account(read_events(folder / "events"))
    assert (accounts.applied, accounts.errors) == (6 * 64, ())


def test_a_port_in_use_is_said_at_once(script: Script, paceline: Callable[..., Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said, complained = paceline("run", "--nproc", "2", "--port", str(port), str(script())).finish()
    assert code == 2
    assert complained.startswith("Error: ") and complained.count("\n") == 1
    assert str(port) in complained and "Traceback" not in said + complained
