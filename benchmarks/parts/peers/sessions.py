"""Sessions: the processes of one method, shut off from everything else, and the environments that peers live in.

A session gets a network and a table of processes of its own where the system lets us: then its traffic can be told from
everybody else's, its ports collide with nobody's, and whatever a peer has started ends with it. Nothing is mounted that
outlives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import re
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from paceline.launch.roles import environment_of_servers
from paceline.strategies import create
from parts.peers.course import WORKERS, Race
from parts.peers.lane import APART, LAUNCHED, TRACES
from parts.peers.methods import RANKS

BENCHMARKS = Path(__file__).parents[2]
ROOT = BENCHMARKS.parent
ENVIRONMENTS = ROOT / ".venv" / "peers"
OWN_TABLES = ["unshare", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
SET_UP_SECONDS, RACE_SECONDS = 300.0, 60.0  # given to a session, and to each of its races beyond its own time
AUTOGROUP, SHARE = Path("/proc/self/autogroup"), "PEERS_SHARE"
GIVES_WAY, NICEST = 8, 19  # with less than 3, starting up held up the sleepers of other sessions by 4 to 6 ms
INSTALL_SECONDS = 1200.0
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.5
SCHED_SETATTR, SLICE_NANOSECONDS = 314, 100_000


class NotInstalledError(Exception):
    """A peer's environment cannot be made."""


@dataclass(frozen=True)
class Failure:
    """Why a session has no outcome."""

    reason: str


def can_be_apart() -> bool:
    """Whether a session may have a network and a process table of its own."""
    if shutil.which(OWN_TABLES[0]) is None:
        return False
    return subprocess.run([*OWN_TABLES, "true"], capture_output=True, timeout=20).returncode == 0


def environment(package: str) -> Path:
    """The python of a throw-away environment that has the package, on top of the project's own. Made once; delete
    .venv/peers to make it anew."""
    if not package:
        return Path(sys.executable)
    home = ENVIRONMENTS / package.partition("[")[0]
    python, done = home / "bin" / "python", home / "installed"
    if done.exists():
        return python
    print(f"Installing {package} into an environment of its own ...", flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True, text=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = home / "lib" / version / "site-packages"
        above = Path(sys.prefix) / "lib" / version / "site-packages"
        (own / "project.pth").write_text(f"import site; site.addsitedir({str(above)!r})\n")
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["-c", str(ROOT / "constraints.txt"), package]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(home, ignore_errors=True)
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise NotInstalledError(f"it cannot be installed: {said[-1] if said else error}") from error
    done.touch()
    return python


def versions_of(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """As the environment has them; those that it has not are left out."""
    code = (
        "import importlib.metadata as m, json, sys\nfound = {}\nfor name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    told = subprocess.run([str(python), "-c", code, *packages], capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = json.loads(told)
    return found


def run_session(
    races: Sequence[Race],
    command: Sequence[str],
    folder: Path,
    traces: Path,
    come_to_an_end: Callable[[int], None],
    stop: threading.Event,
) -> Failure | None:
    """Races of one method, one after the other in the same processes.

    Args:
        races: all of them.
        command: see `command_of`.
        folder: for what comes of them.
        traces: recorded jobs.
        come_to_an_end: told the number of each race that is over, as soon as it is.
        stop: ends it early.
    """
    folder.mkdir(parents=True)
    (folder / "races.json").write_text(json.dumps([race.as_dict() for race in races]))
    for number in range(len(races)):
        (folder / str(number)).mkdir()
        (folder / str(number) / "stop").write_bytes(bytes(8))
    patience = Patience([race.seconds for race in races])
    (folder / "tmp").mkdir()
    environment = os.environ | {
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(BENCHMARKS)]),  # the project beside this file races
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        TRACES: str(traces.resolve()),
        LAUNCHED: repr(time.time()),
        SHARE: own_share(),
        APART: "yes" if command[0] == OWN_TABLES[0] else "",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, str(folder)],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(begin, own_share()),
        )
        over = 0
        try:
            while True:
                code = process.poll()
                while over < len(races) and is_over(folder / str(over)):
                    come_to_an_end(over)
                    over += 1
                    patience.over()
                if code is not None:
                    break
                if patience.at_an_end:
                    return Failure(f"race {over + 1} of {len(races)} did not end within {patience.limit:.0f} s")
                if stop.wait(POLL_SECONDS):
                    return Failure("it was stopped")
        finally:
            end(process)
    return None if code == 0 else Failure(last_error((folder / "log").read_text(errors="replace")))


