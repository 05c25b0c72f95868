"""Sparsified pushes: the largest entries are sent, the rest is kept and added to what comes.

    v ← v + g,   send v where |v| is among the k largest,   v ← 0 there            error feedback

What is sent is moved out of the residual v, not computed anew, so that nothing is lost: sent + residual = sum of all
gradients. All of the model is one flat tensor: the k largest are those of the model, not of each layer.

    none      everything, dense
    top-k     k = ratio · n, always
    gdtopk    k by epoch e and by how fast the group is, a = .25 fastest … .35 slowest:                     [code]
                  ratio = .35 for e ≤ 1,  then a^(min(e, 5) − 1): .0039 fastest, .0081 middle, .0150 slowest at last
              `direction="speed"` turns this round, so that the slowest sends least: "mitigate the speed gap" in the
              abstract read literally                                                                       [ours]
    dgc       u ← m·u + g,  v ← v + u,  send from v,  u ← 0 where sent            momentum correction and factor masking
                  ratio = .25 in the first epoch, then falling by the same factor in each to the final one  [paper]

With momentum m in the compressor (any of the last three) the server's optimizer must have none of its own.

At an epoch's end `flush` gives the residual, to be pushed dense. With momentum everything counts as sent then, and u is
zeroed too [ours].

GSSP and GDTopK: DOI 10.1109/TCC.2021.3062398. DGC: Lin, Han, Mao, Wang and Dally (2018), arXiv 1712.01887.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch

from paceline.errors import PacelineError, no_such
from paceline.rules.selection import largest

if TYPE_CHECKING:
    from torch import Tensor

KEEP = 0.3  # of the smoothed epoch time, an epoch [code]
FASTEST, SLOWEST = 0.25, 0.35  # a [code]
PAPERS_GROUPS = 4
FIRST_RATIO = 0.35  # of GDTopK, while gradients are large and nobody has been measured [code]
LAST_POWER = 4  # of a [code]
WARM_UP_FROM = 0.25  # of DGC [paper]
DIRECTIONS = ("code", "speed")


@dataclass(frozen=True, eq=False)
class Sparse:
    """Some entries of a flat tensor; the others are zero.

    Args:
        indices: where, ascending; `index_type(size)`.
        values: what, in the same order.
        size: entries of the whole tensor.

    >>> push = Sparse(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([5.0, -7.0]), size=4)
    >>> push.nbytes, push.add_to(torch.ones(4))
    (16, tensor([ 1.,  6.,  1., -6.]))
    """

    indices: Tensor
    values: Tensor
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes that travel, indices included."""
        return self.indices.nbytes + self.values.nbytes

    def add_to(self, dense: Tensor) -> Tensor:
        """Add the entries to a flat tensor, in place, and give it back."""
        if dense.shape != (self.size,):
            raise PacelineError(
                f"A push of {self.size} entries cannot be added to a tensor of shape {tuple(dense.shape)}.",
                cause="The two sides do not train the same model.",
            )
        return dense.scatter_add_(0, self.indices.long(), self.values)

    def parts(self, bounds: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
        """Its places and values, cut where the whole tensor is cut; places count from the beginning of each part.

        Args:
            bounds: where each part begins and ends, in order.

        >>> push = Sparse(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([5.0, -7.0]), size=4)
        >>> [(places.tolist(), values.tolist()) for places, values in push.parts([(0, 2), (2, 4)])]
        [([1], [5.0]), ([1], [-7.0])]
        """
        cuts = torch.searchsorted(self.indices, self.indices.new_tensor([first for first, _ in bounds[1:]])).tolist()
        ends = [0, *cuts, len(self.values)]
        return [
            ((self.indices[start:end] - first).to(index_type(last - first)), self.values[start:end])
            for (first, last), start, end in zip(bounds, ends, ends[1:], strict=False)
        ]

    def check(self) -> None:
        """Raise an error unless a compressor may have made this; for pushes that come from another process."""
        indices, values = self.indices, self.values
        if indices.dim() != 1 or indices.shape != values.shape or indices.dtype != index_type(self.size):
            raise PacelineError(
                f"A push has indices of shape {tuple(indices.shape)} and {indices.dtype} for values of shape "
                f"{tuple(values.shape)}.",
                remedy=f"Send as many indices as values, as {index_type(self.size)}.",
            )
        if len(indices) and not (indices[0] >= 0 and indices[-1] < self.size and bool((indices.diff() > 0).all())):
            raise PacelineError(
                f"The indices of a push do not ascend from 0 to at most {self.size - 1}.",
                cause="The two sides do not train the same model, or the message is broken.",
            )
        _check_finite(values)


class Compressor:
    """What becomes of a gradient on its way to the server. This one, `none`, sends it as it is.

    Args:
        like: a flat tensor of the size, type and device of every gradient.
    """

    def __init__(self, like: Tensor) -> None:
        if like.dim() != 1 or not len(like):
            raise PacelineError(
                f"Gradients of shape {tuple(like.shape)} cannot be pushed.",
                remedy="Lay all of the model in one flat tensor.",
            )
        self._like = like.detach().to("meta")

    def begin(self, epoch: int, times: Sequence[float] = (), group: int = 0) -> None:
        """An epoch begins, the run's first or another, or the one that a checkpoint is resumed in: sets the ratio.

        Args:
            epoch: from 0.
            times: mean of the smoothed epoch times of each group's workers, in seconds; not needed before epoch 2.
            group: the own one's place among them.
        """

    def push(self, gradient: Tensor) -> Sparse | Tensor:
        """What to send for a gradient, which stays as it is. One of wrong shape, or with NaN or infinity in it, is
        refused with an error, and then nothing has changed."""
        check_gradient(gradient, self._like)
        return gradient

    def flush(self) -> Tensor | None:
        """All that was kept back, and keep nothing; None if there is nothing."""
        return None

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: the tensors themselves, which stay the same ones for good. The ratio is not one
        of them, since `begin` sets it."""
        return {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from the state of a checkpoint."""
        own = self.state()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
        if shapes != wanted:
            raise PacelineError(
                f"The checkpoint holds the compressor's state {shapes}, and {wanted} is needed.",
                cause="It was written by a run with another compressor or another model.",
                remedy="Resume with the compressor that the run began with.",
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])


