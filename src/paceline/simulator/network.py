"""What communication costs: latency, bandwidth, order, and queues.

    message      latency + bytes / bandwidth
    ring         2 (N−1) · (latency + bytes / (N · bandwidth))      all-reduce; every link is busy all the time
    tree         2 ⌈log₂ N⌉ · (latency + bytes / bandwidth)         all-reduce; few steps: better for small messages

A collective starts when the last rank has joined it, and after the collective before it: all ranks run them one after
the other. With `shared=True` there is only one link for all (a switch, a bus, one uplink): everything queues at it,
and a collective occupies it for all its 2 (N−1) · bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, log2

from paceline.simulator.checks import number, one_of


@dataclass(frozen=True)
class Network:
    """A network whose links are all alike.

    Args:
        latency: seconds that a message is on its way, whatever its size.
        bandwidth: bytes a second, of each link or of the shared one.
        all_reduce: `ring` or `tree`.
        shared: whether all transfers queue at one link.

    >>> round(Network(latency=0.001, bandwidth=1e6).all_reduce_seconds(workers=4, nbytes=400_000), 6)
    0.606
    >>> Network(latency=0.001, bandwidth=1e6, all_reduce="tree").all_reduce_seconds(workers=4, nbytes=400_000)
    1.604
    """

    latency: float = 0.0
    bandwidth: float = inf
    all_reduce: str = "ring"
    shared: bool = False

    def __post_init__(self) -> None:
        number(self, "latency", least=0.0)
        number(self, "bandwidth", above=0.0)
        one_of(self, "all_reduce", ("ring", "tree"))
        one_of(self, "shared", (True, False))

    def all_reduce_seconds(self, workers: int, nbytes: int) -> float:
        """From the last rank's joining to the end, when nothing else is on its way."""
        if workers == 1:
            return 0.0
        if self.shared:
            return self._reduce_steps(workers) * self.latency + 2 * (workers - 1) * nbytes / self.bandwidth
        part = nbytes / workers if self.all_reduce == "ring" else nbytes
        return self._reduce_steps(workers) * (self.latency + part / self.bandwidth)

    def all_gather_seconds(self, workers: int, nbytes: int) -> float:
        """To collect so many bytes from each rank on all: each must receive those of all others."""
        if workers == 1:
            return 0.0
        copies = workers * (workers - 1) if self.shared else workers - 1
        return self._reduce_steps(workers) / 2 * self.latency + copies * nbytes / self.bandwidth

    def _reduce_steps(self, workers: int) -> int:
        return 2 * (workers - 1) if self.all_reduce == "ring" else 2 * ceil(log2(workers))


SHARED, COLLECTIVES = (-1, -1), (-2, -2)  # no pair of ranks


class Traffic:
    """The network in use: which link is busy until when."""

    def __init__(self, network: Network, workers: int) -> None:
        self.network, self.workers = network, workers
        self._free_at: dict[tuple[int, int], float] = {}

    def arrival(self, sender: int, receiver: int, nbytes: int, now: float) -> float:
        """When a message that leaves now arrives. A link carries one after the other, in order of asking."""
        # One queue for all stands in for the links when they are shared.
        link = SHARED if self.network.shared else (sender, receiver)
        end = max(now, self._free_at.get(link, 0.0)) + nbytes / self.network.bandwidth
        self._free_at[link] = end
        return end + self.network.latency

    def collective_end(self, kind: str, nbytes: int, now: float) -> float:
        """When the collective that all ranks have joined by now ends."""
        cost = self.network.all_gather_seconds if kind == "all-gather" else self.network.all_reduce_seconds
        link = SHARED if self.network.shared else COLLECTIVES
        end = max(now, self._free_at.get(link, 0.0)) + cost(self.workers, nbytes)
        self._free_at[link] = end
        return end
