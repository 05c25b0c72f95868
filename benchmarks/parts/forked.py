"""Ranks forked from one process that has imported torch: importing costs seconds a rank, and faults need hundreds of
runs. All else is the launcher's own: it watches them, tells the control plane of deaths, and replaces them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.control.client import ControlClient
from paceline.launch.local import Launch, Place, Ranks, end_with_parent
from paceline.launch.replacing import Replacing
from paceline.launch.surroundings import JOINS, address_on, environment_of

PROGRAM = Path(__file__).with_name("fault_rank.py")
READY_SECONDS = 120.0
POLL_SECONDS = 0.005


class Zygote:
    """The process that forks ranks, as long as a block lasts. It reads a line of JSON for each rank to start, answers
    with its pid, and tells of each that has ended."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        program = [sys.executable, "-u", str(PROGRAM)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(program, stdin=pipe, stdout=pipe, env=environment, preexec_fn=end_with_parent)
        self._buffer, self._codes, self._lock = b"", dict[int, int](), threading.Lock()
        self._answer("ready", READY_SECONDS)

    def start(self, order: dict[str, Any]) -> Forked:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return Forked(self, int(self._answer("pid", READY_SECONDS)["pid"]))

    def code(self, pid: int) -> int | None:
        """The exit code of a rank that has ended."""
        with self._lock:
            while self._answer("ended", 0.0):
                pass
            return self._codes.get(pid)

    def _answer(self, kind: str, seconds: float) -> dict[str, int]:
        """The next news of this kind, or nothing; of those who have ended on the way is taken note."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" not in self._buffer:
                if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    if seconds:
                        raise SystemExit("The process that forks ranks does not answer.")
                    return {}
                self._buffer += os.read(self._process.stdout.fileno(), 65536)
            line, _, self._buffer = self._buffer.partition(b"\n")
            news: dict[str, int] = json.loads(line)
            if "ended" in news:
                self._codes[news["ended"]] = news["code"]
            if kind in news:
                return news

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Forked:
    """One rank's process, as a launcher asks for it."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._zygote.code(self.pid)

    def send(self, number: int) -> None:
        """A signal, if it is still there."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code


class ForkedRanks(Ranks):
    """All ranks of a run.

    Args:
        zygote: who forks them.
        place: the run.
        arguments: of `fault_rank.train`.
        replace: how often a rank that was lost is started again.
    """

    def __init__(self, zygote: Zygote, place: Place, arguments: Sequence[Any], replace: int = 0) -> None:
        super().__init__(place.ranks, quiet=True, replacing=Replacing(replace))
        self._zygote, self._place, self._arguments = zygote, place, arguments
        self.started: list[tuple[int, Forked]] = []
        """Each rank's process, and those that were started in its place."""
        (place.folder / "logs").mkdir()
        for rank in place.ranks:
            self._processes.append(self._start(rank))

    def _start(self, rank: int, joins: bool = False) -> Forked:
        environment = {**self._place.environment, **environment_of(self._place.card), "RANK": str(rank)}
        environment |= {"WORLD_SIZE": str(self._place.world_size), JOINS: "1" if joins else ""}
        log = str(self.log_of(rank))
        forked = self._zygote.start({"environment": environment, "arguments": list(self._arguments), "log": log})
        self.started.append((rank, forked))
        return forked

    def join_run(self) -> Forked:
        """A worker more than the run began with, which nobody watches."""
        secret, world_size = bytes.fromhex(self._place.card["secret"]), self._place.world_size
        with ControlClient(address_on(self._place.card), secret, world_size) as control:
            (rank,) = control.enlist(1)
        return self._start(rank, joins=True)

    def log_of(self, rank: int) -> Path:
        return self._place.folder / "logs" / f"rank-{rank:04d}.log"

    def pid(self, rank: int) -> int:
        """Of the first process of the rank."""
        return next(forked.pid for each, forked in self.started if each == rank)

    def successors(self) -> list[Forked]:
        """Those that were started in the place of others."""
        return [forked for _, forked in self.started[self._place.world_size :]]

    def last_words(self, outcome: Launch) -> list[str]:
        """Of those who failed."""
        failed = [rank for rank in self._place.ranks if outcome.exit_code(rank)]
        logs = [self.log_of(rank).read_text(errors="replace") for rank in failed]
        return [line for log in logs for line in log.splitlines()[-3:]]
