"""Which learning rates a delay allows, and how close a run is to the edge.

On the quadratic λw²/2 a method is a linear map of its state; it is stable while all eigenvalues lie inside the unit
circle. With β = 0.9 the largest stable η·λ is 3.8 for synchronous training and 0.1 one round late: whoever switches
without a cure can simply diverge.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

PAIRS = 6


@lru_cache(maxsize=64)
def largest_stable(momentum: float, cure: str, nesterov: bool = False) -> float:
    """The largest η·λ for which SGD with momentum converges on a quadratic.

    Args:
        momentum: β, as torch's SGD has it: v ← βv + g, w ← w − ηv.
        cure: `none` (one round late), `extrapolate` (one round late, see `rules.delay`; without momentum as `none`) or
            `synchronous` (no delay; also one round late with look-ahead, which on a quadratic without noise is the
            same).
        nesterov: w ← w − η(g + βv).

    >>> [round(largest_stable(0.9, cure), 2) for cure in ("none", "extrapolate", "synchronous")]
    [0.1, 0.27, 3.8]
    >>> [round(largest_stable(0.9, cure, nesterov=True), 2) for cure in ("none", "extrapolate")]
    [0.25, 0.34]
    >>> round(largest_stable(0.0, "none"), 3)
    1.0
    """
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        stable = _spectral_radius(middle, momentum, cure, nesterov) <= 1 + 1e-9
        low, high = (middle, high) if stable else (low, middle)
    return low


def _spectral_radius(step: float, momentum: float, cure: str, nesterov: bool) -> float:
    """Of the map of (w, w before, ηv, last update u): v' = βv + ηλ·(w or w before), u' = v' or ηλ·(…) + βv', and
    w' = w − u' − c(u' − u)."""
    delayed, extra = cure != "synchronous", float(cure == "extrapolate" and momentum > 0)
    now, before, velocity, last = np.eye(4)
    gradient = step * (before if delayed else now)
    faster = momentum * velocity + gradient
    update = gradient + momentum * faster if nesterov else faster
    moved = now - update - extra * (update - last)
    return float(np.abs(np.linalg.eigvals(np.stack([moved, now, faster, update]))).max())


class CurvatureProbe:
    """λ along the path of training, from the gradients at successive points: ⟨Δg, Δw⟩ / ⟨Δw, Δw⟩.

    A gradient that comes one round late had no part in the step between the two points, so its noise is not in Δw and
    the quotient is not biased by it. When a direction is about to diverge the path turns into it, and λ is its own.
    A single quotient is noisy; the least of the last few is not taken for large by chance.
    """

    def __init__(self) -> None:
        self._point: Tensor | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        self._quotients: deque[float] = deque(maxlen=PAIRS)

    def see(self, point: Tensor, gradient: Tensor) -> None:
        """The parameters now, and a mean gradient that was taken at those of the call before. Both are copied."""
        if self._point is not None:
            latest = self._point, gradient.clone()
            if self._last is not None:
                step, change = latest[0] - self._last[0], latest[1] - self._last[1]
                length = float(step @ step)
                if length > 0:
                    self._quotients.append(float(step @ change) / length)
            self._last = latest
        self._point = point.clone()

    def forget(self) -> None:
        """The next point does not follow the last one."""
        self._point = self._last = None

    @property
    def curvature(self) -> float:
        """The least of the last quotients; 0.0 while there are too few."""
        return min(self._quotients) if len(self._quotients) == PAIRS else 0.0
