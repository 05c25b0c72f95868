"""What can be said of this machine without torch: versions, cores, limits, ports, names."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import time
from pathlib import Path

from paceline.doctor.host import OK, PROBLEM, WARNING, Finding
from paceline.report.words import size
from paceline.versions import versions

OLDEST_TORCH = (2, 6)
TESTED_TORCH = "2.13"
TORCHRUN_PORT = 29500
SHARED_MEMORY = 256 * 2**20  # Docker gives 64 MB by default, which the batches of a few loading processes fill
JUMP_SECONDS = 0.1  # clocks are slewed by far less in a minute
DESCRIPTORS_ALONE, DESCRIPTORS_A_RANK = 64, 8  # files, logs and libraries; sockets to one other rank


def check_machine(ranks: int, several_hosts: bool) -> list[Finding]:
    """All checks that need no torch.

    Args:
        ranks: that a process would be joined with.
        several_hosts: whether others will look for this machine by its name.
    """
    found = [
        _python(),
        check_torch(versions()["torch"]),
        _cores(),
        check_descriptors(ranks),
        check_shared_memory(),
        check_ports(),
    ]
    return [*found, check_own_name()] if several_hosts else found


def usable_cores() -> int:
    """Those that this process may run on, and no more than a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota() -> float | None:
    """Cores' worth of time that the control group grants; None if it grants all."""
    try:
        words = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if words[0] == "max" else int(words[0]) / int(words[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        folder = Path("/sys/fs/cgroup/cpu")
        given, period = (int((folder / f"cpu.cfs_{key}_us").read_text()) for key in ("quota", "period"))
        return given / period if given > 0 else None
    except (OSError, ValueError):
        return None


def cpu_name() -> str:
    """As its maker calls it, if the system tells."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return " ".join(found[1].split()) if found else platform.machine()


def _python() -> Finding:
    said = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform == "linux":
        return Finding("python", OK, said)
    return Finding(
        "python", WARNING, said, cause="Paceline is tested on Linux alone.", remedy="Expect surprises elsewhere."
    )


def check_torch(version: str) -> Finding:
    """Whether torch is installed and new enough, by the version in its metadata."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return Finding(
            "torch", PROBLEM, "not installed", cause="Nothing can be trained or measured.", remedy="pip install torch"
        )
    if (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Finding(
            "torch", PROBLEM, version, cause=f"Older than {oldest}.", remedy=f"pip install 'torch>={oldest}'"
        )
    return Finding("torch", OK, f"{version} (Paceline is tested with {TESTED_TORCH})")


def _cores() -> Finding:
    cores = usable_cores()
    said = f"{cores} usable of {os.cpu_count()}"
    try:
        load = os.getloadavg()[0]
    except OSError:
        return Finding("cores", OK, said)
    said += f", load {load:.1f}"
    if load < 0.5 * cores:
        return Finding("cores", OK, said)
    return Finding(
        "cores",
        WARNING,
        said,
        cause="Others compute here too, so that speeds come out low.",
        remedy="Measure again when the machine is idle.",
    )


def check_descriptors(ranks: int) -> Finding:
    """Whether a rank could open sockets to so many others."""
    try:
        import resource
    except ImportError:
        return Finding("files", OK, "no limit known")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("files", OK, "no limit")
    needed = DESCRIPTORS_ALONE + DESCRIPTORS_A_RANK * ranks
    said = f"{soft:,} may be open at once"
    if soft >= needed:
        return Finding("files", OK, said)
    enough = "" if hard == resource.RLIM_INFINITY or hard >= needed else f" as root (the hard limit is {hard:,})"
    return Finding(
        "files",
        PROBLEM,
        said,
        cause=f"A rank among {ranks} needs about {needed:,}: sockets to each other one.",
        remedy=f"ulimit -n {needed}{enough}",
    )


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """What a DataLoader with worker processes hands its batches over in."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return Finding(
            "shared memory",
            WARNING,
            f"{folder} cannot be looked at",
            cause="A loader with worker processes needs it.",
            remedy="Use loaders with num_workers=0, or mount a tmpfs there.",
        )
    said = f"{size(free)} free in {folder}"
    if free >= SHARED_MEMORY:
        return Finding("shared memory", OK, said)
    return Finding(
        "shared memory",
        WARNING,
        said,
        cause="A loader with worker processes dies of a bus error when it is full; Docker gives 64 MB.",
        remedy="docker run --shm-size=2g, or loaders with num_workers=0.",
    )


def check_ports() -> Finding:
    """Whether one is to be had, and whether torchrun's usual one is."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        return Finding(
            "ports",
            PROBLEM,
            f"none to be had on 127.0.0.1: {error.strerror or error}",
            cause="Too many connections, a sandbox without a network, or a loopback that is down.",
            remedy="Look at `ss -s` and `ip addr show lo`.",
        )
    try:
        with socket.create_server(("127.0.0.1", TORCHRUN_PORT)):
            pass
    except OSError:
        return Finding(
            "ports",
            WARNING,
            f"free ones are there, but {TORCHRUN_PORT} is taken",
            cause="A run under torchrun is on, or an earlier one was left.",
            remedy="torchrun --master-port=0, or `paceline run`, which takes a free one.",
        )
    return Finding("ports", OK, f"free ones are there, torchrun's {TORCHRUN_PORT} too")


def check_own_name() -> Finding:
    """Between hosts gloo binds to what this machine's own name stands for, and that is what the others call."""
    name = socket.gethostname()
    remedy = "Add it to /etc/hosts with the address that others reach, or set GLOO_SOCKET_IFNAME."
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        cause = "Runs over several hosts look it up, with gloo."
        return Finding("own name", WARNING, f"{name} stands for no address", cause=cause, remedy=remedy)
    if address.startswith("127.") or address == "::1":
        cause = "gloo would tell the other hosts to call that."
        return Finding("own name", WARNING, f"{name} is {address}, the loopback", cause=cause, remedy=remedy)
    return Finding("own name", OK, f"{name} is {address}")


class ClockWatch:
    """Tells whether the clock was set while one looked elsewhere: the ranks' times begin at what it says."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def finding(self) -> Finding:
        moved = time.time() - time.monotonic() - self._offset
        if abs(moved) < JUMP_SECONDS:
            return Finding("clock", OK, "steady")
        return Finding(
            "clock",
            WARNING,
            f"jumped by {moved:+.1f} s within this minute",
            cause="It was set, or the machine slept.",
            remedy="Let chrony or ntpd slew it; timelines of runs are wrong by that much.",
        )