class TopK(Compressor):
    """The k largest of residual and gradient, k = ratio · n but at least one; the rest stays in the residual.

    A push makes three passes over memory: it reads the gradient for NaN, adds it to the residual, and reads that for
    the largest; beyond, it touches only the k entries. With momentum there is one more.

    Args:
        like: a flat tensor of the size, type and device of every gradient.
        ratio: share of the entries that a push sends, above 0 and at most 1.
        momentum: m of the momentum correction; 0.0 for none.

    >>> compressor = TopK(torch.empty(4), ratio=0.25)
    >>> compressor.push(torch.tensor([1.0, 2.0, -3.0, 0.0])).values
    tensor([-3.])
    >>> compressor.push(torch.tensor([1.0, 2.0, 1.0, 0.0])).values
    tensor([4.])
    >>> compressor.flush()
    tensor([2., 0., 1., 0.])
    """

    def __init__(self, like: Tensor, ratio: float, momentum: float = 0.0) -> None:
        super().__init__(like)
        if not 0 < ratio <= 1:
            raise PacelineError(f"A push cannot send the share {ratio:g}.", remedy="Give one above 0 and at most 1.")
        if not 0 <= momentum < 1:
            raise PacelineError(f"Momentum cannot be {momentum:g}.", remedy="Give 0 for none, or a number below 1.")
        self.ratio, self._momentum = ratio, momentum
        self._residual = torch.zeros_like(like, requires_grad=False)
        self._velocity = torch.zeros_like(self._residual) if momentum else None

    def push(self, gradient: Tensor) -> Sparse:
        check_gradient(gradient, self._like)
        residual, velocity, size = self._residual, self._velocity, len(gradient)
        if velocity is None:
            residual.add_(gradient)
        else:
            torch.add(gradient, velocity, alpha=self._momentum, out=velocity)
            residual.add_(velocity)
        chosen = largest(residual, entries(self.ratio, size))
        values = residual.index_select(0, chosen)
        residual.index_fill_(0, chosen, 0.0)
        if velocity is not None:
            velocity.index_fill_(0, chosen, 0.0)
        return Sparse(chosen.to(index_type(size)), values, size)

    def flush(self) -> Tensor | None:
        if self._velocity is not None:
            self._velocity.zero_()
        if not self._residual.any():
            return None
        kept = self._residual.clone()
        self._residual.zero_()
        return kept

    def state(self) -> dict[str, Tensor]:
        return {"residual": self._residual} | ({} if self._velocity is None else {"velocity": self._velocity})


