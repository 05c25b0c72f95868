"""One rank's model and optimizer on flat memory.

All parameters lie in one buffer and all their gradients in another; `p.data` and `p.grad` are views into them. So
a collective moves one tensor, adding a micro-batch is one pass over the memory, and no step packs or unpacks.

A contribution to a collective is longer than the gradients by `TRAILER` numbers: how many samples it is over,
whether this rank still has data, and whether it wants a checkpoint. They travel with the sum, so a missing contribution
can never corrupt a mean, and all ranks learn in the same round that the data is at its end or that a save is due.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.node import Gradient

TRAILER = 3  # count of samples, number of ranks with data left, number of ranks that want a checkpoint


class Replica:
    """A model whose parameters and gradients are flat, and the optimizer that moves it.

    Args:
        model: its parameters keep their identity; only their storage moves.
        optimizer: any `torch.optim` optimizer over parameters of the model.
        clip_norm: largest norm of a round's mean gradient; applied after aggregation, never per worker.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None = None) -> None:
        self.model, self.optimizer, self.clip_norm = model, optimizer, clip_norm
        self.names, self._trained = trained_parameters(model, optimizer)
        dtype, device = self._trained[0].dtype, self._trained[0].device
        self.size = sum(p.numel() for p in self._trained)
        self.parameters = torch.empty(self.size, dtype=dtype, device=device)
        self._gradients = torch.zeros(self.size, dtype=dtype, device=device)
        self._gradient_views = self._views(self._gradients)
        self._sum_dtype = torch.promote_types(dtype, torch.float32)  # half precision cannot hold a sum or a count
        self._free: list[Tensor] = []
        for parameter, view in zip(self._trained, self._views(self.parameters), strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.zero_gradients()

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self._trained]
        return [part.view(p.shape) for part, p in zip(flat.split(sizes), self._trained, strict=True)]

    def describe(self) -> list[list[object]]:
        """Name, shape and dtype of every parameter: what ranks compare before they add anything up."""
        return [
            [name, list(p.shape), str(p.dtype).removeprefix("torch.")]
            for name, p in zip(self.names, self._trained, strict=True)
        ]

    # ---- a micro-batch's gradient

    def zero_gradients(self) -> None:
        """Zero all gradients at once, and make them views again if somebody set them to None."""
        self._gradients.zero_()
        self._point_at_gradients()
        self.mark_gradients_read()

    def mark_gradients_read(self) -> None:
        """From here on, `gradients_written` tells whether a backward pass has come since."""
        self._read_version = self._gradients._version

    @property
    def gradients_written(self) -> bool:
        """Autograd adds into the views in place, and torch counts writes: asking costs nothing."""
        return self._gradients._version != self._read_version

    def fresh(self, count: int, samples: list[range]) -> Gradient:
        """What the backward pass has just left (a mean over `count` samples), borrowed from `.grad`."""
        for parameter, view in zip(self._trained, self._gradient_views, strict=True):
            grad = parameter.grad
            if grad is view:
                continue
            if grad is None:  # not reached by this backward pass
                view.zero_()
            else:  # somebody else's memory: model.zero_grad() or a sparse gradient
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
        return Gradient(self._gradients, count, samples, scale=float(count))

    def own(self, gradient: Gradient) -> None:
        """Move a borrowed gradient into memory of its own."""
        if gradient.values is self._gradients:
            buffer = self.buffer()
            if buffer.dtype == gradient.values.dtype:
                torch.mul(gradient.values, gradient.scale, out=buffer[: self.size])
            else:
                buffer[: self.size].copy_(gradient.values).mul_(gradient.scale)
            gradient.values, gradient.scale = buffer[: self.size], 1.0

    def buffer(self) -> Tensor:
        """Memory for one contribution; used again after the step that it ends in."""
        if self._free:
            return self._free.pop()
        return torch.empty(self.size + TRAILER, dtype=self._sum_dtype, device=self.parameters.device)

    # ---- a round

    def contribution(self, gradient: Gradient, working: bool, saving: bool = False) -> tuple[Tensor, bool]:
        """The buffer that travels, and whether it is sound. A non-finite one is replaced by an empty one."""
        self.own(gradient)
        if gradient.values is None:
            whole = self.buffer().zero_()
        else:
            base = gradient.values._base
            assert base is not None, "an owned gradient is a view of its whole buffer"
            whole = base
        sound = bool(torch.isfinite(whole[: self.size].sum()))
        if not sound:
            whole.zero_()
        whole[self.size] = gradient.count if sound else 0
        whole[self.size + 1] = float(working)
        whole[self.size + 2] = float(saving)
        return whole, sound

    def total(self, reduced: Tensor) -> tuple[Gradient, bool, bool]:
        """A reduced buffer as a gradient over all ranks' samples, whether a rank has data left, and whether one wants
        a checkpoint."""
        count, working, saving = reduced[self.size :].tolist()
        return Gradient(reduced[: self.size], int(count)), working > 0, saving > 0

    def apply(self, gradient: Gradient) -> None:
        """One optimizer step with the gradient's mean. Its memory goes back to the pool."""
        if gradient.count and gradient.values is not None:
            torch.mul(gradient.values, gradient.scale / gradient.count, out=self._gradients)
            if self.clip_norm is not None:
                norm = torch.linalg.vector_norm(self._gradients)
                self._gradients.mul_(torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0))
            self._point_at_gradients()
            self.optimizer.step()
        if gradient.values is not None and gradient.values is not self._gradients:
            base = gradient.values._base
            if base is not None:
                self._free.append(base)
        gradient.values = None

    def _point_at_gradients(self) -> None:
        for parameter, view in zip(self._trained, self._gradient_views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    # ---- what strategies ask about the optimizer

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def has_momentum(self) -> bool:
        group = self.optimizer.param_groups[0]
        return bool(group.get("momentum", 0)) or bool(group.get("betas", (0,))[0])


def trained_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[str], list[nn.Parameter]]:
    """The parameters that the optimizer moves, in the model's order; protests when they are not the model's."""
    moved = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    named = [(name, p) for name, p in model.named_parameters() if id(p) in moved]
    strangers = len(moved) - len(named)
    if strangers or not named:
        raise PacelineError(
            f"The optimizer holds {strangers or 'no'} parameter(s) that "
            f"{'are not the model’s' if strangers else 'require a gradient'}.",
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


def averaged_buffers(models: Iterable[tuple[nn.Module, int]]) -> dict[str, Tensor]:
    """Floating-point buffers (BatchNorm's running statistics) averaged over replicas by the samples each has seen."""
    models = list(models)
    whole = sum(seen for _, seen in models) or 1
    averaged: dict[str, Tensor] = {}
    for model, seen in models:
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                part = buffer.detach() * (seen / whole)
                averaged[name] = averaged[name] + part if name in averaged else part
    return averaged
