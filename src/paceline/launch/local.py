"""Starts the ranks of a run that belong to this machine, watches them, and ends every one of them.

The control plane is a child of the launcher, with several hosts of the first one's; so it outlives any rank, and is
started again if it dies. The launcher sees a rank's death at once (its exit), where a heartbeat would need seconds, and
tells the control plane.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol

from paceline.control.client import ControlClient
from paceline.control.membership import ON_NOTICE
from paceline.errors import PacelineError
from paceline.launch.hosted import HostedService
from paceline.launch.replacing import Replacing
from paceline.launch.stops import Stops
from paceline.launch.surroundings import JOINS, address_on, card_of, environment_of

POLL_SECONDS = 0.05
LOOK_SECONDS = 0.25  # between two looks whether somebody is lost whose process still runs
STOPPED_SECONDS = 1.0  # until a process that is stopped counts as lost: nobody stops one for less, but to look at it
STOPPED_LOOKS = round(STOPPED_SECONDS / POLL_SECONDS)
JOIN_SECONDS = 120.0
GRACE_SECONDS = 10.0  # after the first death: time for the others to say what they noticed
KILL_SECONDS = 5.0  # between asking to end and ending
NOBODY: Final[dict[str, Any]] = dict.fromkeys(("left", "present", "joining", "servers"), ())
GONE: Final[dict[str, Any]] = {**NOBODY, "lost": {}, "survives": False, "admits": False}
"""What can be known of a run whose control plane is gone for good: nobody can go on."""
LAST_LINES = 200  # of a rank's errors: a long traceback, and what was said before it


@dataclass
class Launch:
    """What came of a launch: the exit code of every rank of this host, and what each wrote last to its standard error.
    A run that went on without lost ranks has not failed."""

    exit_codes: list[int]
    first_failed: int | None = None
    last_words: dict[int, list[str]] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)  # ranks that the run went on without
    left: list[int] = field(default_factory=list)  # ranks that left on notice
    ended: bool = True  # whether somebody stayed to the end
    ranks: Sequence[int] = ()  # of this host, as the exit codes are; by default from 0 on
    elsewhere: dict[int, str] = field(default_factory=dict)  # lost ranks of other hosts, in order, and why
    first_elsewhere: bool = False  # whether the first of all that were lost is one of those
    reasons: dict[int, str] = field(default_factory=dict)  # of ranks whose exit code does not say why they ended

    @property
    def ok(self) -> bool:
        return self.first_failed is None

    def how(self, rank: int) -> str:
        """How the rank ended, in words."""
        return self.elsewhere.get(rank) or self.reasons.get(rank) or _in_words(self.exit_code(rank))

    def exit_code(self, rank: int) -> int:
        """Of a rank of this host."""
        return self.exit_codes[list(self.ranks).index(rank) if self.ranks else rank]


@dataclass(frozen=True)
class Place:
    """The part of this host in a run: its ranks, of how many, all that they need to find their run, and whether they
    join it while it runs."""

    ranks: Sequence[int]
    world_size: int
    card: dict[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    joins: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.card["folder"])


def launch(
    command: Sequence[str],
    nproc: int,
    folder: Path,
    *,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
    quiet: bool = False,
    replace: int = 0,
    **timeouts: float,
) -> Launch:
    """Run the command once for every rank and wait for all.

    Args:
        command: what to run; it finds its rank in its environment.
        nproc: how many ranks.
        folder: the run's folder, made before.
        port: of the control plane; 0 takes a free one.
        environment: further variables; `roles.environment_of_servers` says how many ranks, the last ones, serve.
        quiet: keep what the ranks print for `logs/` alone.
        replace: how often, in all, a rank that was lost is started again, to join the run.
        timeouts: in seconds: `join_timeout`, until a rank that has not arrived is given up, 120 by default;
            `heartbeat_timeout`, of silence after which a rank that hangs is given up; `stuck_timeout`, that a rank may
            be busy with its own code while others wait for it; `return_timeout`, until ranks give up a control plane
            that has died and does not come back.
    """
    with ended_by_sigterm(), place_alone(nproc, folder, port=port, environment=environment, **timeouts) as place:
        return run_ranks(command, place, quiet, replace)


@contextmanager
def place_alone(
    nproc: int, folder: Path, *, port: int = 0, environment: Mapping[str, str] | None = None, **timeouts: float
) -> Iterator[Place]:
    """All ranks on this machine, and their control plane as long as the block lasts; see `launch`."""
    secret = secrets.token_bytes(32)
    timeouts = {"join_timeout": JOIN_SECONDS, **timeouts}
    with HostedService(nproc, secret, "127.0.0.1", folder, port, **timeouts) as service:
        yield Place(range(nproc), nproc, card_of(service.address, folder, secret), environment or {})


def run_ranks(command: Sequence[str], place: Place, quiet: bool = False, replace: int = 0) -> Launch:
    """Run the command once for every rank of this host and wait for all; see `launch`."""
    logs = place.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ControlClient(address_on(place.card), bytes.fromhex(place.card["secret"]), place.world_size) as control:
        shared = {**os.environ, **place.environment, **environment_of(place.card)}
        shared |= {"WORLD_SIZE": str(place.world_size), "LOCAL_WORLD_SIZE": str(len(place.ranks))}
        shared["PYTHONUNBUFFERED"] = "1"
        shared.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores, as torchrun assumes too
        children = Children(command, place.ranks, shared, logs, quiet, Replacing(replace))
        try:
            children.start(place.joins)
            return children.watch(control)
        finally:
            children.end_all()


class Process(Protocol):
    """What a launcher asks of a rank's process; those of `subprocess` answer it."""

    @property
    def pid(self) -> int | None: ...  # none for one on another machine
    @property
    def returncode(self) -> Any: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Control(Protocol):
    """What a launcher asks of the control plane."""

    def report_exit(self, rank: int, reason: str) -> None: ...
    def status(self) -> dict[str, Any]: ...


