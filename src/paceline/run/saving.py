"""A run's checkpoints: what all ranks do together for one, and what the first of them hands to its writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.backends.collectives import Collectives
from paceline.backends.processes import ProcessNode
from paceline.errors import PacelineError
from paceline.node import Share
from paceline.run import checkpoint
from paceline.run.checkpoint import Checkpoint
from paceline.run.optimizer import LearningRates
from paceline.run.rank import Rank
from paceline.run.state import OptimizerParts, gather
from paceline.run.writer import Writer


class Saver:
    """One rank's part in it.

    Args:
        rank: this one.
        rates: the learning rates' schedule.
        share_of: what a rank brings to the model of the run.
        run: the strategy's name, and the data; see `state.gather`.
        folder: of the checkpoints.
    """

    def __init__(
        self,
        rank: Rank,
        rates: LearningRates,
        share_of: Callable[[int], Share],
        run: tuple[str, dict[str, int]],
        folder: Path,
    ) -> None:
        self._node, self._collectives, self._rates = rank.node, rank.collectives, rates
        self._share_of, (self._strategy, self._data) = share_of, run
        self._settled = rank.settled
        self._writer = Writer(folder)
        self._told: PacelineError | None = None
        self._prepared_at = -1
        self._optimizer: OptimizerParts | None = None

    def prepare(self) -> None:
        """All ranks together, once a round: average what is no parameter, and collect what only some ranks have."""
        if self._prepared_at != self._node.rounds:
            self._prepared_at = self._node.rounds
            if not average_buffers(self._node):
                self._node.meet()  # else this rank could be the only one that has the round, and tell of it
            if self._node.servers:
                self._optimizer = served_optimizer(self._node, self._collectives, self._share_of)

    def write(self) -> None:
        """The first rank takes a snapshot of a round that was prepared and begins to write it. Whoever saves faster
        than the disk writes waits for it here."""
        if self._node.leads:
            self._writer.wait()
            self.look()
            settled = self._settled()  # while this rank has not joined the next round, nobody settles more
            whole = gather(self._node, self._rates, settled, self._strategy, self._data, self._optimizer)
            self._writer.start(self._node.rounds, whole)

    def write_alone(self) -> None:
        """Nobody else is here: this rank's state, between two rounds, is that of the run."""
        whole = gather(self._node, self._rates, self._settled(), self._strategy, self._data)
        self._writer.wait()
        self._writer.start(self._node.rounds, whole)
        self.wait()

    def look(self) -> None:
        """Tell of a checkpoint that could not be written. Training goes on."""
        failure = self._writer.failure
        if failure is not None and failure is not self._told:
            self._told = failure
            self._node.warn(f"{failure} Training goes on.")

    def finish(self) -> None:
        """All ranks together, when the training is over: nothing is on its way any more, or the error is raised."""
        self.prepare()  # all have met: who leaves now has nothing any more that others may need
        self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is on the disk; raises if it is not."""
        self._writer.wait()
        if self._writer.failure is not None:
            raise self._writer.failure

    def close(self) -> None:
        """The run has failed: what is on its way is still written, and its failure is the lesser one."""
        self._writer.wait()
        self.look()


def average_buffers(node: ProcessNode) -> bool:
    """BatchNorm's running statistics, averaged over the ranks by the samples that each has seen; whether there are
    any."""
    buffers = [b for b in node.replica.model.buffers() if b.is_floating_point()]
    if not buffers or node.seats == 1:
        return False
    seen = torch.tensor([float(node.samples_computed)], dtype=torch.float64, device=buffers[0].device)
    weighted = [buffer.detach().double().flatten() * seen for buffer in buffers]
    *sums, whole = node.sum_now(torch.cat([*weighted, seen])).split([*(b.numel() for b in buffers), 1])
    for buffer, part in zip(buffers, sums, strict=True):
        buffer.copy_((part / whole.clamp(min=1)).view_as(buffer))
    return True


def served_optimizer(node: ProcessNode, collectives: Collectives, share_of: Callable[[int], Share]) -> OptimizerParts:
    """The optimizer's state where servers make the steps: of each part of the model from the first server that has it.
    All ranks call it together.

    Args:
        node, collectives: of this rank.
        share_of: what a rank brings to the model of the run.
    """
    holders: dict[int, int] = {}
    for rank in range(node.workers, node.world_size):
        share = share_of(rank)
        if not share.empty and rank in collectives.ranks:
            holders.setdefault(share.first, rank)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for holder in holders.values():
        own = None
        if node.rank == holder:
            parts, plain = checkpoint.optimizer_parts(node.replica.optimizer)
            own = Checkpoint(tensors={"optimizer": parts}, values=plain).to_bytes()
        part = Checkpoint.from_bytes(collectives.broadcast_bytes(own, holder))
        tensors |= part.tensors.get("optimizer", {})
        values = {**part.values, "state": values.get("state", {}) | part.values["state"]}
    return tensors, values
