"""What needs torch: which devices it can use, how fast each of them is alone, and what an all-reduce takes here."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

from paceline.backends.collectives import Collectives
from paceline.backends.lane import Care
from paceline.backends.peers import NobodyIsLost
from paceline.doctor.host import OK, PROBLEM, WARNING, Device, Finding, Task, fitted, spread_of
from paceline.doctor.machine import cpu_name
from paceline.errors import PacelineError
from paceline.race.solo import TrainingLoop, one_thread
from paceline.report.words import milliseconds, size
from paceline.simulator.network import Network
from paceline.workloads import model_name
from paceline.workloads.workload import Workload

MEASURED_SECONDS = 1.5  # of each device: some scheduling slices, and a whole look stays far below a minute
FEWEST, MOST = 8, 2000  # micro-batches, of a slow device and of a fast one
MEETING_SECONDS = 20.0
REPEATS = 20
SMALL_BYTES, LEAST_BYTES, MOST_BYTES = 4_000, 4_000_000, 64_000_000

Reduce = Callable[[list[torch.Tensor]], None]
"""One all-reduce of a tensor for each rank, waited for."""


def find_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[list[str], list[Finding]]:
    """The GPUs that torch can use, as torch calls them, and what is to be said of others."""
    present = len(list(driver.glob("*"))) if driver.is_dir() else 0
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [f"cuda:{number}" for number in range(usable)]
    if usable < present:
        return gpus, [_unused(present, usable)]
    if not usable:
        return gpus, [Finding("gpus", OK, "none: ranks compute on the CPU")]
    return gpus, [Finding("gpus", OK, f"{usable} usable"), _nccl()]


def _unused(present: int, usable: int) -> Finding:
    said = f"the driver has {present}, torch can use {usable}"
    if torch.version.cuda is None and torch.version.hip is None:
        cause, remedy = "This torch is a build for CPUs.", "Install the build for your CUDA, as pytorch.org says."
    elif os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        hidden = os.environ["CUDA_VISIBLE_DEVICES"]
        return Finding("gpus", WARNING, said, f"CUDA_VISIBLE_DEVICES={hidden!r} hides some.", "Unset it to use all.")
    else:
        cause = f"The driver is too old for CUDA {torch.version.cuda}, or the container may not use it."
        remedy = "Look at `nvidia-smi`; update the driver, or start the container with its GPUs."
    return Finding("gpus", PROBLEM, said, cause, remedy)


def _nccl() -> Finding:
    if torch.distributed.is_nccl_available():
        return Finding("nccl", OK, ".".join(map(str, torch.cuda.nccl.version())))
    return Finding("nccl", PROBLEM, "not in this torch", "Ranks on GPUs need it.", "Install a torch that has it.")


def task_of(workload: Workload, model: str | None) -> Task:
    made = workload.build_model(seed=0)
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    return Task(
        workload=workload.name,
        model=model_name(workload.name, model),
        micro_batch=workload.micro_batch,
        parameters=sum(each.numel() for each in made.parameters()),
        divisible=not any(isinstance(module, batch_norm) for module in made.modules()),
    )


def measure_devices(workload: Workload, gpus: list[str], processes: int) -> tuple[list[Device], list[Finding]]:
    """The speed of each device alone: of the GPUs if there are any, else of the CPU on one thread."""
    devices, findings = [], []
    for device in gpus or ["cpu"]:
        try:
            mean, jitter = spread_of(_times(workload, torch.device(device)))
        except (RuntimeError, AssertionError) as error:
            findings.append(_failed(device, error))
            continue
        name = cpu_name() if device == "cpu" else torch.cuda.get_device_name(device)
        devices.append(Device(device, name, 1 if gpus else processes, mean, jitter))
    return devices, findings


def _times(workload: Workload, device: torch.device) -> list[float]:
    model = workload.build_model(seed=0).to(device)
    loop = TrainingLoop(workload, model, workload.build_optimizer(model))
    times: list[float] = []
    with one_thread():
        until = time.perf_counter() + MEASURED_SECONDS
        for seconds in loop.seconds():
            times.append(seconds)
            if len(times) >= MOST or (len(times) >= FEWEST and time.perf_counter() > until):
                break
    return times


def _failed(device: str, error: Exception) -> Finding:
    said = f"cannot train: {str(error).splitlines()[0]}"
    if isinstance(error, torch.OutOfMemoryError):
        return Finding(device, PROBLEM, said, "The model and a micro-batch do not fit.", "Free its memory: nvidia-smi.")
    if "no kernel image" in str(error):
        return Finding(
            device, PROBLEM, said, "This torch was not built for a GPU of that age.", "Install another build of torch."
        )
    return Finding(device, PROBLEM, said, "Its driver and torch do not fit together.", "Look at `nvidia-smi`.")


def measure_network(gpus: list[str], nbytes: int) -> tuple[Network | None, Finding]:
    """What joins the ranks of this machine, by all-reduces of gradients of that many bytes; NCCL among GPUs."""
    kind = "nccl" if len(gpus) > 1 else "gloo"
    try:
        network, seconds, nbytes = _measure_nccl(gpus, nbytes) if len(gpus) > 1 else _measure_gloo(nbytes)
    except (RuntimeError, AttributeError, PacelineError) as error:
        return None, Finding(
            f"{kind} here",
            PROBLEM,
            f"an all-reduce failed: {str(error).splitlines()[0]}",
            cause="This torch lacks it, or the loopback is closed to it.",
            remedy="Install an official build of torch; look at `ip addr show lo` and the firewall.",
        )
    among = f"among {len(gpus)} GPUs" if len(gpus) > 1 else "of two ranks"
    return network, Finding(f"{kind} here", OK, f"an all-reduce {among} of {size(nbytes)}: {milliseconds(seconds)}")


def _measure_gloo(nbytes: int) -> tuple[Network, float, int]:
    """Two ranks of gloo over the loopback, both in this process: its threads work without Python's."""
    store = c10d.HashStore()
    deadline = time.monotonic() + MEETING_SECONDS
    made: list[Collectives] = []
    failed: list[BaseException] = []

    def check(_: float) -> None:
        if time.monotonic() > deadline or failed:
            raise PacelineError(f"Two ranks did not meet within {MEETING_SECONDS:.0f} s.")

    def join(rank: int) -> None:
        try:
            made.append(Collectives(NobodyIsLost(store, check), rank, 2, torch.device("cpu"), "127.0.0.1"))
        except BaseException as error:  # told by whoever waits for it
            failed.append(error)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failed:
        raise failed[0]
    check(0.0)
    if len(made) < len(threads):
        raise PacelineError(f"Two ranks did not meet within {MEETING_SECONDS:.0f} s.")

    def reduce(tensors: list[torch.Tensor]) -> None:
        works = [group.add_up(each, lambda: None, "A trial", Care()) for group, each in zip(made, tensors, strict=True)]
        for work in works:
            work.finish()

    return _fit(["cpu", "cpu"], reduce, nbytes)


def _measure_nccl(gpus: list[str], nbytes: int) -> tuple[Network, float, int]:
    """All GPUs of this machine from this one process."""
    nccl: Any = torch.cuda.nccl

    def reduce(tensors: list[torch.Tensor]) -> None:
        nccl.all_reduce(tensors)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    return _fit(gpus, reduce, nbytes)


def _fit(devices: list[str], reduce: Reduce, nbytes: int) -> tuple[Network, float, int]:
    large = min(max(nbytes, LEAST_BYTES), MOST_BYTES)
    seconds = {}
    for amount in (SMALL_BYTES, large):
        tensors = [torch.zeros(amount // 4, device=device) for device in devices]
        seconds[amount] = _median_seconds(partial(reduce, tensors))
    network = fitted(len(devices), (SMALL_BYTES, seconds[SMALL_BYTES]), (large, seconds[large]))
    return network, seconds[large], large


def _median_seconds(act: Callable[[], None]) -> float:
    act()  # the first one opens connections
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return median(times)