class GDTopK(TopK):
    """Top-k whose ratio falls in the first epochs, to where the group's speed puts it; see `gdtopk_ratio`.

    Args:
        like: a flat tensor of the size, type and device of every gradient.
        direction: `code` if the slowest group sends most, `speed` if it sends least.
        momentum: m of the momentum correction; 0.0 for none.

    >>> compressor = GDTopK(torch.empty(10_000))
    >>> compressor.begin(epoch=5, times=[9.0, 4.0, 6.0, 5.0], group=1)
    >>> compressor.ratio, len(compressor.push(torch.ones(10_000)).values)
    (0.00390625, 39)
    """

    def __init__(self, like: Tensor, direction: str = "code", momentum: float = 0.0) -> None:
        if direction not in DIRECTIONS:
            raise no_such("direction of GDTopK", direction, DIRECTIONS)
        super().__init__(like, FIRST_RATIO, momentum)
        self._direction = direction

    def begin(self, epoch: int, times: Sequence[float] = (), group: int = 0) -> None:
        self.ratio = FIRST_RATIO if epoch <= 1 else gdtopk_ratio(epoch, group_base(times, group, self._direction))


class Dgc(TopK):
    """Deep gradient compression: top-k with momentum correction, factor masking and a warm-up of the ratio.

    Args:
        like: a flat tensor of the size, type and device of every gradient.
        ratio: the final one; the paper's is 0.001.
        momentum: m, as it would be in the optimizer.
        warm_up: epochs before the final ratio; the paper's is 4 for images.

    >>> compressor = Dgc(torch.empty(4), ratio=0.25, momentum=0.5)
    >>> [compressor.push(torch.tensor([1.0, 2.0, 0.0, 0.0])).values.item() for _ in range(3)]
    [2.0, 2.5, 5.0]
    """

    def __init__(self, like: Tensor, ratio: float = 0.001, momentum: float = 0.9, warm_up: int = 4) -> None:
        super().__init__(like, ratio, momentum)
        self._final, self._warm_up = ratio, warm_up
        self.begin(0)

    def begin(self, epoch: int, times: Sequence[float] = (), group: int = 0) -> None:
        self.ratio = dgc_ratio(epoch, self._final, self._warm_up)


COMPRESSORS: dict[str, type[Compressor]] = {"none": Compressor, "top-k": TopK, "gdtopk": GDTopK, "dgc": Dgc}


def entries(ratio: float, size: int) -> int:
    """k: the share of so many entries, and at least one.

    >>> entries(0.01, 10_000_000), entries(0.01, 5)
    (100000, 1)
    """
    return max(1, round(ratio * size))


def index_type(size: int) -> torch.dtype:
    """The smaller integers, if they reach to the end.

    >>> index_type(2**31 - 1), index_type(2**31)
    (torch.int32, torch.int64)
    """
    return torch.int32 if size < 2**31 else torch.int64


def smoothed(before: float | None, new: float) -> float:
    """T ← 0.3·T + 0.7·T_new [code]: a worker's epoch time, in seconds; None before its first epoch.

    >>> smoothed(None, 10.0), smoothed(10.0, 20.0)
    (10.0, 17.0)
    """
    return new if before is None else KEEP * before + (1 - KEEP) * new


