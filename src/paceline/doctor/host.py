"""What is known of one machine: its devices with their measured speed, what joins them, and what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import exp, log
from typing import Any

from paceline.simulator.network import Network

OK, WARNING, PROBLEM = "ok", "warning", "problem"


WITHIN = ("latency", "bandwidth", "all_reduce", "shared")  # what describes the network of one machine


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: of the thing.
        verdict: `ok`, `warning` (it works, but not as well as it could) or `problem` (something will not work).
        said: what was found.
        cause: the probable one.
        remedy: what to do.
    """

    name: str
    verdict: str
    said: str
    cause: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Device:
    """A device and its speed alone.

    Args:
        device: as torch calls it.
        name: as its maker calls it.
        workers: how many ranks compute on it: the processes on a CPU, one on a GPU.
        micro_batch_seconds: mean time of a micro-batch.
        jitter: spread of the logarithm of that time.
    """

    device: str
    name: str
    workers: int
    micro_batch_seconds: float
    jitter: float


@dataclass(frozen=True)
class Host:
    """A machine.

    Args:
        name: its own.
        versions: of what matters.
        devices: that ranks compute on; empty when none could be measured.
        network: between ranks of this machine; None when it could not be measured.
        findings: in the order in which they were made.
    """

    name: str
    versions: dict[str, str]
    devices: tuple[Device, ...] = ()
    network: Network | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def workers(self) -> int:
        return sum(device.workers for device in self.devices)

    def as_dict(self) -> dict[str, Any]:
        """As JSON can carry it."""
        values = asdict(self)
        if self.network is not None:  # within one machine there are no hosts
            values["network"] = {key: values["network"][key] for key in WITHIN}
        return values | {key: list(values[key]) for key in ("devices", "findings")}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Host:
        """The other way round; what came over the wire was checked by its schema."""
        network = values["network"]
        return cls(
            name=values["name"],
            versions=values["versions"],
            devices=tuple(Device(**device) for device in values["devices"]),
            network=None if network is None else Network(**network),
            findings=tuple(Finding(**finding) for finding in values["findings"]),
        )


@dataclass(frozen=True)
class Task:
    """What is trained: all that timing depends on.

    Args:
        workload, model: by name.
        micro_batch: samples in a micro-batch.
        parameters: how many the model has.
        divisible: whether a micro-batch may be cut.
    """

    workload: str
    model: str
    micro_batch: int
    parameters: int
    divisible: bool


@dataclass(frozen=True)
class Peer:
    """Another machine, and the way to it. Without a host it was not reached, and the findings say why."""

    address: str
    host: Host | None = None
    link: Network | None = None
    findings: tuple[Finding, ...] = field(default=())


def spread_of(seconds: list[float]) -> tuple[float, float]:
    """Mean and spread of micro-batch times as a log-normal variable, by median and quartiles: one long pause of the
    machine moves neither.

    >>> spread_of([1.0, 1.0, 1.0, 50.0])
    (1.0, 0.0)
    """
    ordered = sorted(seconds)
    low, middle, high = (ordered[int(part * (len(ordered) - 1))] for part in (0.25, 0.5, 0.75))
    sigma = (log(high) - log(low)) / 1.349  # what lies between the quartiles of a normal variable, in its spreads
    return middle * exp(sigma**2 / 2), sigma


def fitted(workers: int, small: tuple[int, float], large: tuple[int, float]) -> Network:
    """The network whose ring all-reduces take what two were measured to take: 2 (N−1) · (latency + bytes / (N ·
    bandwidth)). When the larger one took no longer, there is nothing to tell the bandwidth by, and it is infinite.

    Args:
        workers: that took part.
        small, large: bytes and seconds.

    >>> made = Network(latency=0.001, bandwidth=1e6)
    >>> measured = [(size, made.all_reduce_seconds(4, size)) for size in (4000, 400_000)]
    >>> found = fitted(4, *measured)
    >>> round(found.latency, 9), round(found.bandwidth)
    (0.001, 1000000)
    """
    steps = 2 * (workers - 1)
    more = (large[1] - small[1]) / steps * workers
    bandwidth = (large[0] - small[0]) / more if more > 0 else float("inf")
    return Network(latency=max(0.0, small[1] / steps - small[0] / workers / bandwidth), bandwidth=bandwidth)
