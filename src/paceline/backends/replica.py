"""One rank's model and optimizer on flat memory.

All parameters lie in one buffer, and so does a sum of gradients; parameters and gradients are views into them. A
collective moves one tensor, and no step packs or unpacks. Costs, in passes over the memory of the model: a micro-batch
one (its gradient times its count is written to, or added to, the sum), a round two more (is it finite? the mean).

A contribution to a collective is longer than the gradients by a trailer of a few numbers: how many samples it is over,
whether this rank still has data, two squares from which the noise scale is worked out, and what a backend wants to add.
They travel with the sum, so a missing contribution can never corrupt a mean, and all ranks learn in the same round that
the data is at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.backends.flat import TRAILER, WEIGHT, FlatSum, FreshGradient, add_rows, in_shape
from paceline.backends.movement import Movement
from paceline.backends.trained import check_step, steps_with_sparse_gradients, trained_parameters
from paceline.backends.trial import OptimizerTrial, scaled
from paceline.errors import PacelineError
from paceline.node import Gradient, Share
from paceline.rules.learning_rate import AS_SET, Steps, StepScale
from paceline.rules.noise import NoiseScale
from paceline.rules.rounding import Rounded

LARGEST_SQUARE = 1e38  # what float32 holds


class Replica:
    """A model whose parameters are flat, and the optimizer that moves it.

    Args:
        model: its parameters keep their identity; only their storage moves.
        optimizer: any `torch.optim` optimizer over parameters of the model.
        clip_norm: largest norm of a round's mean gradient; applied after aggregation, never per worker.
        extra: numbers that a backend adds to each contribution's trailer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None = None,
        extra: int = 0,
    ) -> None:
        self.model, self.optimizer, self.clip_norm, self._extra = model, optimizer, clip_norm, extra
        check_step(optimizer)
        self.names, self._trained = trained_parameters(model, optimizer)
        dtype, device = self._trained[0].dtype, self._trained[0].device
        self.size = sum(p.numel() for p in self._trained)
        self.parameters = torch.empty(self.size, dtype=dtype, device=device)
        self._sum_dtype = torch.promote_types(dtype, torch.float32)  # half precision cannot hold a sum or a count
        self._free: list[FlatSum] = []
        self.noise = NoiseScale()
        self.divisible = not any(isinstance(module, _BatchNorm) for module in model.modules())
        self._trial, self._further_trial = OptimizerTrial(optimizer), OptimizerTrial(optimizer)
        self._looks_ahead = self._went_further = False
        self._rounding: Rounded | None = None
        self.on_sparse: Callable[[int, int], object] = lambda dense_bytes, of_bytes: None
        for parameter, view in zip(self._trained, FlatSum(self.parameters, self._trained).views, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        self.drop_gradients()  # of whatever the model was used for before

    def describe(self) -> list[list[object]]:
        """Name, shape, dtype and strides of every parameter: what ranks compare before they add anything up."""
        return [
            [name, list(p.shape), str(p.dtype).removeprefix("torch."), list(p.stride())]
            for name, p in zip(self.names, self._trained, strict=True)
        ]

    # ---- a micro-batch's gradient

    def drop_gradients(self) -> None:
        """What `zero_grad()` does: the next backward pass then leaves its gradients without adding to zeros."""
        for parameter in self._trained:
            parameter.grad = None

    def gradients_mark(self) -> list[tuple[Tensor, int]]:
        """Which gradients are there, and how often each was written; see `written_since`."""
        return [(p.grad, p.grad._version) for p in self._trained if p.grad is not None]

    def written_since(self, mark: list[tuple[Tensor, int]]) -> bool:
        """Whether a backward pass has come since the mark was taken."""
        now = self.gradients_mark()
        same = len(now) == len(mark) and all(a is b and i == j for (a, i), (b, j) in zip(now, mark, strict=True))
        return not same

    def take_gradients(self, count: int, samples: list[range]) -> Gradient:
        """What the backward pass has just left: a mean over `count` samples."""
        parts = [p.grad for p in self._trained]
        self.drop_gradients()
        return Gradient(FreshGradient(self, parts, count), count, samples)

    def tell_sparse(self, view: Tensor) -> None:
        """A sparse gradient was added up in dense memory: what that weighs, and of how much."""
        self.on_sparse(view.numel() * view.element_size(), self.size * view.element_size())

    def buffer(self) -> FlatSum:
        """Memory for one contribution; used again after the step that it ends in."""
        if self._free:
            flat = self._free.pop()
            flat.known_norm = flat.weight = flat.origin = flat.codes = flat.rounding = flat.kept = None
            flat.given_back = False
            return flat
        length = self.size + TRAILER + self._extra
        whole = torch.empty(length, dtype=self._sum_dtype, device=self.parameters.device)
        return FlatSum(whole, self._trained)

    # ---- a round

    def contribution(
        self, gradient: Gradient, working: bool, extra: Sequence[float] = ()
    ) -> tuple[FlatSum | Movement, bool]:
        """What travels, and whether it is sound. A non-finite one is replaced by an empty one."""
        values = cast(FlatSum | FreshGradient | Movement | None, gradient.values)
        if values is None:
            part: FlatSum | Movement = self.buffer()
            part.leave_out()
        else:
            part = values.flat() if isinstance(values, FreshGradient) else values
            if isinstance(part, FlatSum) and len(part.trailer) != TRAILER + self._extra:
                part = part.copied_to(self.buffer())  # it was begun before more ranks came
        norm = 0.0 if values is None else part.norm
        sound = math.isfinite(norm)
        if not sound:
            part.leave_out()
        count = gradient.count if sound else 0
        square = min(norm * norm, LARGEST_SQUARE) if count else 0.0
        weight = count if part.weight is None else part.weight
        trailer = (count, working, square, count * count, weight, *extra)
        part.trailer.copy_(torch.tensor(trailer, dtype=part.trailer.dtype))
        if self._rounding is not None and isinstance(part, FlatSum):
            part.round(self._rounding)
        return part, sound

    def make_room(self, extra: int) -> None:
        """From now on so many numbers are added to each contribution: there are more ranks."""
        self._extra = extra
        self._free.clear()

    def send_as(self, code: str) -> None:
        """From now on contributions of gradients travel rounded; see `rules.rounding`."""
        like = torch.empty(self.size, dtype=self._sum_dtype, device=self.parameters.device)
        self._rounding = None if code == "none" else Rounded(like, code)

    def total(self, reduced: FlatSum | Movement) -> tuple[Gradient, bool, list[float]]:
        """A reduced contribution as a gradient over all ranks' samples, whether a rank has data left, and the sums of
        what the backend had added."""
        if isinstance(reduced, FlatSum):
            reduced.known_norm = None
        count, working, _, _, _, *extra = reduced.trailer.tolist()
        return Gradient(reduced, int(count)), working > 0, extra

    def apply(self, gradient: Gradient, scale: StepScale = AS_SET) -> float:
        """One optimizer step with the gradient's mean, from the point where the last one ended. The memory goes back to
        the pool. Returns the mean's norm; when that is not finite there is no step."""
        self.return_from_looking_ahead()
        fresh = gradient.values
        # A strategy may let a gradient count as one over more samples: then it is no longer the mean that was left.
        if isinstance(fresh, FreshGradient) and fresh.count == gradient.count and self.clip_norm is None:
            means = fresh.means(steps_with_sparse_gradients(self.optimizer))
            if means is not None:
                gradient.values = None
                return self._step_at_once(means, scale)
        flat = self._taken(gradient)
        if flat is None or not gradient.count:
            self.give_back(flat)
            return 0.0
        norm = self._measure(flat, gradient.count)
        if math.isfinite(norm):
            mean = self.buffer() if flat.held else flat
            torch.mul(flat.sums, self._factor(norm, gradient.count), out=mean.sums)
            self._step(mean, scale)
            if mean is not flat:
                self.give_back(mean)
        self.give_back(flat)
        return norm / gradient.count

    def _step_at_once(self, means: list[Tensor | None], scale: StepScale) -> float:
        """With gradients as the backward pass has left them: no buffer, and few rows of a large table stay few."""
        parts = [part._values() if part.is_sparse else part for part in means if part is not None]
        norm = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in parts))
        if math.isfinite(norm):
            for parameter, mean in zip(self._trained, means, strict=True):
                # As in a sum, a parameter that was not reached has a gradient of zero: momentum goes on moving it.
                parameter.grad = torch.zeros_like(parameter) if mean is None else mean
            with scaled(self.optimizer, scale):
                self.optimizer.step()
            self.drop_gradients()
        return norm

    def look_ahead(self, gradient: Gradient, scale: StepScale = AS_SET, further: bool = False) -> None:
        """Move to where a step with the gradient would lead; the optimizer forgets it. The gradient stays as it is.
        `further`: from where the last look ahead led that was not itself further."""
        if gradient.values is None or not gradient.count:
            return
        if isinstance(gradient.values, FreshGradient):
            gradient.values = gradient.values.flat()
        own = cast(FlatSum, gradient.values)
        if not math.isfinite(own.norm):
            return
        if further and self._looks_ahead:
            self._return_to_go_further()
            trial, after = self._further_trial, self._trial
        else:
            self.return_from_looking_ahead()
            self._committed.copy_(self.parameters)
            self._looks_ahead, self._went_further = True, False
            trial, after = self._trial, None
        flat = self.buffer()
        torch.mul(own.sums, self._factor(own.norm, gradient.count), out=flat.sums)
        try:
            trial.step(lambda: self._step(flat, scale), after)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise PacelineError(
                f"The optimizer {type(self.optimizer).__name__} cannot make a step on trial: {error}",
                cause="The strategy computes at the point to which a step would lead, and takes the step back.",
                remedy="Take delay_cure=extrapolate or delay_cure=none, which need no trial.",
            ) from error
        self._free.append(flat)

    def _return_to_go_further(self) -> None:
        """To where the last look ahead led; the first time the parameters are still there."""
        if self._went_further:
            self.parameters.copy_(self._ahead)
        else:
            self._ahead.copy_(self.parameters)
            self._went_further = True

    def return_from_looking_ahead(self) -> None:
        if self._looks_ahead:
            self.parameters.copy_(self._committed)
            self._looks_ahead = False

    @cached_property
    def _committed(self) -> Tensor:
        """Where the last step ended, while the rank computes at a point ahead of it."""
        return torch.empty_like(self.parameters)

    @cached_property
    def _ahead(self) -> Tensor:
        """Where the last look ahead led, while the rank goes further."""
        return torch.empty_like(self.parameters)

    @property
    def committed(self) -> dict[str, Tensor]:
        """The trained parameters where the last step ended, also while the rank computes at a point ahead of it."""
        flat = self._committed if self._looks_ahead else self.parameters
        views = dict(zip(map(id, self._trained), FlatSum(flat, self._trained).views, strict=True))
        named = self.model.named_parameters(remove_duplicate=False)  # tied ones have several names
        return {name: views[id(parameter)] for name, parameter in named if id(parameter) in views}

    def model_contribution(self, weight: float) -> FlatSum:
        """The parameters, weighing so much in the mean."""
        flat = self.buffer()
        flat.weight = weight
        flat.sums.copy_(self.parameters).mul_(weight)  # half precision: widen first, multiply then
        return flat

    def movement(self, model: Tensor, common: Tensor, weight: float) -> Movement:
        """How far a model has moved from one that all ranks hold, weighing so much in the mean."""
        trailer = torch.empty(TRAILER + self._extra, dtype=self._sum_dtype, device=self.parameters.device)
        return Movement(model, common, weight, trailer)

    def share(self, share: Share) -> FlatSum | None:
        """The part of the parameters that this rank brings to the mean model; None if there is none."""
        if share.empty:
            return None
        flat = self.buffer()
        flat.sums.zero_()
        flat.sums[share.part].copy_(self.parameters[share.part])
        return flat

    def adopt(self, total: Gradient) -> None:
        """The mean of the models by their weights becomes the model. It divides by what has arrived: a model that is
        not finite was replaced by one of no weight."""
        self.return_from_looking_ahead()
        if isinstance(total.values, Movement):  # what is common was moved in place
            self.parameters.copy_(total.values.common)
            total.values = None
            return
        flat = self._taken(total)
        weight = 0.0 if flat is None else flat.trailer[WEIGHT].item()
        if flat is not None and weight:
            torch.mul(flat.sums, 1 / weight, out=self.parameters)
        self.give_back(flat)

    def release(self, gradient: Gradient) -> None:
        """The gradient is not used; its memory is."""
        self.give_back(self._taken(gradient) if isinstance(gradient.values, FlatSum) else None)

    # ---- gradients that travel to a server

    @property
    def sizes(self) -> list[int]:
        """Numbers in each parameter."""
        return [p.numel() for p in self._trained]

    def mean(self, gradient: Gradient) -> Tensor | None:
        """The gradient's mean in memory that the next call uses again; the gradient is used up. None if not finite."""
        values, count = cast(FlatSum | FreshGradient | None, gradient.values), gradient.count
        gradient.values = None
        if isinstance(values, FreshGradient):
            for view, part in zip(in_shape(self._travelling, self._trained), values.parts, strict=True):
                if part is None or part.is_sparse:
                    view.zero_()
                if part is not None and part.is_sparse:
                    add_rows(view, part, 1)
                elif part is not None:
                    view.copy_(part)
        elif values is not None:
            torch.mul(values.sums, 1 / count, out=self._travelling)
            self.give_back(values)
        return self._travelling if math.isfinite(torch.linalg.vector_norm(self._travelling)) else None

    @cached_property
    def _travelling(self) -> Tensor:
        return torch.zeros_like(self.parameters)

    def step(self, mean: Tensor, scale: StepScale, first: int) -> float:
        """One step with a mean gradient of the parameters from the place `first` on; others do not move. Returns its
        norm; when that is not finite there is no step."""
        norm = float(torch.linalg.vector_norm(mean))
        if not math.isfinite(norm):
            return norm
        if self.clip_norm is not None and norm > self.clip_norm:
            mean = mean * (self.clip_norm / norm)
        places = accumulate(self.sizes, initial=0)
        moved = [p for p, place in zip(self._trained, places, strict=False) if first <= place < first + len(mean)]
        for parameter, view in zip(moved, in_shape(mean, moved), strict=True):
            parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
        with scaled(self.optimizer, scale):
            self.optimizer.step()
        self.drop_gradients()
        return norm

    def _taken(self, gradient: Gradient) -> FlatSum | None:
        values = cast(FlatSum | FreshGradient | None, gradient.values)
        gradient.values = None
        return values.flat() if isinstance(values, FreshGradient) else values

    def give_back(self, flat: FlatSum | None) -> None:
        """This rank has no more use for the memory. If another may need what is in it, it stays as it is."""
        if flat is not None:
            flat.given_back = True
            if not flat.held and len(flat.trailer) == TRAILER + self._extra:
                self._free.append(flat)

    def _measure(self, flat: FlatSum, count: int) -> float:
        """The norm of the sum; a round's total also tells the noise."""
        norm = flat.norm
        squares, counts = flat.trailer[2:4].tolist()
        if counts and norm * norm < LARGEST_SQUARE:
            self.noise.see(count, norm * norm, squares, counts)
        return norm

    def _factor(self, norm: float, count: int) -> float:
        """From a sum of this norm to its mean, clipped."""
        if self.clip_norm is None:
            return 1 / count
        return min(1.0, self.clip_norm / (norm / count + 1e-6)) / count

    def _step(self, flat: FlatSum, scale: StepScale) -> None:
        for parameter, view in zip(self._trained, flat.views, strict=True):
            parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
        with scaled(self.optimizer, scale):
            self.optimizer.step()
        self.drop_gradients()

    # ---- what strategies ask about the optimizer

    @property
    def steps(self) -> Steps:
        """torch's SGD and those written after it know dampening or Nesterov momentum; the others normalise."""
        group = self.optimizer.param_groups[0]
        return Steps(
            learning_rate=float(group["lr"]),
            momentum=float(group.get("momentum", 0.0)) or float(group.get("betas", (0.0,))[0]),
            nesterov=bool(group.get("nesterov", False)),
            adaptive="dampening" not in group and "nesterov" not in group,
            clips=self.clip_norm is not None,
        )
