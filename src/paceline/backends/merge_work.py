"""A merge of large models in flight on real processes.

While one chunk travels, the next is packed and the one before is put in its place; and meanwhile the rank computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

from paceline.backends.movement import Movement
from paceline.backends.thread_work import ThreadWork

T = TypeVar("T")
IN_FLIGHT = 2  # chunks: one travels while another is packed or placed


class MergeWork(ThreadWork[T]):
    """One merge, from its start.

    Args:
        movement: this rank's part; its common model is merged when the work is done.
        others: see `ThreadWork`.
    """

    def __init__(
        self,
        group: Callable[[], Any],
        movement: Movement,
        then: Callable[[], T],
        name: str,
        check_peers: Callable[[float], None],
        before: ThreadWork[Any] | None,
    ) -> None:
        self.nbytes = 0
        """That have travelled, when it is done."""
        self._movement = movement
        super().__init__(group, then, name, check_peers, before)

    def _travel(self, group: Any) -> None:
        movement, head, moved = self._movement, self._movement.head(), self._movement.moved
        both = self._start(group, head, c10d.ReduceOp.SUM), self._start(group, moved, c10d.ReduceOp.MAX)
        for work in both:
            work.wait()
        movement.place_head(head)
        self.nbytes = movement.nbytes_of(moved)
        travelling: deque[tuple[Tensor, Tensor, Any]] = deque()
        for blocks in movement.chunks(moved):
            sums = movement.pack(blocks)
            travelling.append((blocks, sums, self._start(group, sums, c10d.ReduceOp.SUM)))
            if len(travelling) == IN_FLIGHT:
                self._land(*travelling.popleft())
        for chunk in travelling:
            self._land(*chunk)

    def _land(self, blocks: Tensor, sums: Tensor, work: Any) -> None:
        work.wait()
        self._movement.place(blocks, sums)
