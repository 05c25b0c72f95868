"""A rank's whole state as a checkpoint, and a rank brought to the state of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.backends.processes import ProcessNode
from paceline.backends.replica import Replica
from paceline.control.messages import to_spans
from paceline.errors import PacelineError
from paceline.run import checkpoint
from paceline.run.checkpoint import Checkpoint
from paceline.run.optimizer import LearningRates


def model_state(replica: Replica) -> dict[str, Tensor]:
    """The model's state on the CPU, in memory of its own."""
    state = {name: tensor.detach().cpu().clone() for name, tensor in replica.model.state_dict().items()}
    return state | {name: part.detach().cpu().clone() for name, part in replica.committed.items()}


def average_buffers(node: ProcessNode) -> None:
    """BatchNorm's running statistics, averaged over the ranks by the samples that each has seen."""
    buffers = [b for b in node.replica.model.buffers() if b.is_floating_point()]
    if not buffers or node.world_size == 1:
        return
    seen = torch.tensor([float(node.samples_computed)], dtype=torch.float64, device=buffers[0].device)
    weighted = [buffer.detach().double().flatten() * seen for buffer in buffers]
    *sums, whole = node.sum_now(torch.cat([*weighted, seen])).split([*(b.numel() for b in buffers), 1])
    for buffer, part in zip(buffers, sums, strict=True):
        buffer.copy_((part / whole.clamp(min=1)).view_as(buffer))


def gather(
    node: ProcessNode, rates: LearningRates, settled: list[range], strategy: str, data: dict[str, int]
) -> Checkpoint:
    """All that a run needs to go on.

    Args:
        node: after a round.
        rates: the learning rates' schedule.
        settled: the samples that the parameters are the result of.
        strategy: its name; its state is of use to no other.
        data: length and seed of the data; a resumed run must have the same.
    """
    tensors, values = checkpoint.optimizer_parts(node.replica.optimizer)
    kept = {name: value for name, value in node.state.items() if isinstance(value, Tensor)}
    return Checkpoint(
        tensors={"model": model_state(node.replica), "optimizer": tensors, "strategy": kept},
        values={
            "optimizer": values,
            "scheduler": rates.state_dict(),
            "strategy": {name: value for name, value in node.state.items() if name not in kept},
            "strategy_name": strategy,
            "data": data,
            "samples_applied": node.samples_applied,
            "rounds": node.rounds,
            "used": to_spans(settled),
        },
    )


def restore(saved: Checkpoint, node: ProcessNode, rates: LearningRates, strategy: str) -> None:
    """Bring a rank to the saved state: parameters always, the rest if the checkpoint has it."""
    node.replica.model.load_state_dict(saved.tensors["model"])
    values = saved.values
    if "optimizer" not in values:
        return
    checkpoint.load_optimizer(node.replica.optimizer, saved.tensors.get("optimizer", {}), values["optimizer"])
    rates.load_state_dict(values["scheduler"])
    node.samples_applied = node.resumed_samples = values["samples_applied"]
    node.rounds = values["rounds"]
    if values["strategy_name"] == strategy:
        node.state.update(saved.tensors.get("strategy", {}) | values["strategy"])


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


def newest_checkpoint(folders: list[Path], must_exist: bool) -> tuple[Path, Checkpoint] | None:
    """The newest whole checkpoint of the first folder that has one: a checkpoint, a run's folder or its checkpoints."""
    for folder in folders:
        if (folder / checkpoint.MANIFEST).exists():
            return folder, checkpoint.read(folder)
        inside = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
        found = checkpoint.read_latest(inside)
        if found:
            return found
    if must_exist:
        raise PacelineError(
            f"There is no checkpoint in {folders[0]}.", remedy="Give a run's folder, or a folder round-… inside it."
        )
    return None