class Ranks:
    """The ranks' processes, wherever they are: heard, watched and ended."""

    def __init__(self, ranks: Sequence[int], quiet: bool, replacing: Replacing) -> None:
        self._quiet, self._ranks, self._replacing = quiet, list(ranks), replacing
        self._look_at = float("inf") if replacing.never else 0.0
        self._last_known = GONE
        self._stops = Stops(STOPPED_LOOKS)
        self._printing = threading.Lock()
        self._last_words: dict[int, list[str]] = {rank: [] for rank in ranks}
        self._reasons: dict[int, str] = {}
        self._processes: list[Process] = []
        self._readers: list[threading.Thread] = []

    def _hear(self, rank: int, line: str, target: IO[str]) -> None:
        """A line that a rank has written."""
        if target is sys.stderr:
            self._last_words[rank] = [*self._last_words[rank][-LAST_LINES:], line.rstrip("\n")]
        if not self._quiet:
            with self._printing:
                print(f"[rank {rank}] {line}", end="", file=target, flush=True)

    def watch(self, control: Control) -> Launch:
        """Until all have ended, or some time after the first has failed."""
        first_failed, give_up_at = None, float("inf")
        failed: set[int] = set()
        told: set[int] = set()
        while (len(told) < len(self._processes) or self._replacing.waiting) and time.monotonic() < give_up_at:
            told -= self._replace(control)
            for rank in self._stops.look(self._pids()):
                self._report(control, rank, f"it was stopped, and did not go on for {STOPPED_SECONDS:g} s")
            for rank, process in zip(self._ranks, self._processes, strict=True):
                code = process.poll()
                if code is None or rank in told:
                    continue
                told.add(rank)
                if code != 0:
                    how = self._reasons.get(rank) or _in_words(code)
                    self._report(control, rank, how)
                    if self._replacing.plan(rank, how, self._status(control), time.monotonic()):
                        continue
                    first_failed = rank if first_failed is None else first_failed
                    failed.add(rank)
                if not self._goes_on(control, told, first_failed is not None):
                    give_up_at = min(give_up_at, time.monotonic() + GRACE_SECONDS)
            time.sleep(POLL_SECONDS)
        self.end_all()
        codes = [process.returncode for process in self._processes]
        self._status(control)
        state = self._last_known  # the run may be over, and its control plane, on another host, gone
        left = sorted(int(rank) for rank, why in state["lost"].items() if why == ON_NOTICE)
        stayed = any(code == 0 and rank not in left for rank, code in zip(self._ranks, codes, strict=True))
        lost = sorted({*map(int, state["lost"])} - {*left}) if state["survives"] and stayed else []
        elsewhere = {int(rank): why for rank, why in state["lost"].items() if int(rank) not in self._ranks}
        return Launch(
            codes,
            None if lost else _first(state, failed, first_failed),
            self._last_words,
            lost,
            left,
            not left or bool(state["left"]),
            self._ranks,
            elsewhere,
            next(iter(map(int, state["lost"])), None) in elsewhere,
            self._reasons,
        )

    def _replace(self, control: Control) -> set[int]:
        """End those who are lost and do not know it, and start again whose turn it is; who was started."""
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            for rank in self._replacing.stranded(self._status(control)):
                if rank in self._ranks:
                    self._processes[self._ranks.index(rank)].kill()
        started = self._replacing.due(time.monotonic())
        for rank in started:
            self._processes[self._ranks.index(rank)] = self._start(rank, joins=True)
        return set(started)

    def _pids(self) -> dict[int, int]:
        """Ranks that run, and their processes, where those are on this machine."""
        pids = {rank: each.pid for rank, each in zip(self._ranks, self._processes, strict=True) if each.poll() is None}
        return {rank: pid for rank, pid in pids.items() if pid is not None}

    def _start(self, rank: int, joins: bool = False) -> Process:
        """Start the rank's process, `joins` for one that joins a running training; of a launcher that replaces."""
        raise PacelineError(f"Rank {rank} cannot be started again here.")

    @staticmethod
    def _report(control: Control, rank: int, reason: str) -> None:
        with suppress(PacelineError):  # the control plane is gone for good: the ranks will say so themselves
            control.report_exit(rank, reason)

    def _goes_on(self, control: Control, ended: set[int], one_failed: bool) -> bool:
        """Whether nobody has failed, or the run survives that; and not all that still runs is lost, one that hangs
        say, and has no successor."""
        state, coming = self._status(control), self._replacing.coming
        running = set(self._ranks) - ended | coming
        survives, lost = bool(state["survives"]), {int(r) for r, why in state["lost"].items() if why != ON_NOTICE}
        return (not one_failed and not lost) or (survives and not running <= lost - coming)

    def _status(self, control: Control) -> dict[str, Any]:
        try:
            self._last_known = control.status()
        except PacelineError:
            return GONE
        return self._last_known

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


