"""Communication of several steps in flight on real processes, on a thread and a process group of its own.

The group is another one than that of the rounds, because two threads cannot keep the order of collectives on one.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch._C import _distributed_c10d as c10d  # torch.distributed has no types for what it exports from here

from paceline.backends.driver import LOOK_AROUND_SECONDS, NAMING_SECONDS, WaitableWork
from paceline.errors import PacelineError

T = TypeVar("T")


class ThreadWork(WaitableWork[T]):
    """One piece of work, from its start.

    Args:
        group: makes the process group, or gives the one that was made before; called on the thread.
        then: makes the result.
        name: of the work, for errors.
        check_peers: raises when a peer is known to be lost, or becomes so within the seconds given.
        before: the work before, which goes first.
    """

    def __init__(
        self,
        group: Callable[[], Any],
        then: Callable[[], T],
        name: str,
        check_peers: Callable[[float], None],
        before: ThreadWork[Any] | None,
    ) -> None:
        self.name = name
        self.round_number: int | None = None
        self._group, self._then, self._check_peers = group, then, check_peers
        self._arrived = threading.Event()
        self._error: BaseException | None = None
        self._result: T | None = None
        self._before = before
        threading.Thread(target=self._run, daemon=True, name=name).start()

    @property
    def done(self) -> bool:
        return self._arrived.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        if seconds is not None:
            return self._arrived.wait(seconds)
        while not self._arrived.wait(LOOK_AROUND_SECONDS):
            self._check_peers(0.0)
        return True

    def result(self) -> T:
        if self._error is not None:
            self._check_peers(NAMING_SECONDS)
            why = str(self._error) or type(self._error).__name__
            raise PacelineError(
                f"{self.name} failed.",
                cause=f"Probably another rank ended or lost its network: {why.splitlines()[0]}",
                remedy="Look for the first error among the other ranks' logs.",
            ) from self._error
        if self._result is None:
            self._result = self._then()
        return self._result

    # ---- on the thread

    def _run(self) -> None:
        try:
            if self._before is not None:
                self._before._arrived.wait()
                self._before = None
            self._travel(self._group())
        except BaseException as error:  # whoever asks for the result gets it
            self._error = error
        self._arrived.set()

    @abstractmethod
    def _travel(self, group: Any) -> None:
        """Do it, on the thread."""

    @staticmethod
    def _start(group: Any, tensor: Tensor, operation: Any) -> Any:
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp(operation)
        return group.allreduce([tensor], options)
