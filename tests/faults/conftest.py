"""Real launches of scripts that misbehave, and the proof that no process is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.launch import local
from paceline.launch.surroundings import new_run

SCRIPT = """
import os, signal, sys, time
RANK = int(os.environ["RANK"])
{first}
import torch
import paceline
from paceline.strategies.all_reduce import AllReduce

class Frail(AllReduce):  # all others go on without a lost rank
    name, survives = "frail", False

data = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
model = torch.nn.Linear(2, 1)
with paceline.Run(Frail() if "{strategy}" == "frail" else "{strategy}") as run:
    loader = run.loader(data, micro_batch=4, {length})
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for number, (x, y) in enumerate(loader):
        {each}
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        time.sleep(0.01)
        optimizer.step()
"""
WAIT_SECONDS = 60.0


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Write a training script. `each` is done with every micro-batch, `first` before torch is imported."""

    def write(*, each: str = "pass", first: str = "", strategy: str = "abs-sgd", length: str = "seconds=60") -> Path:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(each=each, first=first, strategy=strategy, length=length))
        return path

    return write


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[local.Launch, Path]]:
    """Launch a script in this process; its ranks must all be gone afterwards. `grace` is for those who will not end."""
    monkeypatch.setattr(local, "KILL_SECONDS", 1.5)

    def launch(path: Path, nproc: int, *, grace: float = 60.0, **options: Any) -> tuple[local.Launch, Path]:
        monkeypatch.setattr(local, "GRACE_SECONDS", grace)
        folder = new_run(tmp_path / "run")
        outcome = local.launch([sys.executable, str(path)], nproc, folder, **options)
        assert not children_of(os.getpid(), str(path))
        return outcome, folder

    return launch


def children_of(parent: int, holding: str) -> list[int]:
    """Running children of a process whose command line holds a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                if int(owner) == parent and state != "Z" and holding in command:
                    found.append(int(entry.name))
    return found


class Command:
    """`paceline run` as a process of its own, in a process group of its own, as a terminal would have it."""

    def __init__(self, arguments: list[str], cwd: Path) -> None:
        program = [sys.executable, "-c", "from paceline.cli import main; main()", *arguments]
        pipe = subprocess.PIPE
        # A shell's background job ignores Ctrl-C and passes that on; a command in a terminal does not.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                program, stdout=pipe, stderr=pipe, text=True, cwd=cwd, start_new_session=True
            )
        finally:
            signal.signal(signal.SIGINT, before)
        self.ranks: list[int] = []

    def wait_for_ranks(self, path: Path, nproc: int, cwd: Path, sign: str = "applied") -> None:
        """Until all ranks train: until each has written down such an event."""

        def training() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            files = list(cwd.glob("runs/run/*/events/rank-*.jsonl"))
            return len(files) == nproc and all(f'"{sign}"' in file.read_text() for file in files)

        wait_until(training, "the ranks to train")
        self.ranks = children_of(self.process.pid, str(path))
        assert len(self.ranks) == nproc

    def finish(self) -> tuple[int, str, str]:
        said, complained = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, said, complained


@pytest.fixture
def paceline(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start the command; whatever happens, its whole group is gone at the end."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(list(arguments), tmp_path))
        return started[-1]

    yield start
    for command in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.process.pid, signal.SIGKILL)
        command.process.communicate()


@pytest.fixture
def wait() -> Callable[..., Any]:
    return wait_until


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    return alive
