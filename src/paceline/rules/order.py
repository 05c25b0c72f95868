"""The order in which a run reads its samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def order(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Which sample stands where in one epoch: the same on every rank, another in every epoch.

    >>> order(seed=0, epoch=1, samples=5)
    array([1, 4, 3, 0, 2])
    """
    return np.random.default_rng((seed, epoch)).permutation(samples)
