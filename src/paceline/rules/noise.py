"""The gradient noise scale, measured from the unequal contributions to a round.

For N sums G_i of b_i per-sample gradients, taken at the same point, with g the true gradient and Σ the covariance of
one sample's:

    E Σ_i |G_i|²  =  |g|² Σ_i b_i²  +  tr Σ · B            B = Σ_i b_i
    E |Σ_i G_i|²  =  |g|² B²        +  tr Σ · B

Two equations, two unknowns, and all that must travel is two sums: Σ|G_i|² and Σb_i². The solution is unbiased. It is
the weighted mean, with weights b_i(B − b_i), of the estimates that each worker's batch gives beside the whole
(McCandlish et al. 2018 for two batch sizes).
"""

from __future__ import annotations

KEEP = 0.95  # of the past, a round: one round's estimate is far too noisy to use; over twenty it settles


def estimate(batch: float, square_of_sum: float, sum_of_squares: float, sum_of_counts: float) -> tuple[float, float]:
    """|g|² and tr Σ, unbiased; each may come out negative by chance.

    Args:
        batch: B.
        square_of_sum: |Σ G_i|².
        sum_of_squares: Σ |G_i|².
        sum_of_counts: Σ b_i².

    Two workers with one and three samples, gradients of mean 2: sums 1 and 7.

    >>> estimate(batch=4, square_of_sum=64.0, sum_of_squares=50.0, sum_of_counts=10.0)
    (2.3333333333333335, 6.666666666666667)
    """
    spread = batch * batch - sum_of_counts
    squared_norm = (square_of_sum - sum_of_squares) / spread
    variance = (sum_of_squares * batch - square_of_sum * sum_of_counts / batch) / spread
    return squared_norm, variance


class NoiseScale:
    """B_noise = tr Σ / |g|², smoothed over the last rounds.

    Numerator and denominator are averaged apart: the mean of ratios of noisy numbers would be far off.
    """

    def __init__(self) -> None:
        self.squared_norm = self.variance = 0.0
        self._weight = 0.0

    def see(self, batch: float, square_of_sum: float, sum_of_squares: float, sum_of_counts: float) -> None:
        """A round. One to which only one worker contributed says nothing."""
        if batch * batch <= sum_of_counts:
            return
        squared_norm, variance = estimate(batch, square_of_sum, sum_of_squares, sum_of_counts)
        self._weight = KEEP * self._weight + 1 - KEEP
        rate = (1 - KEEP) / self._weight
        self.squared_norm += rate * (squared_norm - self.squared_norm)
        self.variance += rate * (variance - self.variance)

    def state(self) -> list[float]:
        """All that it has seen, as numbers."""
        return [self.squared_norm, self.variance, self._weight]

    def restore(self, state: list[float]) -> None:
        self.squared_norm, self.variance, self._weight = state

    @property
    def value(self) -> float | None:
        """None before the first round, and while the gradient is lost in the noise (then it is very large)."""
        if self._weight == 0.0 or self.squared_norm <= 0.0:
            return None
        return max(0.0, self.variance / self.squared_norm)
