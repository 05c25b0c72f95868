"""Real ranks for the tests of this folder: processes that a zygote forks, around a control service of the test's own.

`ranks(...)` does what the launcher does (hosts the control plane, reports deaths) without seconds of imports for
every rank. What is particular to the launchers themselves is tested with real launches.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.control.client import ControlClient
from paceline.control.service import ControlService
from paceline.launch.roles import SERVERS
from paceline.launch.surroundings import JOINS, card_of, environment_of, new_run
from paceline.record import Event, read_events
from paceline.strategies import create

HERE = Path(__file__).parent
IMPORT_SECONDS = 280.0  # of torch, on a machine that has much else to do
LONGEST_SECONDS = 90.0  # a guard against a hang; the runs take well under a second


@dataclass
class Outcome:
    """What came of a run."""

    folder: Path
    codes: list[int]
    facts: list[dict[str, Any]]
    outputs: list[str]
    ledger: dict[str, Any] | None

    @property
    def events(self) -> list[Event]:
        return read_events(self.folder / "events")

    @property
    def seen(self) -> Counter[tuple[int, int]]:
        """How often each (epoch, sample) was handed to a rank's loop."""
        return Counter((epoch, index) for fact in self.facts for epoch, index in fact["seen"])


class Zygote:
    """The test's end of the pipe."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-u", str(HERE / "zygote.py")]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        assert self._process.stdout is not None
        self._said = select.poll()  # not select: tests before this one may have opened more than 1,024 files
        self._said.register(self._process.stdout, select.POLLIN)
        self._codes: dict[int, int] = {}
        self._buffer = b""
        assert "ready" in self._answer(IMPORT_SECONDS)

    def start(self, order: dict[str, Any]) -> int:
        self._order(order)
        while "pid" not in (answer := self._answer(LONGEST_SECONDS)):
            self._codes[answer["ended"]] = answer["code"]
        return int(answer["pid"])

    def code(self, pid: int) -> int | None:
        """The exit code, if the process has ended."""
        if pid not in self._codes and (answer := self._answer(0.01)):
            self._codes[answer["ended"]] = answer["code"]
        return self._codes.get(pid)

    def kill(self, pid: int) -> None:
        if self.code(pid) is None:
            self._order({"kill": pid})

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LONGEST_SECONDS)
        self._process.stdout.close()

    def _order(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self, seconds: float) -> dict[str, int]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._said.poll(1000 * max(0.0, deadline - time.monotonic())):
                return {}
            self._buffer += os.read(self._process.stdout.fileno(), 65536)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


Ranks = Callable[..., Outcome]


@pytest.fixture
def ranks(zygote: Zygote, tmp_path: Path) -> Ranks:
    """Run a scenario of `scenarios.py` on so many ranks; the last one serves, if the strategy has servers."""

    def run(
        scenario: str,
        nproc: int,
        *,
        fails: bool = False,
        servers: int | None = None,
        replaced: int = 0,
        timeouts: dict[str, float] | None = None,
        further: int = 0,
        **options: Any,
    ) -> Outcome:
        if options.get("strategy") == "non-blocking":  # what is given up goes to a loop twice: see test_giving_up
            options["strategy"] += ":unfinished=finish"
        folder = new_run(tmp_path / "run")
        secret = secrets.token_bytes(32)
        with ControlService(nproc, secret, join_timeout=60.0, **timeouts or {}) as service:
            shared = environment_of(card_of(service.address, folder, secret)) | {"WORLD_SIZE": str(nproc)}
            shared[SERVERS] = str(servers if servers is not None else servers_of(options.get("strategy")))
            options |= {"further": further} if further else {}
            order = {"scenario": scenario, "options": options, "replaced": replaced}
            with ControlClient(service.address, secret, nproc) as launcher:
                enlist = partial(launcher.enlist, further) if further else None
                outcome = watch(zygote, service, folder, shared, order, nproc, enlist)
        if not fails:
            assert outcome.codes == [0] * (nproc + further), "\n".join(outcome.outputs)
        return outcome

    return run


def servers_of(strategy: str | None) -> int:
    return int(bool(strategy) and create(strategy).servers_for(1) > 0)


def watch(
    zygote: Zygote,
    service: ControlService,
    folder: Path,
    shared: dict[str, str],
    order: dict[str, Any],
    nproc: int,
    enlist: Callable[[], list[int]] | None,
) -> Outcome:
    pids: list[int] = []
    outputs, facts = list[Path](), list[Path]()
    replaced = order.pop("replaced")

    def start(rank: int, **more: str) -> int:
        outputs[rank:] = outputs[rank:] or [folder / f"output-{rank}"]
        facts[rank:] = facts[rank:] or [folder / f"facts-{rank}"]
        environment = shared | {"RANK": str(rank)} | more
        return zygote.start(
            order | {"environment": environment, "output": str(outputs[rank]), "facts": str(facts[rank])}
        )

    try:
        for rank in range(nproc):
            pids.append(start(rank))
        told: set[int] = set()
        deadline = time.monotonic() + LONGEST_SECONDS
        while len(told) < len(pids) and time.monotonic() < deadline:
            if enlist is not None and service.status()["survives"]:  # all have come
                pids += [start(rank, **{JOINS: "1"}) for rank in enlist()]
                enlist = None
            for rank, pid in enumerate(pids):
                code = zygote.code(pid)
                if code is not None and rank not in told:
                    told.add(rank)
                    if code:
                        service.report_exit(rank, f"ended with {code}")
                    if code and replaced:
                        while str(rank) not in service.status()["lost"]:
                            time.sleep(0.001)
                        replaced -= 1
                        told.discard(rank)
                        pids[rank] = start(rank, **{JOINS: "1"})
        state = service.status()
    finally:
        for pid in pids:
            zygote.kill(pid)
    said = [path.read_text() for path in outputs]
    assert len(told) == len(pids), f"ranks {sorted(set(range(len(pids))) - told)} hang\n" + "\n".join(said)
    codes = [zygote.code(pid) for pid in pids]
    found = [json.loads(path.read_text()) if path.exists() else {} for path in facts]
    return Outcome(folder, [code if code is not None else -9 for code in codes], found, said, state["ledger"])
