"""Sparse rows in memory: many of them behind each other, and batches of any of them as tensors.

A row is a *bag*: some indices, each with a value or, for labels, without. Bags lie behind each other in flat tensors
(the form that is called CSR), so a batch is a copy of a few ranges, and the tensors may be mapped from a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.workloads.workload import Samples


@dataclass(frozen=True)
class Rows:
    """Some consecutive rows, as a file or a generator gives them.

    Args:
        sizes: non-zeros of each row.
        indices, values: of all non-zeros, one row behind the other.
        label_counts: labels of each row.
        labels: of all rows.
    """

    sizes: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]
    label_counts: NDArray[np.int64]
    labels: NDArray[np.int32]


class Bags:
    """Rows of indices with values.

    Args:
        starts: where each row begins in the indices, and at the end where the last one ends.
        indices: of all rows.
        values: one for each index; None where an index says all.

    >>> bags = Bags(torch.tensor([0, 2, 2, 3]), torch.tensor([7, 1, 5]))
    >>> len(bags), bags[1:].starts.tolist(), bags[torch.tensor([2, 0])].indices.tolist()
    (3, [0, 0, 1], [5, 7, 1])
    """

    def __init__(self, starts: Tensor, indices: Tensor, values: Tensor | None = None) -> None:
        self.starts, self.indices, self.values = starts, indices, values

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> Tensor:
        """How many indices each row has."""
        return self.starts.diff()

    @property
    def rows(self) -> Tensor:
        """Of every index: the row in which it stands."""
        return torch.repeat_interleave(self.sizes)

    def __getitem__(self, chosen: int | slice | Tensor) -> Bags:
        """The chosen rows in memory of their own, with indices of the type that torch's layers take."""
        if isinstance(chosen, int):
            chosen = torch.tensor([chosen])
        elif isinstance(chosen, slice):
            chosen = torch.arange(len(self))[chosen]
        begins, sizes = self.starts[chosen], self.starts[chosen + 1] - self.starts[chosen]
        starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        places = torch.repeat_interleave(begins - starts[:-1], sizes) + torch.arange(int(starts[-1]))
        values = None if self.values is None else self.values[places]
        return Bags(starts, self.indices[places].long(), values)

    def to(self, device: torch.device | str) -> Bags:
        values = None if self.values is None else self.values.to(device)
        return Bags(self.starts.to(device), self.indices.to(device), values)


class SparseSamples(Samples):
    """A map-style dataset of bags of features and bags of labels. A batch of it is (features, labels), both `Bags`.

    Args:
        x: features with values.
        y: labels.
        row_cost: what a row costs besides its features, in non-zeros; for `run.loader(balance="nonzeros")`.
    """

    def __init__(self, x: Bags, y: Bags, row_cost: float = 0.0) -> None:
        super().__init__(x, y)
        self.row_cost = row_cost

    @property
    def nonzeros(self) -> Tensor:
        """Features of each row, for `run.loader(balance="nonzeros")`."""
        return cast(Tensor, self.x.sizes)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The whole batch at once: bags are joined as they are fetched, and `collate` has nothing left to do."""
        return self[torch.as_tensor(indices)]

    @staticmethod
    def collate(batch: Any) -> tuple[Bags, Bags]:
        """For a `DataLoader`, as its `collate_fn`."""
        return cast(tuple[Bags, Bags], batch)