class Children(Ranks):
    """The ranks as child processes of the launcher."""

    def __init__(
        self,
        command: Sequence[str],
        ranks: Sequence[int],
        shared: dict[str, str],
        logs: Path,
        quiet: bool,
        replacing: Replacing,
    ) -> None:
        super().__init__(ranks, quiet, replacing)
        self._command, self._shared, self._logs = command, shared, logs

    def start(self, joins: bool) -> None:
        """All of them; see `_start`."""
        for rank in self._ranks:
            self._processes.append(self._start(rank, joins))

    def _start(self, rank: int, joins: bool = False) -> subprocess.Popen[str]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(self._ranks.index(rank)), **({JOINS: "1"} if joins else {})}
        process = subprocess.Popen(
            self._command,
            env=self._shared | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
        log = (self._logs / f"rank-{rank:04d}.log").open("a" if joins else "w")
        lock = threading.Lock()
        readers = []
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            readers.append(threading.Thread(target=self._copy, args=(rank, stream, target, log, lock), daemon=True))
        self._readers += [*readers, threading.Thread(target=_close_after, args=(log, readers), daemon=True)]
        for reader in self._readers[-3:]:
            reader.start()
        return process

    def _copy(self, rank: int, stream: IO[str], target: IO[str], log: IO[str], lock: threading.Lock) -> None:
        for line in stream:
            with lock:
                log.write(line)
                log.flush()
            self._hear(rank, line, target)
        stream.close()


def _first(state: dict[str, Any], failed: set[int], first_seen: int | None) -> int | None:
    """Who failed first, of those that ended by themselves. A rank that fails says so to the control plane before its
    process ends, and the others may have ended before it has: so whom the control plane lost first counts more."""
    return next((int(rank) for rank in state["lost"] if int(rank) in failed), first_seen)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that whatever was started is ended. Only main threads hear signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _close_after(log: IO[str], readers: list[threading.Thread]) -> None:
    for reader in readers:
        reader.join()
    log.close()


def _in_words(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end_with_parent() -> None:
    """Runs in the child: if the launcher dies, however it dies, the kernel ends the child too. Not by SIGTERM, which
    a script may not heed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
