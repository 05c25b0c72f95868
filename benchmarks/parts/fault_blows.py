"""What strikes a run, and how: a row of `KINDS` for each kind of fault, and a method of `Blow` for each way."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launch.local import STOPPED_SECONDS as LAUNCHER_SECONDS
from parts.forked import ForkedRanks

EARLIEST, LATEST = 0.7, 2.7  # seconds after the last has started
HEARTBEAT_SECONDS, STUCK_SECONDS = 2.0, 2.0
STOPPED_SECONDS = 20.0
FAREWELL_SECONDS = 30.0  # for a further worker to end when the run is over
FULL_SECONDS = 1.0  # then there is room again: only the last checkpoint of a run must not fail
DISK = "4m"
POLL_SECONDS = 0.0005
BEATS = {"heartbeat_timeout": HEARTBEAT_SECONDS}


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Args:
        how: the method of `Blow` that strikes; none for a run without a fault.
        victims: how many workers are struck, by chance; 0 where it is somebody else.
        epochs: of the data; six are about five seconds.
        replace: how often a lost rank is started again, where the strategy takes newcomers.
        terms: time-outs of the control plane.
        saves: whether checkpoints are written all the time.
        window: seconds in which a loss is found, beside the half second that is promised.
    """

    how: str
    victims: int = 1
    epochs: int = 6
    replace: int = 0
    terms: Mapping[str, float] = field(default_factory=dict)
    saves: bool = False
    window: float = 0.0


NONE, WORKER, RANK_0, SERVER, CONTROL = "nobody", "a worker", "rank 0", "a group server", "the control plane"
TWO, ALL_BUT_ONE, STOPPED, STUCK = "two workers at once", "all workers but one", "a worker stopped", "a worker stuck"
NOTICE, JOINING, SAVING, FULL = "a worker told to leave", "a newcomer", "the rank that saves", "the disk, full"
FIFTH = "nobody, and a fifth worker joins"
WORKERS = 4
KINDS: dict[str, Kind] = {
    NONE: Kind("", 0),
    WORKER: Kind("kill"),
    RANK_0: Kind("kill", 0),
    SERVER: Kind("kill", 0),
    CONTROL: Kind("kill_control_plane", 0),
    TWO: Kind("kill", 2),
    ALL_BUT_ONE: Kind("kill", WORKERS - 1),
    NOTICE: Kind("tell_to_leave"),
    STOPPED: Kind("stop", epochs=30, replace=2, window=LAUNCHER_SECONDS),
    STUCK: Kind(
        "make_stuck", epochs=10, terms={**BEATS, "stuck_timeout": STUCK_SECONDS}, window=2 * STUCK_SECONDS + 1.0
    ),
    FIFTH: Kind("add_worker", 0),
    JOINING: Kind("kill_newcomer", epochs=12, replace=2),
    SAVING: Kind("kill_while_saving", 0, saves=True),
    FULL: Kind("fill_disk", 0, saves=True),
}


def victims_of(kind: str, servers: int, chance: random.Random) -> list[int]:
    """Ranks that are struck, or the one that joins; none for a run without a fault, the control plane or the disk."""
    if kind == FIFTH:
        return [WORKERS + servers]
    if kind == SERVER:
        return [WORKERS + chance.randrange(servers)]
    return [0] if kind in (RANK_0, SAVING) else chance.sample(range(WORKERS), KINDS[kind].victims)


class Blow(threading.Thread):
    """Strikes some time after all ranks have begun to train.

    Args:
        ranks: their processes.
        began: files that the ranks write when they begin.
        victims: which of them are struck.
        kind: how.
        chance: decides when.
    """

    def __init__(
        self, ranks: ForkedRanks, began: Sequence[Path], victims: Sequence[int], kind: str, chance: random.Random
    ) -> None:
        super().__init__(daemon=True)
        self._ranks, self._began, self._victims, self._chance = ranks, began, victims, chance
        self._how, self._moment = KINDS[kind].how, chance.uniform(EARLIEST, LATEST)
        self._checkpoints = began[0].parents[1] / "checkpoints"
        self.at = 0.0
        """`time.time()` of the blow; 0 if there was none."""
        self.hit = True
        """Whether it came when it should: in the middle of something."""
        self.over = threading.Event()
        """Set when the run has ended."""

    def run(self) -> None:
        deadline = time.monotonic() + 120
        while not all(path.exists() and '"start"' in path.read_text() for path in self._began):
            if time.monotonic() > deadline or self.over.wait(0.02):
                return
        if self._how:
            time.sleep(self._moment)
            getattr(self, self._how)()

    def send(self, number: int) -> None:
        self.at = time.time()
        for rank in self._victims:
            os.kill(self._ranks.pid(rank), number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def kill_control_plane(self) -> None:
        self.at = time.time()
        for pid in control_planes(os.getpid()):
            os.kill(pid, signal.SIGKILL)

    def tell_to_leave(self) -> None:
        self.send(signal.SIGTERM)

    def add_worker(self) -> None:
        self.at = time.time()
        further = self._ranks.join_run()
        self.over.wait()
        try:
            self.hit = further.wait(FAREWELL_SECONDS) == 0
        except subprocess.TimeoutExpired:
            self.hit = False
            further.kill()

    def make_stuck(self) -> None:
        self.send(signal.SIGUSR1)

    def stop(self) -> None:
        self.send(signal.SIGSTOP)
        self.over.wait(STOPPED_SECONDS)
        for rank in self._victims:
            with suppress(ProcessLookupError):  # a successor has taken its place
                os.kill(self._ranks.pid(rank), signal.SIGCONT)

    def kill_newcomer(self) -> None:
        """Some time after it was started to take the place of a rank that was killed."""
        self.kill()
        self.hit = False
        while not self.over.wait(POLL_SECONDS):
            if self._ranks.successors():
                time.sleep(self._chance.uniform(0.0, 0.6))
                self.hit, self.at = True, time.time()
                self._ranks.successors()[0].kill()
                return

    def kill_while_saving(self) -> None:
        self.hit = False
        while not self.over.wait(POLL_SECONDS):
            if any(self._checkpoints.glob(".*.writing")):
                self.hit = True
                self.kill()
                return

    def fill_disk(self) -> None:
        ballast = self._checkpoints / "ballast"
        self.at = time.time()
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        self.over.wait(FULL_SECONDS)
        ballast.unlink()


def control_planes(parent: int) -> list[int]:
    """Children of a process that are a control plane."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                owner = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if owner == parent and b"paceline.control" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile
                continue
    if not found:
        raise PacelineError("There is no control plane to be killed.")
    return found


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of its own at the folder, as long as the block lasts."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
