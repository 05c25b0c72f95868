"""Real gradients for the simulator: one rank's model and optimizer, all ranks in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.backends.flat import FlatSum
from paceline.backends.movement import Movement, Sums, add_up, moved_by_any, take, total
from paceline.backends.replica import Replica
from paceline.backends.watch import Watch
from paceline.node import Gradient, Share
from paceline.rules.learning_rate import Steps, StepScale
from paceline.rules.noise import NoiseScale
from paceline.rules.order import order

BackwardPass = Callable[[nn.Module, NDArray[np.int64]], object]
"""Puts the gradient of the mean loss over the data set's items with these indices into the parameters' `.grad`."""


class ReplicaLearner:
    """Learns with a `Replica`.

    Args:
        replica: the rank's own model and optimizer; all ranks start from equal parameters.
        backward: see `BackwardPass`.
        samples: length of the data set.
        rank: whose randomness (dropout) it is: independent of the other ranks'.
        seed: of the data's order, which is that of a real run with the same seed, and of the randomness.
    """

    def __init__(self, replica: Replica, backward: BackwardPass, *, samples: int, rank: int, seed: int = 0) -> None:
        self.replica, self._backward = replica, backward
        self._samples, self._seed, self.epoch = samples, seed, 0
        self._modes, self._code = _modes(), "none"
        start = int(np.random.SeedSequence((seed, rank)).generate_state(1)[0])
        self._random = torch.Generator().manual_seed(start).get_state()

    @property
    def nbytes(self) -> int:
        return self.replica.size * self.replica.parameters.element_size()

    @property
    def parameters(self) -> Tensor:
        return self.replica.parameters

    @property
    def steps(self) -> Steps:
        return self.replica.steps

    @property
    def divisible(self) -> bool:
        return self.replica.divisible

    @property
    def noise(self) -> NoiseScale:
        return self.replica.noise

    def compute(self, samples: list[range]) -> Gradient:
        self.replica.drop_gradients()
        indices = np.concatenate([self._indices(part) for part in samples])
        self.epoch = samples[-1].start // self._samples
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            self._backward(self.replica.model, indices)
            self._random = torch.get_rng_state()
        finally:
            torch.set_rng_state(outside)
        return self.replica.take_gradients(len(indices), samples)

    def take_over(self, other: ReplicaLearner) -> None:
        """The random numbers stay its own; and nothing was rounded off its gradients yet."""
        mine, theirs = self.replica, other.replica
        mine.send_as(self._code)
        mine.return_from_looking_ahead()
        mine.model.load_state_dict({**theirs.model.state_dict(), **theirs.committed})
        mine.optimizer.load_state_dict(copy.deepcopy(theirs.optimizer.state_dict()))
        mine.noise.restore(theirs.noise.state())

    def _indices(self, part: range) -> NDArray[np.int64]:
        """Which items stand at these positions of the run; a micro-batch may reach into the next epoch."""
        positions = np.arange(part.start, part.stop)
        epochs, places = np.divmod(positions, self._samples)
        first = int(epochs[0])
        found = _order(self._seed, first, self._samples)[places]
        if epochs[-1] != first:
            later = epochs != first
            found[later] = np.concatenate([self._indices(range(int(p), int(p) + 1)) for p in positions[later]])
        return found

    def contribution(self, gradient: Gradient, working: bool) -> tuple[FlatSum | Movement, bool]:
        return self.replica.contribution(gradient, working)

    def reduce(self, contributions: Sequence[FlatSum] | Sequence[Movement]) -> Tensor | Sums:
        first = contributions[0]
        if isinstance(first, Movement):
            return add_up(cast(Sequence[Movement], contributions))
        if first.codes is not None:
            return add_up_rounded(cast(Sequence[FlatSum], contributions))
        return total([each.whole for each in cast(Sequence[FlatSum], contributions)])

    def travelling(self, contributions: Sequence[FlatSum] | Sequence[Movement]) -> int:
        first = contributions[0]
        if isinstance(first, FlatSum):
            return self.nbytes if first.rounding is None else first.rounding.nbytes
        return first.nbytes_of(moved_by_any(cast(Sequence[Movement], contributions)))

    def total(self, own: FlatSum | Movement, reduced: Tensor | Sums) -> tuple[FlatSum | Movement, int, bool]:
        if isinstance(own, Movement):
            take(own, cast(Sums, reduced))
        else:
            own.whole.copy_(cast(Tensor, reduced))
            if own.rounding is not None:
                own.rounding.settle(own.kept)
                own.codes = own.rounding = own.kept = None
        gradient, working, _ = self.replica.total(own)
        return own, gradient.count, working

    def apply(self, gradient: Gradient, scale: StepScale) -> float:
        return self.replica.apply(gradient, scale)

    def look_ahead(self, gradient: Gradient, scale: StepScale, further: bool) -> None:
        self.replica.look_ahead(gradient, scale, further)

    def model(self, weight: float) -> FlatSum:
        return self.replica.model_contribution(weight)

    def movement(self, model: Tensor, common: Tensor, weight: float) -> Movement:
        return self.replica.movement(model, common, weight)

    def share(self, share: Share) -> FlatSum | None:
        return self.replica.share(share)

    def mean(self, gradient: Gradient) -> Tensor | None:
        return self.replica.mean(gradient)

    def step(self, mean: Tensor, scale: StepScale, first: int) -> float:
        return self.replica.step(mean, scale, first)

    @property
    def sizes(self) -> Sequence[int]:
        return self.replica.sizes

    def adopt(self, total: Gradient) -> None:
        self.replica.adopt(total)

    def copies(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tuple(tensor.detach().clone() for tensor in tensors)

    def leaked(self) -> str:
        now = _modes()
        return ", ".join(mode for mode, before in self._modes.items() if now[mode] != before)

    def sending_as(self, code: str) -> ReplicaLearner:
        self._code = code
        self.replica.send_as(code)
        return self

    def watched_by(self, watch: Watch) -> None:
        self.replica.on_sparse = watch.sparse


def add_up_rounded(contributions: Sequence[FlatSum]) -> Tensor:
    """What ranks get of an all-reduce of rounded gradients: each adds up its own part, see `rules.rounding`. If one of
    them is lost before they have it, it is done again without that one."""
    ranks, first, sums = len(contributions), contributions[0], []
    codes = [each.codes.filled(ranks) for each in contributions if each.codes is not None]
    for place, each in enumerate(contributions):
        assert each.rounding is not None
        each.rounding.arrange(place, ranks)
        own, each.kept = each.rounding.add_up([other.part(place, ranks) for other in codes])
        sums.append(own)
    whole = torch.empty_like(first.whole)
    assert first.rounding is not None
    first.rounding.unpack(sums, whole[: len(first.sums)])
    whole[len(first.sums) :] = total([each.trailer for each in contributions])
    return whole


def _modes() -> dict[str, bool]:
    return {
        "torch.no_grad()": not torch.is_grad_enabled(),
        "torch.inference_mode()": torch.is_inference_mode_enabled(),
        "torch.autocast()": torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
    }


@lru_cache(maxsize=4)  # all ranks of a run are in the same epoch or the next
def _order(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    return order(seed, epoch, samples)
