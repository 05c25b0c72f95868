"""What is said of a machine: each check finds what it is there for, and says what to do about it."""

from __future__ import annotations

import resource
import socket
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.doctor import compute, machine
from paceline.doctor.host import OK, PROBLEM, WARNING, Finding, spread_of
from paceline.doctor.machine import ClockWatch, check_descriptors, check_ports, check_shared_memory, check_torch


def test_a_machine_that_trains_passes() -> None:
    found = {finding.name: finding for finding in machine.check_machine(ranks=4, several_hosts=False)}
    assert [name for name, finding in found.items() if finding.verdict == PROBLEM] == []
    assert found["torch"].said.startswith(torch.__version__)
    assert "own name" not in found, "nobody else looks for it"
    assert "own name" in {finding.name for finding in machine.check_machine(ranks=4, several_hosts=True)}


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("not installed", PROBLEM), ("1.13.1", PROBLEM), ("2.5.1+cu121", PROBLEM), ("2.6.0", OK), ("3.0.0a0", OK)],
)
def test_torch_by_its_version(version: str, verdict: str) -> None:
    assert check_torch(version).verdict == verdict


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 512))
    assert check_descriptors(ranks=8).verdict == OK
    told = check_descriptors(ranks=100)
    assert told.verdict == PROBLEM and told.remedy == "ulimit -n 864 as root (the hard limit is 512)"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert check_descriptors(ranks=10**6).verdict == OK


def test_shared_memory_as_docker_gives_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage(64 * 2**20))
    told = check_shared_memory(tmp_path)
    assert told.verdict == WARNING and "67.1 MB" in told.said and "--shm-size" in told.remedy
    monkeypatch.undo()
    assert check_shared_memory(tmp_path / "none").verdict == WARNING


def test_ports_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(machine, "TORCHRUN_PORT", taken.getsockname()[1])
        told = check_ports()
    assert told.verdict == WARNING and "--master-port" in told.remedy

    def none(*_: Any, **__: Any) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(machine.socket, "create_server", none)
    assert check_ports().verdict == PROBLEM


def test_a_clock_that_is_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ClockWatch()
    assert watch.finding().verdict == OK
    really = time.time
    monkeypatch.setattr(time, "time", lambda: really() + 3600)
    told = watch.finding()
    assert told.verdict == WARNING and "+3600.0 s" in told.said


@pytest.mark.parametrize(("address", "verdict"), [("127.0.1.1", WARNING), ("::1", WARNING), ("10.0.0.7", OK)])
def test_a_name_that_leads_others_astray(address: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (address, 0))])
    assert machine.check_own_name().verdict == verdict


def test_a_name_without_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(machine.socket, "getaddrinfo", unknown)
    told = machine.check_own_name()
    assert told.verdict == WARNING and "/etc/hosts" in told.remedy


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("max 100000", 8), ("150000 100000", 1), ("400000 100000", 4), ("5000 100000", 1)]
)
def test_a_container_may_use_less_than_it_sees(cpu_max: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine.Path, "read_text", lambda self: cpu_max)
    assert machine.usable_cores() == cores


# ---- GPUs: there is none here, so torch is told that there are


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    return tmp_path


def test_gpus_that_a_cpu_build_cannot_use(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    gpus, (told,) = compute.find_gpus(driver)
    assert gpus == [] and told.verdict == PROBLEM
    assert "has 2, torch can use 0" in told.said and "build for CPUs" in told.cause


def test_gpus_that_the_driver_keeps_back(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _, (told,) = compute.find_gpus(driver)
    assert told.verdict == PROBLEM and "too old for CUDA 13.0" in told.cause and "nvidia-smi" in told.remedy


def test_gpus_that_are_hidden_on_purpose(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus, (told,) = compute.find_gpus(driver)
    assert gpus == ["cuda:0"] and told.verdict == WARNING and "hides some" in told.cause


def test_gpus_without_nccl(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    gpus, found = compute.find_gpus(driver)
    assert gpus == ["cuda:0", "cuda:1"]
    assert [(finding.name, finding.verdict) for finding in found] == [("gpus", OK), ("nccl", PROBLEM)]


def test_a_device_that_cannot_train_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.workloads import load

    digits = load("digits")
    said = {"cuda:0": "CUDA error: no kernel image is available", "cuda:1": "out of memory", "cuda:2": "broken"}

    def times(workload: object, device: torch.device) -> list[float]:
        error = torch.OutOfMemoryError if device.index == 1 else RuntimeError
        raise error(said[str(device)] + "\nand a long trace")

    monkeypatch.setattr(compute, "_times", times)
    devices, found = compute.measure_devices(digits, list(said), processes=1)
    assert devices == []
    assert [finding.verdict for finding in found] == [PROBLEM] * 3
    assert all(said[finding.name] in finding.said and "trace" not in finding.said for finding in found)
    assert "not built for" in found[0].cause and "fit" in found[1].cause


def test_a_torch_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._distributed_c10d, "ProcessGroupGloo")
    network, told = compute.measure_network([], nbytes=4000)
    assert network is None
    assert told == Finding("gloo here", PROBLEM, told.said, told.cause, told.remedy) and "ProcessGroupGloo" in told.said


def test_the_spread_is_that_of_a_log_normal() -> None:
    generator = torch.Generator().manual_seed(0)
    times = (torch.randn(20_000, generator=generator) * 0.3).exp().mul(0.02).tolist()
    mean, sigma = spread_of(times)
    assert sigma == pytest.approx(0.3, rel=0.03) and mean == pytest.approx(sum(times) / len(times), rel=0.02)