class Patience:
    """How long a session may take to its next race's end: one that hangs shall not hold up the others for long.

    Args:
        seconds: of each race.
    """

    def __init__(self, seconds: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock = list(seconds), clock
        self.limit = SET_UP_SECONDS + self._left.pop(0) + RACE_SECONDS
        self._until = clock() + self.limit

    def over(self) -> None:
        """A race is. After the last one the session has its time to end."""
        self.limit = (self._left.pop(0) if self._left else 0.0) + RACE_SECONDS
        self._until = self._clock() + self.limit

    @property
    def at_an_end(self) -> bool:
        return self._clock() > self._until


def command_of(python: Path, module: str, *, apart: bool) -> list[str]:
    """What starts a session of this module's ranks."""
    return [*(OWN_TABLES if apart else []), str(python), "-m", "parts.peers.sessions", module]


def is_over(race: Path) -> bool:
    """Whether every worker has written what came of the race."""
    return all((race / f"over-{rank}").exists() for rank in range(WORKERS))


def own_share() -> str:
    """How nice this process's session is to others, where the kernel shares the processors out by session; else
    nothing. (How nice a process is counts only within its session.)"""
    try:
        return AUTOGROUP.read_text().split()[-1]
    except (OSError, IndexError):
        return ""


def begin(share: str) -> None:
    """Runs in the child: however the benchmark dies, the kernel ends the session too; and while it starts up, it gives
    way to races that are running."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if share:
        take_share(str(min(int(share) + GIVES_WAY, NICEST)))


def take_share(share: str) -> None:
    """Of the processors, for this process's session: a new one has forgotten how nice the benchmark's is to others."""
    if share:
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(share)


def end(process: subprocess.Popen[bytes]) -> None:
    """The session and all that it has started. What a peer has put into a process group of its own (Ray does) ends with
    the table of processes; where the session had none of its own, it is found by the session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
    for pid in [process.pid, *members(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def members(session: int) -> list[int]:
    """Every process of this session, as the kernel calls it: what `setsid` has begun."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()  # the name may hold anything
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def last_error(log: str) -> str:
    """The last line that an exception has ended with, else the last line.

    >>> last_error("INFO no error: all is well\\nray.exceptions.GetTimeoutError: too late\\na rank ended with 1\\n")
    'ray.exceptions.GetTimeoutError: too late'
    >>> last_error("")
    'it said nothing'
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Timeout|Exit)\b", line)]
    return (errors or lines or ["it said nothing"])[-1][:300]


# ---- inside a session


def bring_loopback_up() -> None:
    """A new network namespace has a loopback that is down."""
    up_and_running, get_flags, set_flags = 0x1 | 0x40, 0x8913, 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, get_flags, asked))
        if not flags & 0x1:
            fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", flags | up_and_running))


def wake_soon() -> None:
    """Ask for the shortest time slices (Linux 6.12 and newer): no more of the processors than one's due, but soon. On a
    busy machine sleeps of 10 ms then ended 0.9 ms late on average instead of 2.9."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    size, policy, flags, priority, deadline, period = 48, 0, 0, 0, 0, 0
    asked = struct.pack("IIQiIQQQ", size, policy, flags, nice, priority, SLICE_NANOSECONDS, deadline, period)
    if platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(SCHED_SETATTR, 0, ctypes.create_string_buffer(asked), 0)


def main() -> None:
    """The first process of a session. Ranks are forked from it when everything is imported: on real machines each would
    import for itself, at the same time, but here all of them share two cores. When one fails, all end."""
    module, folder = sys.argv[1], Path(sys.argv[2])
    wake_soon()
    bring_loopback_up()
    if module != RANKS:
        runpy.run_module(module, run_name="__main__")
        return
    from parts.peers import rank

    races, workload = rank.prepare(folder)
    take_share(os.environ[SHARE])
    servers = 0 if races[0].method in rank.LOOPS else create(races[0].method).servers_for(WORKERS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    count = WORKERS + servers
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **environment_of_servers(servers)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [fork(rank.run, number, (races, workload, folder)) for number in range(count)]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    try:
        while ranks:
            pid, status = os.wait()
            if pid in ranks and status:
                raise SystemExit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")
            ranks = [each for each in ranks if each != pid]
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        del store


def fork(run: Callable[..., None], rank: int, arguments: tuple[object, ...]) -> int:
    """A child that is this rank; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        wake_soon()
        run(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
