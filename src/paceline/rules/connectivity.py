"""How often to use each part of a graph, so that together they connect it best.

    maximise  λ₂(Σ_s p_s L_s)      subject to      Σ_s p_s ≤ total,   0 ≤ p_s ≤ 1

λ₂, the second smallest eigenvalue of a Laplacian, is concave in the weights: what nothing nearby betters is the best of
all. But it has no gradient where eigenvalues coincide, and at the best weights they mostly do. So it is written without
it, as the largest y for which Σ p_s L_s − y·I is positive semidefinite on the vectors that sum to zero, and solved from
within by Newton's method on

    τ·y + log det(Σ p_s L_s − y·I) + Σ log p_s + Σ log(1 − p_s) + log(total − Σ p_s)

with growing τ (Nesterov and Nemirovskii 1994). The distance to the optimum is at most ν/τ, with ν the number of
barriers: the answer is exact to what is asked. Where many weights are equally good, it is their middle, so that what is
symmetric in the graph stays so. numpy alone is enough: a matrix of as many rows as workers, for each part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.rules.graphs import Matrix

Vector = NDArray[np.float64]

ACCURACY = 1e-7
"""Of λ₂, relative: far below what any training could tell, and far above what floats lose."""
GROWTH = 8.0
"""Of τ from one centre to the next: 30 to 50 steps in all. With 100 it is half as many on rings, and twice as many on
random graphs."""
NEAR, AT = 0.25, 1e-5
"""Newton decrements: within the first the next centre is aimed at, for Newton's method converges quadratically from
there; within the second the last centre is found, as exactly as all ranks must agree on it."""
HALVINGS = 20
"""For the length of a step. A millionth is near enough: the next step corrects it."""
MOST_STEPS = 100
"""To one centre. Eight are many; more means that rounding is all that is left to correct."""


def second_eigenvalue(laplacian: Matrix) -> float:
    """λ₂; zero when the graph is not connected, and for a single worker infinite: nothing needs connecting.

    >>> from paceline.rules.graphs import laplacian, ring
    >>> round(second_eigenvalue(laplacian(4, ring(4).edges)), 6)
    2.0
    """
    if len(laplacian) == 1:
        return float("inf")
    return max(0.0, float(np.linalg.eigvalsh(laplacian)[1]))


def best_weights(laplacians: Matrix, total: float) -> Vector:
    """The weights p, one for each part.

    Args:
        laplacians: one above the other, of shape (parts, workers, workers); together they connect the graph.
        total: what the weights may sum up to, above zero.

    >>> from paceline.rules.graphs import laplacian
    >>> halves = [laplacian(4, [(0, 1), (2, 3)]), laplacian(4, [(1, 2), (0, 3)])]
    >>> best_weights(np.array(halves), total=1.0).round(6).tolist()
    [0.5, 0.5]
    """
    parts, workers = laplacians.shape[:2]
    if total >= parts:  # more weight connects better
        return np.ones(parts)
    basis = _sum_to_zero(workers)
    inner = _Inner(np.array([basis.T @ each @ basis for each in laplacians]), total)
    point = np.append(np.full(parts, total / (2 * parts)), 0.0)
    scale, barriers = 1.0, workers + 2 * parts
    while True:
        point = inner.centre(point, scale, NEAR)
        if barriers / scale < ACCURACY * point[-1]:
            return inner.centre(point, scale, AT)[:-1]
        scale *= GROWTH


@dataclass(frozen=True)
class _Inner:
    """The barrier's problem: a point is the weights and behind them y."""

    parts: Matrix
    total: float

    def centre(self, point: Vector, scale: float, near: float) -> Vector:
        """Where the barrier is least at this τ.

        With T the rates at which a step changes the barriers' arguments, relative to what they are, the barrier's
        gradient is −Tᵀ1 and its Hessian TᵀT. From T = QR follows the step without TᵀT, which would lose half of all
        digits.
        """
        for _ in range(MOST_STEPS):
            values, vectors = np.linalg.eigh(self._slack(point))
            root = vectors / np.sqrt(values)
            rates = self._rates(point, root)
            ones = np.concatenate([np.eye(len(root)).ravel(), np.ones(len(rates) - root.size)])
            # With 1 as one more column, Qᵀ1 stands in R, and Q is not needed.
            both = np.asarray(np.linalg.qr(np.column_stack([rates, ones]), mode="r"))[: len(point)]
            triangle, way = both[:, :-1], both[:, -1].copy()
            # τ·y pulls at the last coordinate only, and there Rᵀ⁻¹ has a single number.
            way[-1] += scale / triangle[-1, -1]
            step = np.linalg.solve(triangle, way)
            decrement = float(np.linalg.norm(way))
            if decrement <= near:
                return point + step
            point = point + step * (1.0 if decrement <= NEAR else self._length(root, rates @ step, scale * step[-1]))
        return point

    def _slack(self, point: Vector) -> Matrix:
        slack: Matrix = np.tensordot(point[:-1], self.parts, 1) - point[-1] * np.eye(len(self.parts[0]))
        return slack

    def _rates(self, point: Vector, root: Matrix) -> Matrix:
        """One column for each coordinate: of the slack, of the weights above zero, below one, and below the total."""
        weights = point[:-1]
        slack = np.concatenate([root.T @ self.parts @ root, -(root.T @ root)[None]])
        zero = np.zeros(len(weights))
        above = np.column_stack([np.diag(1 / weights), zero])
        below = np.column_stack([np.diag(-1 / (1 - weights)), zero])
        room = np.append(np.full(len(weights), -1 / (self.total - weights.sum())), 0.0)
        return np.concatenate([slack.reshape(len(point), -1).T, above, below, room[None]])

    def _length(self, root: Matrix, rates: Vector, pull: float) -> float:
        """How far to go along a step: to where the barrier is least. Its terms are −log(1 + length·rate), so that no
        other matrix is needed to know."""
        slack = np.linalg.eigvalsh(rates[: root.size].reshape(root.shape))
        rates = np.concatenate([slack, rates[root.size :]])
        low, high = 0.0, 1 / max(-float(rates.min()), 1e-3)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if pull + (rates / (1 + middle * rates)).sum() > 0:
                low = middle
            else:
                high = middle
        return low


def _sum_to_zero(workers: int) -> Matrix:
    """Orthonormal columns that span the vectors which sum to zero."""
    columns, _ = np.linalg.qr(np.eye(workers)[:, :-1] - 1 / workers)
    return columns
