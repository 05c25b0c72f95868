"""Micro-batches for whoever is ready: every sample exactly once an epoch, whatever the speeds.

There is one seeded, shuffled order for all ranks. A rank takes leases on the next positions of it, ahead of its need;
a torch `DataLoader` fetches and collates them. Ranks without data stay in the loop until all are done: inside
`__iter__` they answer the strategy with empty gradients.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.errors import PacelineError, no_such
from paceline.rules.order import order
from paceline.rules.portions import AHEAD, FILLED, portion

BALANCES = ("samples", "nonzeros")
TAKEN_OVER = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")


class SharedOrder:
    """The run's global order: which sample stands at a position. Keeps the two epochs in use."""

    def __init__(self, seed: int, samples: int) -> None:
        self._seed, self.samples = seed, samples
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def indices(self, positions: range) -> list[int]:
        epoch = positions.start // self.samples
        if epoch not in self._epochs:
            self._epochs = {kept: perm for kept, perm in self._epochs.items() if kept >= epoch - 1}
            self._epochs[epoch] = order(self._seed, epoch, self.samples)
        first = positions.start - epoch * self.samples
        return cast(list[int], self._epochs[epoch][first : first + len(positions)].tolist())


class LeaseSampler:
    """The batch sampler of the DataLoader: takes leases until there are none, and remembers what it took. A lease is
    cut into pieces when smaller micro-batches are asked for, or when samples do not cost the same. Leases that follow
    each other are joined first, so that what is left of one is no micro-batch of its own."""

    def __init__(self, shared_order: SharedOrder, costs: NDArray[np.float64] | None = None) -> None:
        self._order, self._costs = shared_order, costs
        self._mean_cost = 0.0 if costs is None else float(costs.mean())
        self.taken: deque[range] = deque()  # in the order in which the DataLoader will hand the batches out
        self.next_range: Callable[[], range | None] = lambda: None
        self.at_most: Callable[[], int] = lambda: 1
        self.over: Callable[[], bool] = lambda: False
        self._first: range | None = None
        self._second: range | None = None  # taken to be joined to the first, but it did not follow it

    def __iter__(self) -> Iterator[list[int]]:
        while (positions := self._take()) is not None:
            self.taken.append(positions)
            yield self._order.indices(positions)

    def look_ahead(self) -> bool:
        """Whether there is anything to take; what was found is kept for the next iteration."""
        if self.over():  # what is left of a lease goes back
            return False
        if self._first is None:
            self._first, self._second = self._second or self.next_range(), None
        return self._first is not None

    def _take(self) -> range | None:
        if not self.look_ahead():
            return None
        cut = self._equal_portion() if self._costs is None else self._portion(self._costs)
        assert self._first is not None
        taken, rest = self._first[:cut], self._first[cut:]
        self._first = rest or None
        return taken

    def _equal_portion(self) -> int:
        most = self.at_most()
        while self._first is not None and len(self._first) < most and self._join():
            pass
        return most

    def _portion(self, costs: NDArray[np.float64]) -> int:
        """How many of the first samples make a micro-batch of the usual cost."""
        most = self.at_most()
        budget = FILLED * self._mean_cost * most
        while True:
            assert self._first is not None
            waiting = costs[self._order.indices(self._first)]
            enough = float(waiting.sum()) >= AHEAD * budget
            if enough or not self._join():
                return portion(waiting, budget, most, more=enough)

    def _join(self) -> bool:
        """Take one more lease and join it to the first, if it follows that in the same epoch."""
        assert self._first is not None
        if self._first.stop % self._order.samples == 0:
            return False
        if self._second is None:
            self._second = self.next_range()
        if self._second is None or self._second.start != self._first.stop:
            return False
        self._first, self._second = range(self._first.start, self._second.stop), None
        return True

    def left_over(self) -> list[range]:
        """What was taken and never handed out."""
        rest = [*self.taken, *(part for part in (self._first, self._second) if part is not None)]
        self.taken.clear()
        self._first = self._second = None
        return rest


