"""This machine, looked at: checks, devices and their speed, and what joins them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from paceline import workloads
from paceline.doctor.host import PROBLEM, Device, Finding, Host, Task
from paceline.doctor.machine import ClockWatch, check_machine, usable_cores
from paceline.simulator.network import Network
from paceline.versions import versions

BYTES_PER_PARAMETER = 4

Say = Callable[[list[Finding]], None]


class Examination:
    """One look at this machine.

    Args:
        workload, model: what to measure speed with.
        data: folder of its files.
        processes: ranks on the CPU where there is no GPU; None is one for each usable core.
        several_hosts: whether this machine is one of several.
        say: is told findings as they are made.
    """

    def __init__(
        self,
        workload: str,
        model: str | None,
        data: Path | None,
        processes: int | None,
        several_hosts: bool,
        say: Say = lambda findings: None,
    ) -> None:
        workloads.model_name(workload, model)  # protests when there is no such, before anything is measured
        self._workload, self._model, self._data = workload, model, data
        self._processes = usable_cores() if processes is None else processes
        self._several_hosts, self._tell = several_hosts, say
        self._findings: list[Finding] = []

    def _say(self, findings: list[Finding]) -> None:
        self._findings += findings
        self._tell(findings)

    def look(self) -> tuple[Host, Task | None]:
        """The machine, and what was trained on it; nothing was when torch is missing or too old."""
        watch = ClockWatch()
        self._say(check_machine(self._processes, self._several_hosts))
        devices: list[Device] = []
        network: Network | None = None
        task: Task | None = None
        if not any(finding.verdict == PROBLEM and finding.name == "torch" for finding in self._findings):
            devices, network, task = self._measure()
        self._say([watch.finding()])
        return Host(socket.gethostname(), versions(), tuple(devices), network, tuple(self._findings)), task

    def _measure(self) -> tuple[list[Device], Network | None, Task]:
        from paceline.doctor.compute import find_gpus, measure_devices, measure_network, task_of

        workload = workloads.load(self._workload, self._data, self._model)
        task = task_of(workload, self._model)
        gpus, found = find_gpus()
        self._say(found)
        network, finding = measure_network(gpus, task.parameters * BYTES_PER_PARAMETER)
        self._say([finding])
        devices, found = measure_devices(workload, gpus, self._processes)
        self._say(found)
        return devices, network, task
