"""What a launcher makes of the deaths of its ranks, with processes and a control plane of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.launch import local
from paceline.launch.local import Ranks
from paceline.launch.replacing import Replacing

SILENT = "it gave no sign of life for 2 s"


class Process:
    """One that ends with a code after so many looks."""

    pid = None

    def __init__(self, code: int, looks: int = 0) -> None:
        self._code, self._looks = code, looks
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self._looks -= 1
        if self._looks < 0 and self.returncode is None:
            self.returncode = self._code
        return self.returncode

    def terminate(self) -> None:
        self.returncode = -15 if self.returncode is None else self.returncode

    kill = terminate

    def wait(self, timeout: float | None = None) -> int:
        assert self.returncode is not None
        return self.returncode


class Host(Ranks):
    """The ranks of one host, and the control plane as they see it."""

    def __init__(self, processes: dict[int, Process], replacing: Replacing, lost: set[int]) -> None:
        super().__init__(list(processes), quiet=True, replacing=replacing)
        self._processes = list(processes.values())
        self.lost, self.joining, self.started = lost, set[int](), list[int]()
        self.reachable: Callable[[], bool] = lambda: True

    def _start(self, rank: int, joins: bool = False) -> Process:
        assert joins
        self.started.append(rank)
        if len(self.started) == 2:
            self.joining = set(self.started)
        return Process(0, looks=20)

    def report_exit(self, rank: int, reason: str) -> None:
        self.lost.add(rank)

    def status(self) -> dict[str, Any]:
        if not self.reachable():
            raise PacelineError("The connection to the control service is gone.")
        if self.joining and self._processes[0].returncode == 0:  # they have taken part, and ended
            self.lost -= self.joining
            self.joining.clear()
        told = {"lost": {str(rank): SILENT for rank in sorted(self.lost)}, "left": [], "joining": sorted(self.joining)}
        return {**told, "present": [0, 1, 4], "survives": True, "admits": True, "servers": [4, 5]}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is given up is given up at once."""
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(local, "POLL_SECONDS", 0.0)


@pytest.mark.parametrize("to_the_end", [True, False], ids=["", "the control plane is gone when all have ended"])
def test_a_host_that_was_cut_off_goes_on_with_successors_but_for_its_server(to_the_end: bool) -> None:
    host = Host({2: Process(1), 3: Process(1), 5: Process(-9)}, Replacing(4), lost={2, 3, 5})
    host.reachable = lambda: to_the_end or any(each.returncode is None for each in host._processes) or not host.started
    outcome = host.watch(host)
    assert sorted(host.started) == [2, 3] and outcome.exit_codes == [0, 0, -9]
    assert outcome.ok and 5 in outcome.lost


def test_nobody_waits_for_a_rank_that_hangs_beside_one_that_is_not_started_again() -> None:
    host = Host({2: Process(1), 3: Process(0, looks=10**9)}, Replacing(0), lost={2, 3})
    outcome = host.watch(host)
    assert outcome.exit_codes == [1, -15] and outcome.first_failed == 2
