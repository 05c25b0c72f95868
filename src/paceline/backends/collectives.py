"""Collectives on torch.distributed: started at once, polled, and never waited for without looking around.

A blocked gloo collective is woken by nothing but its own time-out, so a rank waits in slices and asks in between
whether somebody was lost; then it gives up with that name instead of hanging.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

from paceline.backends.driver import NAMING_SECONDS, WaitableWork
from paceline.backends.flat import FlatSum
from paceline.backends.merge_work import MergeWork
from paceline.backends.movement import Movement
from paceline.backends.rounded_work import RoundedWork
from paceline.backends.thread_work import ThreadWork
from paceline.errors import PacelineError

T = TypeVar("T")
SLICE = timedelta(seconds=0.25)
# The heartbeat finds a dead or hanging peer; torch's own time-out is the last resort behind it.
LAST_RESORT = timedelta(minutes=30)


class Collectives:
    """A process group over the ranks that are here.

    Args:
        store_of: where ranks of a generation of the membership find each other.
        rank: this one.
        ranks: all that are here, in order.
        generation: of the membership.
        device: `cuda` uses NCCL, everything else gloo.
        host: this machine's address for the other ranks; nothing need listen on others. gloo's own default would be
            the address of the machine's name, and the loopback where that has none.
        check_peers: raises when a peer is known to be lost, or becomes so within the seconds given.
    """

    def __init__(
        self,
        store_of: Callable[[int], c10d.Store],
        rank: int,
        ranks: Sequence[int],
        generation: int,
        device: torch.device,
        host: str,
        check_peers: Callable[[float], None],
    ) -> None:
        self.rank, self.device = rank, device
        self._store_of, self._host, self._check_peers = store_of, host, check_peers
        self._adding = c10d.AllreduceOptions()
        self._adding.reduceOp = c10d.ReduceOp(c10d.ReduceOp.SUM)
        self._group: Any = None
        self._aside: Any = None  # a group of its own, for what goes on a thread
        self._last_aside: ThreadWork[Any] | None = None
        self.renew(ranks, generation)

    def renew(self, ranks: Sequence[int], generation: int) -> None:
        """Form the group anew, among these ranks. The old one dies with whatever is in flight in it."""
        if self._group is not None:
            self.abandon()
        self.ranks, self.generation = list(ranks), generation
        self._group = self._made(self._store_of(generation))

    def _made(self, store: c10d.Store) -> Any:
        place = self.ranks.index(self.rank)
        made: Any = c10d  # its stubs lack the constructors
        if self.device.type == "cuda":
            options = made.ProcessGroupNCCL.Options()
            options._timeout = LAST_RESORT
            return made.ProcessGroupNCCL(store, place, len(self.ranks), options)
        gloo = made.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = LAST_RESORT
        options._devices = [gloo.create_device(hostname=self._host)]
        return gloo(store, place, len(self.ranks), options)

    def add_up(self, tensor: Tensor, then: Callable[[Tensor], T], name: str) -> CollectiveWork[T]:
        """Start to add the tensor over all ranks, in place; `then` makes the result of it."""
        work = self._group.allreduce([tensor], self._adding)
        return CollectiveWork(work, tensor, then, name, self._check_peers)

    def merge(self, movement: Movement, then: Callable[[], T], name: str) -> MergeWork[T]:
        """Start to merge all ranks' models, in place, while this rank goes on."""
        work = MergeWork(self._group_aside, movement, then, name, self._check_peers, self._last_aside)
        self._last_aside = work
        return work

    def add_up_rounded(self, contribution: FlatSum, then: Callable[[], T], name: str) -> RoundedWork[T]:
        """Start to add rounded gradients over all ranks, in place, while this rank goes on."""
        ranks, before = len(self.ranks), self._last_aside
        work = RoundedWork(self._group_aside, contribution, ranks, then, name, self._check_peers, before)
        self._last_aside = work
        return work

    def _group_aside(self) -> Any:
        if self._aside is None:
            self._aside = self._made(c10d.PrefixStore("aside", self._store_of(self.generation)))
        return self._aside

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Give one rank's tensor to all ranks, in place, now."""
        options = c10d.BroadcastOptions()
        options.rootRank = self.ranks.index(root)
        work = self._group.broadcast([tensor], options)
        CollectiveWork(work, tensor, lambda same: same, "the broadcast of the start", self._check_peers).wait()

    def broadcast_bytes(self, content: bytes | None, root: int = 0) -> bytes:
        """Give one rank's bytes to all ranks."""
        length = torch.tensor([len(content or b"")], device=self.device)
        self.broadcast(length, root)
        body = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if content:
            body.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.broadcast(body, root)
        return bytes(body.cpu().numpy())

    def abandon(self) -> None:
        """Give the group up with work in flight. Its destructor would wait for that until the last resort, and the
        process could not end while a peer hangs; so the group is never destroyed."""
        for group in (self._group, self._aside):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class CollectiveWork(WaitableWork[T]):
    """One collective in flight."""

    round_number: int | None = None  # of those that carry a round's gradients

    def __init__(
        self, work: Any, tensor: Tensor, then: Callable[[Tensor], T], name: str, check_peers: Callable[[float], None]
    ) -> None:
        self._work, self._tensor, self._then, self.name = work, tensor, then, name
        self._check_peers = check_peers
        self._result: T | None = None

    @property
    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, seconds: float | None = None) -> bool:
        if seconds is not None:
            return self._wait_once(timedelta(seconds=seconds))
        while not self._wait_once(SLICE):
            self._check_peers(0.0)
        return True

    def _wait_once(self, longest: timedelta) -> bool:
        try:
            return bool(self._work.wait(longest))
        except RuntimeError:
            if not self.done:
                return False
        try:
            return bool(self._work.wait())  # it ended just after the slice: does it still raise?
        except RuntimeError as error:
            self._check_peers(NAMING_SECONDS)
            raise PacelineError(
                f"{self.name} failed.",
                cause=f"Probably another rank ended or lost its network: {str(error).splitlines()[0]}",
                remedy="Look for the first error among the other ranks' logs.",
            ) from error

    def result(self) -> T:
        if self._result is None:
            self._wait_once(SLICE)  # on NCCL this orders the streams; on gloo it raises what went wrong
            self._result = self._then(self._tensor)
        return self._result
