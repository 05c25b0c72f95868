"""Sums over several hosts: inside each host first, then between the hosts, then inside each host again.

    1.  the ranks of a host add up on their first one            within the host
    2.  the first ranks of all hosts, each with each at once:
        everybody gets its part of all sums, adds them up,       one way
        and gives the total of its part to all                   and back
    3.  the first rank gives the total to the others             within the host

gloo's own ring takes 2 (N−1) steps for N ranks, each as long as the slowest link there and back. Here a host's link
carries one sum however many ranks the host has, and its latency counts four times however many hosts there are. All
ranks get the same bits: each number is added up in one place, in the order of the hosts.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

SLICE = timedelta(seconds=0.05)


class Layout(NamedTuple):
    """Who adds up with whom: the ranks of this host, and the first ranks of all hosts."""

    mates: list[int]
    firsts: list[int]


def layout(rank: int, hosts: Mapping[int, str]) -> Layout | None:
    """Of the ranks that are here, each with its host, for one of them; None if all are on one host.

    >>> layout(3, {0: "a", 1: "a", 2: "b", 3: "b", 5: "c"})
    Layout(mates=[2, 3], firsts=[0, 2, 5])
    >>> layout(0, {0: "a", 1: "a"}) is None
    True
    """
    of_host: dict[str, list[int]] = {}
    for each, host in hosts.items():
        of_host.setdefault(host, []).append(each)
    return Layout(of_host[hosts[rank]], [mates[0] for mates in of_host.values()]) if len(of_host) > 1 else None


class OverHosts:
    """A process group that adds up in this way, one sum after the other, on a thread of its own; all else it leaves to
    the group of all ranks.

    Args:
        group: of all ranks.
        rank: this one.
        layout: who adds up with whom.
        make: a process group of some of the ranks, by its name.
    """

    def __init__(self, group: Any, rank: int, layout: Layout, make: Callable[[str, Sequence[int]], Any]) -> None:
        self.group = group
        self.broadcast, self.send, self.recv = group.broadcast, group.send, group.recv
        self.allgather, self.alltoall_base = group.allgather, group.alltoall_base
        first = layout.mates[0]
        self._hosts, self._place = len(layout.firsts), layout.firsts.index(first)
        self._inside = make(f"host-{first}", layout.mates) if len(layout.mates) > 1 else None
        self._between: Any = make("hosts", layout.firsts) if rank == first else None
        self._given_up = False
        self._waiting: queue.SimpleQueue[Climb] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="paceline-over-hosts").start()

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Climb:
        climb = Climb(tensors[0].view(-1), options.reduceOp)
        self._waiting.put(climb)
        return climb

    def give_up(self) -> None:
        """Nobody wants anything of this group any more. After a loss nothing else wakes who waits."""
        self._given_up = True

    # ---- on the thread

    def _run(self) -> None:
        broken: Exception | None = None
        while not self._given_up:
            try:
                climb = self._waiting.get(timeout=1.0)
            except queue.Empty:
                continue
            try:
                if broken is not None:  # ranks no longer agree on which sum comes next
                    raise broken
                self._add_up(climb)
            except Exception as error:  # whoever polls gets it
                broken = climb.error = error
            climb.over.set()

    def _add_up(self, climb: Climb) -> None:
        if self._inside is not None:
            adding = c10d.ReduceOptions()
            adding.reduceOp, adding.rootRank = climb.way, 0
            self._finish(self._inside.reduce([climb.tensor], adding))
        if self._between is not None:
            self._exchange(climb)
        if self._inside is not None:
            giving = c10d.BroadcastOptions()
            giving.rootRank = 0
            self._finish(self._inside.broadcast([climb.tensor], giving))

    def _exchange(self, climb: Climb) -> None:
        """Between the first ranks. A part of the tensor belongs to each; the last ones may be a number shorter."""
        size, least = climb.tensor.numel(), climb.tensor.numel() // self._hosts
        parts = [least + (place < size % self._hosts) for place in range(self._hosts)]
        own = parts[self._place]
        found = climb.tensor.new_empty(self._hosts * own)
        self._swap(found, climb.tensor, [own] * self._hosts, parts)
        total, *others = found.split(own) if own else [found] * self._hosts
        for other in others:
            total = torch.maximum(total, other) if climb.way == c10d.ReduceOp.MAX else total.add_(other)
        self._swap(climb.tensor, total.repeat(self._hosts), parts, [own] * self._hosts)

    def _swap(self, into: Tensor, out_of: Tensor, coming: list[int], going: list[int]) -> None:
        self._finish(self._between.alltoall_base(into, out_of, coming, going, c10d.AllToAllOptions()))

    def _finish(self, work: Any) -> None:
        while not work.is_completed():
            try:
                work.wait(SLICE)
            except RuntimeError:
                if self._given_up:
                    raise
        work.wait()


class Climb:
    """One sum on its way; looks like a work of torch's."""

    def __init__(self, tensor: Tensor, way: Any) -> None:
        self.tensor, self.way = tensor, way
        self.over = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Timed out")
        if self.error is not None:
            raise self.error
