"""What runs inside Ray: the control plane, and the ranks of a run, each an actor.

They are ordinary classes, which the driver makes actors of. A rank tells its driver what its process writes and how it
ended by yielding it; so the driver hears the end of the actor itself where it listens anyway, within milliseconds.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.control.client import ControlClient
from paceline.errors import PacelineError
from paceline.launch.hosted import HostedService
from paceline.launch.local import end_with_parent
from paceline.launch.surroundings import FOLDER, ORIGIN
from paceline.ray.reporting import Board, Report

LISTEN_SECONDS = 5.0  # after a script's end
Lines = list[tuple[str, str]]
"""What a rank has written: `stdout` or `stderr`, and a line."""
Heard = Lines | int
"""What a rank tells its driver; at last its exit code."""


@dataclass(frozen=True)
class Spot:
    """Where Ray has placed a rank.

    Args:
        node: Ray's name of the machine.
        address: of the machine.
        host: its name, for people.
        gpus: that the rank was given, by their numbers there.
    """

    node: str
    address: str
    host: str
    gpus: Sequence[str] = ()

    @property
    def for_people(self) -> str:
        return f"{self.host} ({self.address})"


class ControlPlane:
    """The control service on the machine of the driver: who loses that one has lost the run in any case."""

    def __init__(self, world_size: int, secret: bytes, folder: Path, port: int, timeouts: Mapping[str, float]) -> None:
        import ray

        folder.mkdir(parents=True, exist_ok=True)
        self._service = HostedService(world_size, secret, ray.util.get_node_ip_address(), folder, port, **timeouts)
        self._client = ControlClient(self._service.address, secret, world_size)
        self._reports: list[Report] = []

    def address(self) -> tuple[str, int]:
        return self._service.address

    def report_exit(self, rank: int, reason: str) -> None:
        self._client.report_exit(rank, reason)

    def status(self) -> dict[str, Any]:
        return self._client.status()

    def report(self, report: Report) -> None:
        """Keep what a rank of `fit` tells."""
        self._reports.append(report)

    def reports(self) -> list[Report]:
        """All that ranks have told, in the order in which it came."""
        return self._reports

    def close(self) -> None:
        self._client.close()
        self._service.close()


class Placed:
    """A rank where Ray has placed it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:  # Ray puts it before what the actor prints
        return f"rank {self._rank}"

    def where(self) -> Spot:
        import ray

        node = ray.get_runtime_context().get_node_id()
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        return Spot(node, ray.util.get_node_ip_address(), socket.gethostname(), gpus)

    @staticmethod
    def _prepared(environment: Mapping[str, str], elapsed: float) -> dict[str, str]:
        """The rank's environment, with a folder on this machine, and the run's beginning by this machine's clock."""
        folder = Path(environment[FOLDER])
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PacelineError(
                f"The run's folder {folder} cannot be made on {socket.gethostname()}: {error.strerror}.",
                remedy="Give a place that can be written on every node, a shared one at best.",
            ) from error
        return {**environment, ORIGIN: repr(time.time() - elapsed)}


class ScriptRank(Placed):
    """A rank that runs a script, in a process of its own as under every other launcher."""

    _child: subprocess.Popen[str] | None = None

    def run(
        self, command: Sequence[str], folder: str, environment: Mapping[str, str], elapsed: float
    ) -> Iterator[Heard]:
        """Run the script; `folder` is the driver's working directory, which is taken where it exists."""
        folder = folder if Path(folder).is_dir() else os.getcwd()
        if not Path(folder, command[0]).is_file():
            raise PacelineError(
                f"There is no script {command[0]} in {folder} on {socket.gethostname()}.",
                remedy="Keep it where every node finds it, or send its folder along: ray job submit --working-dir . -- "
                "paceline run --engine ray ...",
            )
        self._child = child = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **self._prepared(environment, elapsed), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
        yield from _spoken(child)
        yield child.wait()

    def terminate(self) -> None:
        """Ask the script to end."""
        if self._child is not None:
            self._child.terminate()


class FunctionRank(Placed):
    """A rank that runs a function, in the actor's own process as Ray Train does; what it prints is Ray's to show."""

    def run(
        self, call: Callable[[], object], control: Any, environment: Mapping[str, str], elapsed: float
    ) -> Iterator[Heard]:
        os.environ.update(self._prepared(environment, elapsed))
        try:
            with Board(control, self._rank, Path(environment[FOLDER])):
                call()
        except BaseException:  # also SystemExit: a function that ends its process has not come to its end
            yield [("stderr", f"{line}\n") for line in traceback.format_exc().splitlines()]
            yield 1
            return
        yield 0


def _spoken(child: subprocess.Popen[str]) -> Iterator[Lines]:
    """What the child writes, as it comes; what has come at once is handed on at once."""
    heard: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()

    def listen(name: str, stream: IO[str]) -> None:
        for line in stream:
            heard.put((name, line))
        stream.close()

    def end(listeners: list[threading.Thread]) -> None:
        child.wait()
        for listener in listeners:
            listener.join(LISTEN_SECONDS)  # a grandchild may hold the pipe open
        heard.put(None)

    listeners = [
        threading.Thread(target=listen, args=(name, stream), daemon=True)
        for name, stream in (("stdout", child.stdout), ("stderr", child.stderr))
    ]
    for thread in (*listeners, threading.Thread(target=end, args=(listeners,), daemon=True)):
        thread.start()
    over = False
    while not over:
        found = [heard.get()]
        while not heard.empty():
            found.append(heard.get())
        over = None in found
        lines = [each for each in found if each is not None]
        if lines:
            yield lines
