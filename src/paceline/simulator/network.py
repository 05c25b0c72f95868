"""What communication costs: latency, bandwidth, order, and queues.

    message      latency + bytes / bandwidth
    ring         2 (N−1) · (latency + bytes / (N · bandwidth))      all-reduce; every link is busy all the time
    tree         2 ⌈log₂ N⌉ · (latency + bytes / bandwidth)         all-reduce; few steps: better for small messages

A collective starts when the last rank has joined it, and after the collective before it: all ranks run them one after
the other. With `shared=True` there is only one link for all (a switch, a bus, one uplink): everything queues at it,
and a collective occupies it for all its 2 (N−1) · bytes.

With `uplinks` ranks are on hosts, and what they send to another host passes both hosts' links to the switch between
them (messages: see `flows`). An all-reduce then goes as on processes, see `backends.over_hosts`: within the hosts, then
between them each with each at once, one way and back, and within the hosts again. Each of the two takes the latency
there and back, because the receiver first says that it has room, and as long as a link needs for its host's parts; or
longer, because TCP begins slowly after a pause: at first it sends `first_window`, and twice as much each time when it
has heard from the other side. Measured with four hosts, 50 ms and 1.5 MB: 0.46 to 0.51 s; of 4 kB 0.21 s.

A `ring` over hosts, gloo's own, goes step by step: a rank sends what it has got when the next one has said that it has
room for it. So a step takes the latency there and back: six of them 0.66 s where it is 50 ms each way, whatever little
they carry (measured; one number alone 0.21 s). Control messages pass the first host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, log2

import numpy as np

from paceline.simulator.checks import WrongValueError, number, one_of


@dataclass(frozen=True)
class Uplink:
    """A host's link to the switch: seconds and bytes a second, the same in both directions."""

    latency: float = 0.0
    bandwidth: float = inf

    def __post_init__(self) -> None:
        number(self, "latency", least=0.0)
        number(self, "bandwidth", above=0.0)


@dataclass(frozen=True)
class Network:
    """A network whose links are all alike, or that joins hosts by links of their own.

    Args:
        latency: seconds that a message is on its way, whatever its size.
        bandwidth: bytes a second, of each link or of the shared one.
        all_reduce: `ring` or `tree`; `auto` is what processes do: over hosts that have links of their own as described
            above, else a ring.
        shared: whether all transfers queue at one link.
        uplinks: of each host; latency and bandwidth are then those within a host, and are part of every way.
        first_window: bytes that a connection between hosts sends after a pause before it hears from the other side.
        hosts: where each rank is; by default they are dealt out in turn, rank 4 of three hosts on the second.

    >>> round(Network(latency=0.001, bandwidth=1e6).all_reduce_seconds(workers=4, nbytes=400_000), 6)
    0.606
    >>> Network(latency=0.001, bandwidth=1e6, all_reduce="tree").all_reduce_seconds(workers=4, nbytes=400_000)
    1.604
    >>> slow = Network(uplinks=(Uplink(0.005, 125e6), Uplink(0.005, 125e6), Uplink(0.045, 12.5e6)))
    >>> slow.way(0, 1), round(slow.all_reduce_seconds(workers=3, nbytes=1_500_000), 3)
    ((0.01, 125000000.0), 0.36)
    """

    latency: float = 0.0
    bandwidth: float = inf
    all_reduce: str = "auto"
    shared: bool = False
    uplinks: tuple[Uplink, ...] = ()
    hosts: tuple[int, ...] = ()
    first_window: float = inf

    def __post_init__(self) -> None:
        number(self, "latency", least=0.0)
        number(self, "bandwidth", above=0.0)
        number(self, "first_window", above=0.0)
        one_of(self, "all_reduce", ("auto", "ring", "tree"))
        one_of(self, "shared", (True, False))
        if self.uplinks and self.shared:
            raise WrongValueError("shared", "shared = true is not possible for hosts with links of their own.")
        if self.hosts and not (self.uplinks and all(0 <= host < len(self.uplinks) for host in self.hosts)):
            raise WrongValueError("hosts", f"hosts = {list(self.hosts)} for {len(self.uplinks)} uplinks.")

    def host_of(self, rank: int) -> int:
        """Where there are hosts."""
        return self.hosts[rank] if rank < len(self.hosts) else rank % len(self.uplinks)

    def between_hosts(self, sender: int, receiver: int) -> bool:
        return bool(self.uplinks) and self.host_of(sender) != self.host_of(receiver)

    def way(self, sender: int, receiver: int) -> tuple[float, float]:
        """Latency and bandwidth from one rank to another, when nothing else is on its way."""
        if not self.between_hosts(sender, receiver):
            return self.latency, self.bandwidth
        ends = [self.uplinks[self.host_of(rank)] for rank in (sender, receiver)]
        latency = self.latency + sum(end.latency for end in ends)
        return latency, min(self.bandwidth, *(end.bandwidth for end in ends))

    def signal_seconds(self, sender: int, receiver: int) -> float:
        """Until a rank hears a signal of another, by the control plane on the first host."""
        if not self.uplinks:
            return self.latency
        away = [host for host in (self.host_of(sender), self.host_of(receiver)) if host]
        return self.latency + sum(self.uplinks[0].latency + self.uplinks[host].latency for host in away)

    def all_reduce_seconds(self, workers: int, nbytes: int) -> float:
        """From the last rank's joining to the end, when nothing else is on its way."""
        if workers == 1:
            return 0.0
        if self.uplinks:
            return self._over_hosts(workers, nbytes, 2)
        if self.shared:
            return self._reduce_steps(workers) * self.latency + 2 * (workers - 1) * nbytes / self.bandwidth
        part = nbytes if self.all_reduce == "tree" else nbytes / workers
        return self._reduce_steps(workers) * (self.latency + part / self.bandwidth)

    def all_gather_seconds(self, workers: int, nbytes: int) -> float:
        """To collect so many bytes from each rank on all: each must receive those of all others."""
        if workers == 1:
            return 0.0
        if self.uplinks:
            return self._over_hosts(workers, nbytes * workers, 1)
        copies = workers * (workers - 1) if self.shared else workers - 1
        return self._reduce_steps(workers) / 2 * self.latency + copies * nbytes / self.bandwidth

    def _over_hosts(self, workers: int, nbytes: int, rounds: int) -> float:
        """Twice round for an all-reduce, once to collect; for processes both are a sum."""
        if self.all_reduce == "auto":
            return _by_hosts_seconds(self, workers, nbytes)
        if self.all_reduce == "ring":
            return _ring_seconds(self, workers, nbytes / workers, rounds * (workers - 1))
        ways = [self.way(rank, (rank + 1) % workers) for rank in range(workers)]
        slowest = max(latency for latency, _ in ways) + nbytes / min(bandwidth for _, bandwidth in ways)
        return rounds * ceil(log2(workers)) * slowest

    def _reduce_steps(self, workers: int) -> int:
        return 2 * ceil(log2(workers)) if self.all_reduce == "tree" else 2 * (workers - 1)