class Loader:
    """What `run.loader(...)` returns. Iterate it once; it goes through all epochs.

    Args:
        dataset: map-style.
        micro_batch: samples in a micro-batch, the smallest piece of work.
        epochs: how often every sample is used; None with `seconds` to go by the clock alone.
        seconds: take no new micro-batch after so long.
        seed: of the shuffled order.
        cost: of each sample of the dataset, in any unit; None where all cost the same.
        options: `DataLoader` options: num_workers, collate_fn, pin_memory, …
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        micro_batch: int,
        epochs: int | None,
        seconds: float | None,
        seed: int,
        cost: ArrayLike | None,
        options: dict[str, Any],
    ) -> None:
        self.samples = checked_length(dataset, micro_batch, epochs, seconds, options)
        self.micro_batch, self.epochs, self.seconds = micro_batch, epochs, seconds
        self.seed = seed
        costs = None if cost is None else checked_costs(cost, self.samples)
        self._sampler = LeaseSampler(SharedOrder(seed, self.samples), costs)
        # Of its own: whenever a DataLoader starts to iterate it draws a number, which would move the loop's generator.
        seeds = torch.Generator().manual_seed(torch.initial_seed())
        self._batches = DataLoader(dataset, batch_sampler=cast(Any, self._sampler), generator=seeds, **options)
        self._iterator: Iterator[Any] | None = None
        self._deadline = float("inf")
        self._pending: list[tuple[range, Any]] = []  # positions, and the batch in case that it comes again
        self._taken: list[tuple[range, Any]] = []
        self._ready: deque[tuple[range, Any]] = deque()
        self.fetched_at = 0.0
        self.epoch = 0
        self.iterate: Callable[[], Iterator[Any]] = self._not_ready

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def _not_ready(self) -> Iterator[Any]:
        raise PacelineError(
            "The loader was iterated before run.optimizer(...) was called.",
            remedy="Make the optimizer first: the strategy needs it from the first micro-batch on.",
        )

    def start(self, next_range: Callable[[], range | None], at_most: Callable[[], int]) -> None:
        """Leases may be taken from now on, in micro-batches of at most so many samples, and the clock of `seconds`
        runs."""
        self._sampler.at_most = at_most
        if self.seconds is not None:
            self._deadline = time.perf_counter() + self.seconds
        self._sampler.next_range, self._sampler.over = next_range, lambda: time.perf_counter() >= self._deadline

    @property
    def over(self) -> bool:
        """Whether the time limit has passed."""
        return self._sampler.over()

    def next_batch(self) -> Any | None:
        """The next micro-batch, or None when there is nothing to take now. It looks just before it says None: with
        workers of its own a DataLoader has asked long ago, and leases may have come back since."""
        if not self._ready and not self._fetch():
            return None
        positions, batch = self._ready.popleft()
        self._pending.append((positions, batch))
        self.epoch = positions.start // self.samples
        return batch

    def _fetch(self) -> bool:
        while True:
            if self._iterator is None:
                if not self._sampler.look_ahead():
                    return False
                self._iterator = iter(self._batches)
            try:
                batch = next(self._iterator)
                break
            except StopIteration:
                self._iterator = None
        self._ready.append((self._sampler.taken.popleft(), batch))
        return True

    def repeat(self) -> None:
        """What was taken last was for nothing: the same micro-batches come again."""
        self._ready.extendleft(reversed(self._taken))

    @property
    def has_pending(self) -> bool:
        """Whether micro-batches were handed out and not yet stepped with or discarded."""
        return bool(self._pending)

    def take_pending(self, keep_newest: bool = False) -> list[range]:
        """The positions of the micro-batches handed out since the last call; the newest may stay pending."""
        cut = max(0, len(self._pending) - keep_newest)
        self._taken, self._pending = self._pending[:cut], self._pending[cut:]
        return [positions for positions, _ in self._taken]

    def left_over(self) -> list[range]:
        """Fetched ahead but never used: to be given back."""
        self._iterator = None
        again = [positions for positions, _ in self._ready]
        self._ready.clear()
        return again + self._sampler.left_over()


def checked_length(
    dataset: Dataset[Any], micro_batch: int, epochs: int | None, seconds: float | None, options: dict[str, Any]
) -> int:
    """The dataset's length, after everything that can be wrong with a loader's arguments."""
    where = "run.loader(dataset, micro_batch=..., epochs=...)"
    taken_over = [name for name in TAKEN_OVER if name in options]
    if taken_over:
        raise PacelineError(
            f"The loader decides {', '.join(taken_over)} itself.",
            where=where,
            cause="Samples go to whoever is ready, in one shuffled order over all ranks.",
            remedy="Leave them out; micro_batch is the batch size, Run(seed=...) the seed.",
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise PacelineError(
            "The dataset is not map-style.",
            where=where,
            cause="Every sample is used exactly once an epoch, so samples must have an index.",
            remedy="Give a dataset with __len__ and __getitem__.",
        )
    if micro_batch < 1 or (epochs is not None and epochs < 1) or (seconds is not None and not seconds > 0):
        raise PacelineError("micro_batch, epochs and seconds must be above zero.", where=where)
    if epochs is None and seconds is None:
        raise PacelineError("Neither epochs nor seconds is given.", where=where, remedy="Give one of them.")
    samples = len(cast(Sized, dataset))
    if samples < micro_batch:
        raise PacelineError(
            f"The dataset has {samples} samples, fewer than one micro-batch of {micro_batch}.",
            where=where,
            remedy="Make the micro-batch smaller, or check that the dataset was read whole.",
        )
    return samples


def balanced_by(balance: str, cost: ArrayLike | None, dataset: Any) -> ArrayLike | None:
    """What the samples cost, by the name of what micro-batches are to have alike. Where a row costs something besides
    its non-zeros, cutting by those alone would make times less alike: the dataset may say how much."""
    if balance not in BALANCES:
        raise no_such("balance", balance, BALANCES)
    if balance == "samples":
        return cost
    if cost is not None or not hasattr(dataset, "nonzeros"):
        raise PacelineError(
            "Micro-batches cannot be balanced by non-zeros.",
            where="run.loader(dataset, balance='nonzeros')",
            cause="Costs are given as well." if cost is not None else "The dataset does not say how many a sample has.",
            remedy="Give either one. A dataset of sparse rows has `nonzeros`, one number for each of them.",
        )
    beside = getattr(dataset, "row_cost", 0.0)
    return cast(ArrayLike, dataset.nonzeros + beside if beside else dataset.nonzeros)


def checked_costs(cost: ArrayLike, samples: int) -> NDArray[np.float64]:
    """The costs of all samples as numbers."""
    try:
        costs = np.asarray(cost, dtype=np.float64)
    except (TypeError, ValueError):
        costs = np.empty(0)
    if costs.shape != (samples,) or not np.isfinite(costs).all() or costs.min() < 0 or not costs.any():
        raise PacelineError(
            "The costs of the samples cannot be used.",
            where="run.loader(dataset, cost=...)",
            cause=f"The dataset has {samples} samples.",
            remedy="Give one number for each of them, not negative and not all zero.",
        )
    return costs
