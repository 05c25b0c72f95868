"""A rank's whole state as a checkpoint, and a rank brought to the state of a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

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
                "optimizer_name": type(node.replica.optimizer).__name__,
                "noise": node.replica.noise.state(),
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
    if "noise" in values:  # checkpoints of 0.1 have not kept it from the beginning
        node.replica.noise.restore(values["noise"])
    if values["strategy_name"] == strategy:
        node.state.update(saved.tensors.get("strategy", {}) | values["strategy"])
    if node.rank == 0:  # the others keep their own: all ranks with the same dropout would be no dropout
        chance.draw_from(saved.tensors.get("chance", {}), node.parameters.device)


def check_same_model(saved: Checkpoint, model: nn.Module, path: Path) -> None:
    """Raise, with the first difference in words, if the weights are another model's."""
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    there = {name: tuple(tensor.shape) for name, tensor in saved.tensors["model"].items()}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            as_here, as_there = (
                f"has shape {each[name]}" if name in each else "is not there" for each in (here, there)
            )
            raise PacelineError(
                f"The checkpoint does not fit the model: {name} {as_there} in the checkpoint, and {as_here} here.",
                where=str(path),
                remedy="Make the model as it was when the checkpoint was written, or resume another one.",
            )


def check_same_course(saved: Checkpoint, optimizer: Optimizer, data: dict[str, int], path: Path) -> None:
    """With another order of the samples the checkpoint's account of them would mean nothing, and neither would the
    state of another optimizer."""
    then, now = saved.values["data"], data
    before, here = saved.values.get("optimizer_name", ""), type(optimizer).__name__
    different = [f"{key} {then[key]} then, {now[key]} now" for key in now if then[key] != now[key]]
    different += [f"{before} then, {here} now"] if before not in ("", here) else []
    if different:
        raise PacelineError(
            f"The checkpoint was written with other data or another optimizer: {'; '.join(different)}.",
            where=str(path),
            cause="Which samples are still to be used, or what the optimizer remembers, would be lost.",
            remedy="Resume with the same data set, Run(seed=...) and optimizer; or take the model alone and begin anew "
            "with it: run.resume(path, weights_only=True).",
        )


def to_resume(
    path: str | Path | None, folder: Path, replica: Replica, data: dict[str, int] | None
) -> tuple[Path, Checkpoint] | None:
    """The checkpoint to go on from, of the same model.

    Args:
        path: a checkpoint, a run's folder, or None for the last run beside this one.
        folder: of this run.
        replica: the model and its optimizer.
        data: see `gather`; None takes the weights alone, into the model at once, and leaves nothing to go on from.
    """
    folders = [Path(path)] if path is not None else sorted(folder.parent.glob("*"), reverse=True)
    found = checkpoint.newest(folders, must_exist=path is not None)
    if found is None:
        return None
    taken, saved = found
    check_same_model(saved, replica.model, taken)
    if data is not None:
        check_same_course(saved, replica.optimizer, data, taken)
        return taken, saved
    replica.model.load_state_dict(saved.tensors["model"])
    return taken, Checkpoint()