@lru_cache(maxsize=256)
def _ring_seconds(network: Network, workers: int, part: float, steps: int) -> float:
    """Every rank sends a part to the next, so many times: each when it has got the one before, and has heard that the
    next one has, too."""
    pairs = [(rank, (rank + 1) % workers) for rank in range(workers)]
    hosts = [network.host_of(rank) for rank in range(workers)]
    leaving = Counter(hosts[one] for one, other in pairs if hosts[one] != hosts[other])  # that share the host's link
    latency, sending = np.empty(workers), np.empty(workers)
    for one, other in pairs:
        latency[one], bandwidth = network.way(one, other)
        sharing = max(1, leaving[hosts[one]]) if hosts[one] != hosts[other] else 1
        sending[one] = part * sharing / bandwidth
    ready = np.zeros(workers)
    for _ in range(steps):
        ready = np.roll(np.maximum(ready, np.roll(ready, -1) + latency) + sending + latency, 1)
    return float(ready.max())


@lru_cache(maxsize=256)
def _by_hosts_seconds(network: Network, workers: int, nbytes: int) -> float:
    """Within the hosts, between them, and within them again."""
    ranks = Counter(network.host_of(rank) for rank in range(workers))
    within = ceil(log2(max(ranks.values()))) * (network.latency + nbytes / network.bandwidth)
    if len(ranks) == 1:
        return 2 * within
    links = [network.uplinks[host] for host in ranks]
    latency = network.latency + sum(sorted(link.latency for link in links)[-2:])
    slowest = min(network.bandwidth, *(link.bandwidth for link in links))
    sending = _slow_start_seconds(nbytes / len(links), latency, slowest / (len(links) - 1), network.first_window)
    return 2 * (within + 2 * latency + sending)


def _slow_start_seconds(nbytes: float, latency: float, bandwidth: float, window: float) -> float:
    """To send so much on a connection that has paused; what is on its way at last is not counted.

    >>> _slow_start_seconds(700, latency=1.0, bandwidth=100.0, window=100)  # 100, and 2 s later all the rest
    8.0
    >>> _slow_start_seconds(700, latency=1.0, bandwidth=100.0, window=300)  # 300 take longer than the news
    7.0
    """
    sent, begun = 0.0, 0.0
    while sent + window < nbytes and window / bandwidth < 2 * latency:
        sent, begun, window = sent + window, begun + 2 * latency, 2 * window
    return max(nbytes / bandwidth, begun + (nbytes - sent) / bandwidth)


SHARED, COLLECTIVES = (-1, -1), (-2, -2)  # no pair of ranks


class Traffic:
    """The network in use: which link is busy until when."""

    def __init__(self, network: Network, workers: int) -> None:
        self.network, self.workers = network, workers
        self._free_at: dict[tuple[int, int], float] = {}

    def arrival(self, sender: int, receiver: int, nbytes: int, now: float) -> float:
        """When a message that leaves now arrives, within a host where there are several (see `flows` for the others). A
        link carries one after the other, in order of asking."""
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
