"""What a rank on a CUDA device must look after beside its gradients: how far it runs ahead, and its memory."""

from __future__ import annotations

from math import inf

import torch

from paceline.backends.replica import Replica
from paceline.rules.memory import MemoryMeter


class Device:
    """The device that a replica lives on. On the CPU there is nothing to look after.

    Args:
        replica: on its device.
        micro_batch: the user's.
    """

    def __init__(self, replica: Replica, micro_batch: int) -> None:
        self._parameters = replica.parameters
        self._last_backward: torch.cuda.Event | None = None
        self._memory: MemoryMeter | None = None
        if self._parameters.is_cuda and replica.divisible:
            self._memory = MemoryMeter(micro_batch, torch.cuda.mem_get_info(self._parameters.device)[1])

    @property
    def fits(self) -> int | float:
        """Samples of a micro-batch that fit into the memory."""
        return inf if self._memory is None else self._memory.fits

    def bound_run_ahead(self) -> None:
        """On CUDA a backward pass is only enqueued when it returns; without a bound a strategy that computes while
        the network is busy would enqueue dozens. Wait for the one before: at most one runs ahead."""
        if self._parameters.is_cuda:
            if self._last_backward is not None:
                self._last_backward.synchronize()
            self._last_backward = torch.cuda.Event()
            self._last_backward.record()

    def measure(self, count: int) -> None:
        """A micro-batch of so many samples was computed."""
        if self._memory is not None:
            device = self._parameters.device
            peak, now = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
            self._memory.see(count, now, peak)  # the gradients, which stay for the moment, count as there before
            torch.cuda.reset_peak_memory_stats(device)
