"""Starts the ranks of a run as processes of this machine, watches them, and ends every one of them.

The launcher hosts the control plane, so it outlives any rank, and it sees a death at once (a child's exit), where a
heartbeat would need seconds.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from paceline.control.service import ControlService
from paceline.launch.surroundings import card_of, environment_of

POLL_SECONDS = 0.05
GRACE_SECONDS = 10.0  # after the first death: time for the others to say what they noticed
KILL_SECONDS = 5.0  # between asking to end and ending


@dataclass
class Launch:
    """What came of a launch: every rank's exit code, and what each wrote last to its standard error. A run that went on
    without lost ranks has not failed."""

    exit_codes: list[int]
    first_failed: int | None = None
    last_words: dict[int, list[str]] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)  # ranks that the run went on without

    @property
    def ok(self) -> bool:
        return self.first_failed is None

    def how(self, rank: int) -> str:
        """How the rank ended, in words."""
        return _in_words(self.exit_codes[rank])


def launch(
    command: Sequence[str],
    nproc: int,
    folder: Path,
    *,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
    join_timeout: float = 120.0,
    heartbeat_timeout: float = 10.0,
) -> Launch:
    """Run the command once for every rank and wait for all.

    Args:
        command: what to run; it finds its rank in its environment.
        nproc: how many ranks.
        folder: the run's folder, made before.
        port: of the control plane; 0 takes a free one.
        environment: further variables; `roles.environment_of_servers` says how many ranks, the last ones, serve.
        quiet: keep what the ranks print for `logs/` alone.
        join_timeout: seconds until a rank that has not arrived is given up.
        heartbeat_timeout: seconds of silence after which a rank that hangs is given up.
    """
    secret = secrets.token_bytes(32)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with ControlService(
        nproc, secret, port=port, join_timeout=join_timeout, heartbeat_timeout=heartbeat_timeout
    ) as service:
        shared = {**os.environ, **(environment or {}), **environment_of(card_of(service.address, folder, secret))}
        shared |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "PYTHONUNBUFFERED": "1"}
        shared.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores, as torchrun assumes too
        children = Children(command, nproc, shared, folder / "logs", quiet)
        try:
            return children.watch(service)
        finally:
            children.end_all()


class Children:
    """The ranks' processes."""

    def __init__(self, command: Sequence[str], nproc: int, shared: dict[str, str], logs: Path, quiet: bool) -> None:
        self._quiet = quiet
        self._printing = threading.Lock()
        self._last_words: dict[int, list[str]] = {rank: [] for rank in range(nproc)}
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        try:
            for rank in range(nproc):
                self._start(command, rank, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, logs)
        except BaseException:
            self.end_all()
            raise

    def _start(self, command: Sequence[str], rank: int, environment: dict[str, str], logs: Path) -> None:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._processes.append(process)
        log = (logs / f"rank-{rank:04d}.log").open("w")
        lock = threading.Lock()
        readers = []
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            readers.append(threading.Thread(target=self._copy, args=(rank, stream, target, log, lock), daemon=True))
        self._readers += [*readers, threading.Thread(target=_close_after, args=(log, readers), daemon=True)]
        for reader in self._readers[-3:]:
            reader.start()

    def _copy(self, rank: int, stream: IO[str], target: IO[str], log: IO[str], lock: threading.Lock) -> None:
        for line in stream:
            with lock:
                log.write(line)
                log.flush()
            if target is sys.stderr:
                self._last_words[rank] = [*self._last_words[rank][-40:], line.rstrip("\n")]
            if not self._quiet:
                with self._printing:
                    print(f"[rank {rank}] {line}", end="", file=target, flush=True)
        stream.close()

    def watch(self, service: ControlService) -> Launch:
        """Until all have ended, or some time after the first has failed."""
        first_failed, give_up_at = None, float("inf")
        told: set[int] = set()
        while len(told) < len(self._processes) and time.monotonic() < give_up_at:
            for rank, process in enumerate(self._processes):
                code = process.poll()
                if code is None or rank in told:
                    continue
                told.add(rank)
                if code != 0:
                    service.report_exit(rank, _in_words(code))
                    first_failed = rank if first_failed is None else first_failed
                if first_failed is not None and not self._goes_on(service, told):
                    give_up_at = min(give_up_at, time.monotonic() + GRACE_SECONDS)
            time.sleep(POLL_SECONDS)
        self.end_all()
        codes = [process.returncode for process in self._processes]
        state = service.status()
        lost = sorted(map(int, state["lost"])) if state["survives"] and 0 in codes else []
        return Launch(codes, None if lost else first_failed, self._last_words, lost)

    def _goes_on(self, service: ControlService, ended: set[int]) -> bool:
        """Whether the run goes on without lost ranks, and not all that still runs is lost."""
        state, running = service.status(), set(range(len(self._processes))) - ended
        return bool(state["survives"]) and not running <= set(map(int, state["lost"]))

    def end_all(self) -> None:
        """Ask every child that still runs to end, then make it; wait until their output is read."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + KILL_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join(KILL_SECONDS)  # a grandchild may hold the pipe open


def _close_after(log: IO[str], readers: list[threading.Thread]) -> None:
    for reader in readers:
        reader.join()
    log.close()


def _in_words(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _end_with_parent() -> None:
    """Runs in the child: if the launcher dies, however it dies, the kernel ends the child too."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