def group_base(times: Sequence[float], group: int, direction: str) -> float:
    """a of a group, by its place among all of them from fastest to slowest.

    Four groups: .25 the fastest, .35 the slowest, .30 both others [code]. Other numbers: .25 + .10·rank/(G − 1) for G
    groups, and .30 for one alone [ours]. `speed` counts ranks from the slowest. Of equal groups the first is faster.

    Args:
        times: mean epoch time of each group, in seconds.
        group: whose a.
        direction: one of `DIRECTIONS`.

    >>> [round(group_base([9.0, 4.0, 6.0, 5.0], group, "code"), 2) for group in range(4)]
    [0.35, 0.25, 0.3, 0.3]
    >>> [round(group_base([9.0, 4.0, 6.0], group, "speed"), 2) for group in range(3)]
    [0.25, 0.35, 0.3]
    """
    if not 0 <= group < len(times) or not all(isfinite(time) for time in times):
        raise PacelineError(
            f"Group {group} has no place among the epoch times {list(times)}.",
            remedy="Give the mean epoch time of every group, in seconds.",
        )
    groups = len(times)
    rank = sorted(range(groups), key=times.__getitem__).index(group)
    if direction == "speed":
        rank = groups - 1 - rank
    if groups == 1 or (groups == PAPERS_GROUPS and 0 < rank < groups - 1):
        return (FASTEST + SLOWEST) / 2
    return FASTEST + (SLOWEST - FASTEST) * rank / (groups - 1)


def gdtopk_ratio(epoch: int, base: float) -> float:
    """Share that GDTopK sends: .35 for e ≤ 1, then a^(min(e, 5) − 1) [code].

    Args:
        epoch: e, from 0.
        base: a, of `group_base`.

    >>> [round(gdtopk_ratio(epoch, 0.25), 4) for epoch in range(7)]
    [0.35, 0.35, 0.25, 0.0625, 0.0156, 0.0039, 0.0039]
    """
    return FIRST_RATIO if epoch <= 1 else base ** min(epoch - 1, LAST_POWER)


def dgc_ratio(epoch: int, final: float, warm_up: int) -> float:
    """Share that DGC sends: .25 · (final/.25)^(e/warm-up), then the final one [paper].

    Args:
        epoch: e, from 0.
        final: the share after the warm-up. Above .25 there is none.
        warm_up: epochs; 0 for none.

    >>> [round(dgc_ratio(epoch, 0.001, 4), 4) for epoch in range(6)]
    [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    """
    if epoch >= warm_up or final >= WARM_UP_FROM:
        return final
    return float(WARM_UP_FROM * (final / WARM_UP_FROM) ** (epoch / warm_up))


def check_gradient(gradient: Tensor, like: Tensor) -> None:
    """Raise an error for a gradient that is not as the model's, or holds NaN or infinity; one pass over memory."""
    if gradient.shape != like.shape or gradient.dtype != like.dtype:
        raise PacelineError(
            f"A gradient of shape {tuple(gradient.shape)} and {gradient.dtype} was pushed instead of "
            f"{tuple(like.shape)} and {like.dtype}.",
            cause="The model is not the one that the run began with.",
        )
    _check_finite(gradient)


def _check_finite(values: Tensor) -> None:
    if not len(values):
        return
    # One pass that makes no tensor of the same size, and both ends are NaN if any entry is.
    low, high = values.aminmax()
    if not (isfinite(low) and isfinite(high)):
        wrong = (~values.isfinite()).nonzero()
        raise PacelineError(
            f"A gradient that is NaN or infinite at {len(wrong)} of its {len(values)} entries was pushed, the first at "
            f"{int(wrong[0])}.",
            cause="The learning rate is too high, or a sample is broken.",
            remedy="It was refused. Lower the learning rate, or leave such micro-batches out.",
        )
