"""Which parameters a run trains, and whether the user's optimizer can move them together with other ranks."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from paceline.errors import PacelineError


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """The mean of all ranks' gradients is computed once and is dense: not every optimizer can work with it."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PacelineError(
            f"The optimizer {type(optimizer).__name__} needs a closure that computes the loss again.",
            where="run.optimizer(optimizer, model)",
            cause="A step is made with the gradients of all ranks, which are computed once.",
            remedy="Take an optimizer that only uses .grad: SGD, Adam, AdamW and most others.",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise PacelineError(
            "The optimizer SparseAdam takes sparse gradients alone.",
            where="run.optimizer(optimizer, model)",
            cause="A step is made with the sum of all ranks' gradients, which is dense; layers may be sparse=True.",
            remedy="Take SGD, Adam or AdamW.",
        )


def steps_with_sparse_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step with a sparse gradient is the same as with a dense one: plain SGD's, which does nothing to rows
    whose gradient is zero."""
    return type(optimizer) is torch.optim.SGD and not any(
        group["momentum"] or group["weight_decay"] for group in optimizer.param_groups
    )


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[str], list[nn.Parameter]]:
    """The parameters that the optimizer moves, in the model's order; protests when they are not the model's."""
    moved = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    named = [(name, p) for name, p in model.named_parameters() if id(p) in moved]
    strangers = len(moved) - len(named)
    if strangers or not named:
        raise PacelineError(
            f"The optimizer holds {strangers} parameter(s) that are not the model's."
            if strangers
            else "The optimizer holds no parameter of the model that requires a gradient.",
            where="run.optimizer(optimizer, model)",
            cause="Probably the model was built again, moved or wrapped after the optimizer was made.",
            remedy="Make the optimizer from this model's parameters(), after the last change to the model.",
        )
    kinds = {(str(p.dtype), str(p.device)) for _, p in named}
    if len(kinds) > 1:
        raise PacelineError(
            f"The trained parameters are of different kinds: {', '.join(' on '.join(kind) for kind in sorted(kinds))}.",
            where="run.optimizer(optimizer, model)",
            cause="Paceline keeps all parameters of a rank in one flat buffer.",
            remedy="Convert the model as a whole (model.to(...)), and use torch.autocast for mixed precision.",
        )
    return [name for name, _ in named], [p for _, p in named]
