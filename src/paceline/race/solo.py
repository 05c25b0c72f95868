"""A worker with nobody beside it: what its micro-batches take, in an ordinary training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.backends.replica import Replica
from paceline.workloads.workload import Workload

WARM_UP = 3  # micro-batches: the first ones allocate memory and choose kernels


class TrainingLoop:
    """Trains, and tells what each micro-batch takes: loading, computing and the step. The step is that of a rank: not
    every torch optimizer takes sparse gradients.

    Args:
        workload: what to train.
        model, optimizer: on the device to measure.
        around: a context around the computing of so many samples.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        optimizer: Optimizer,
        around: Callable[[int], AbstractContextManager[None]] = lambda samples: nullcontext(),
    ) -> None:
        self._workload, self._model, self._around = workload, model, around
        self._replica = Replica(model, optimizer)

    def seconds(self) -> Iterator[float]:
        """Of one micro-batch after the other, without end; those that warm up are left out."""
        samples, size = self._workload.train, self._workload.micro_batch
        warm_up = WARM_UP
        while True:
            began = time.perf_counter()
            for batch in DataLoader(samples, size, shuffle=True, drop_last=True, collate_fn=samples.collate):
                self._train(batch[0], batch[1])
                ended = time.perf_counter()
                if warm_up:
                    warm_up -= 1
                else:
                    yield ended - began
                began = time.perf_counter()

    def _train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        device = self._replica.parameters.device
        if device.type != "cpu":
            x, y = x.to(device), y.to(device)
        with self._around(len(y)):
            self._workload.loss(self._model, (x, y)).backward()
        self._replica.apply(self._replica.take_gradients(len(y), []))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was only enqueued has taken no time yet


@contextmanager
def one_thread() -> Iterator[None]:
    """As ranks compute that share the cores of a machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
