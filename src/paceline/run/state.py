"""A rank's whole state as a checkpoint, and a rank brought to the state of a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.backends.collectives import Collectives
from paceline.backends.processes import ProcessNode
from paceline.backends.replica import Replica
from paceline.control.messages import to_spans
from paceline.errors import PacelineError
from paceline.run import chance, checkpoint
from paceline.run.checkpoint import Checkpoint
from paceline.run.optimizer import LearningRates

OptimizerParts = tuple[dict[str, Tensor], dict[str, Any]]
"""An optimizer's state: tensors by name, and plain values."""


def model_state(replica: Replica) -> dict[str, Tensor]:
    """The model's state on the CPU, in memory of its own."""
    return _copied(replica.model.state_dict()) | _copied(replica.committed)


def untrained_state(replica: Replica) -> dict[str, Tensor]:
    """What of the model's state no optimizer moves: running statistics, say, and frozen parameters."""
    state = replica.model.state_dict()
    return _copied({name: tensor for name, tensor in state.items() if name not in replica.committed})


def gather(
    node: ProcessNode,
    rates: LearningRates,
    settled: list[range],
    strategy: str,
    data: dict[str, int],
    optimizer: OptimizerParts | None = None,
) -> Checkpoint:
    """All that a run needs to go on, in memory of its own: training may go on while it is written.

    Args:
        node: after a round.
        rates: the learning rates' schedule.
        settled: the samples that the parameters are the result of.
        strategy: its name; its state is of use to no other.
        data: length and seed of the data; a resumed run must have the same.
        optimizer: its state, if it is not this rank's; see `served_optimizer`.
    """
    tensors, values = optimizer or checkpoint.optimizer_parts(node.replica.optimizer)
    kept = {name: value for name, value in node.state.items() if isinstance(value, Tensor)}
    return Checkpoint(
        tensors={
            "model": model_state(node.replica),
            "optimizer": _copied(tensors),
            "strategy": _copied(kept),
            "chance": chance.state(node.parameters.device),
        },
        values=copy.deepcopy(
            {
                "optimizer": values,
                "scheduler": rates.state_dict(),
                "strategy": {name: value for name, value in node.state.items() if name not in kept},
                "strategy_name": strategy,
                "data": data,
                "samples_applied": node.samples_applied,
                "rounds": node.rounds,
                "used": to_spans(settled),
            }
        ),
    )


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def start_alike(
    saved: Checkpoint, node: ProcessNode, collectives: Collectives, rates: LearningRates, strategy: str
) -> Checkpoint:
    """Rank 0's model, and all that it has resumed, becomes everybody's; returns what was resumed."""
    if node.rank == 0 and "model" not in saved.tensors:
        saved.tensors["model"] = untrained_state(node.replica)
    alike = Checkpoint.from_bytes(collectives.broadcast_bytes(saved.to_bytes() if node.rank == 0 else None))
    if not alike.values:
        collectives.broadcast(node.replica.parameters)  # in place: no copies of a large model
    restore(alike, node, rates, strategy)
    return alike


def restore(saved: Checkpoint, node: ProcessNode, rates: LearningRates, strategy: str) -> None:
    """Bring a rank to the saved state: parameters always, the rest if the checkpoint has it."""
    whole = "optimizer" in saved.values
    node.replica.model.load_state_dict(saved.tensors.get("model", {}), strict=whole)
    values = saved.values
    if "optimizer" not in values:
        return
    checkpoint.load_optimizer(node.replica.optimizer, saved.tensors.get("optimizer", {}), values["optimizer"])
    rates.load_state_dict(values["scheduler"])
    node.books.applied = node.books.resumed = values["samples_applied"]
    node.rounds = values["rounds"]
    if values["strategy_name"] == strategy:
        node.state.update(saved.tensors.get("strategy", {}) | values["strategy"])
    if node.rank == 0:  # the others keep their own: all ranks with the same dropout would be no dropout
        chance.draw_from(saved.tensors.get("chance", {}), node.parameters.device)


def check_same_data(saved: Checkpoint, data: dict[str, Any], path: Path) -> None:
    """With another order of the samples the checkpoint's account of them would mean nothing."""
    before = saved.values["data"]
    different = [f"{key} {before[key]} then, {data[key]} now" for key in data if before[key] != data[key]]
    if different:
        raise PacelineError(
            f"The checkpoint was written with other data: {'; '.join(different)}.",
            where=str(path),
            cause="Which samples are still to be used would be lost.",
            remedy="Resume with the same data set and Run(seed=...).",
        )


def to_resume(path: str | Path | None, folder: Path, data: dict[str, int]) -> tuple[Path, Checkpoint] | None:
    """The checkpoint to go on from, of the same data.

    Args:
        path: a checkpoint, a run's folder, or None for the last run beside this one.
        folder: of this run.
        data: see `gather`.
    """
    folders = [Path(path)] if path is not None else sorted(folder.parent.glob("*"), reverse=True)
    found = checkpoint.newest(folders, must_exist=path is not None)
    if found:
        check_same_data(found[1], data, found[0])
    return found
