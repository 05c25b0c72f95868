"""Is the run still learning? Divergence is told at once, and a run that can only diverge ends."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, isfinite, log

from paceline.errors import PacelineError

NOISE_EVERY = 16  # rounds between two entries of the noise scale in the record
GROWTH = 100.0  # times the smallest norm so far: in sound training a gradient shrinks, or grows a few times at most
ROUNDS_ABOVE = 3  # in a row, before it is called divergence: one bad batch is none
USELESS_ROUNDS = 20  # rounds in a row to which no rank brought one finite gradient, before the run ends
KEEP = 0.9


class Watch:
    """Looks at every round's gradient.

    Args:
        rank: whose watch it is; of what all ranks see, the first one tells.
        warn: tells the user.
    """

    def __init__(self, rank: int, warn: Callable[[str], None]) -> None:
        self._rank, self._warn = rank, warn
        self._log_norm = 0.0
        self._smallest: float | None = None
        self._above = self._useless = 0
        self._warned_divergence = self._warned_sparse = rank > 0
        self._warned_non_finite = False
        self._dropped = False  # something of this rank since the last round

    def see(self, round_number: int, norm: float, count: int, working: bool, learning_rate: float) -> None:
        """A round was applied: the norm of its mean gradient, over how many samples, and whether there is more data."""
        if count == 0 or not isfinite(norm):
            self._dropped = self._dropped or count > 0
            self._see_useless(round_number, working)
            return
        self._useless = 0
        if norm > 0:
            self._see_norm(round_number, log(norm), learning_rate)

    def _see_norm(self, round_number: int, latest: float, learning_rate: float) -> None:
        if self._smallest is None:
            self._smallest = self._log_norm = latest
        self._above = self._above + 1 if latest > self._smallest + log(GROWTH) else 0
        self._log_norm = KEEP * self._log_norm + (1 - KEEP) * latest
        self._smallest = min(self._smallest, self._log_norm)
        if self._above == ROUNDS_ABOVE and not self._warned_divergence:
            self._warned_divergence = True
            self._warn(
                f"Training diverges: in round {round_number} the gradient's norm is {exp(latest):.3g}, "
                f"over {GROWTH:.0f} times the smallest so far ({exp(self._smallest):.3g}), with the "
                f"learning rate {learning_rate:g}. Probably that is too high. Stop, and take a third of it, or clip: "
                "run.optimizer(..., clip_norm=1.0)."
            )

    def _see_useless(self, round_number: int, working: bool) -> None:
        """A round of nothing may also be one of ranks that have no data, until they get what a lost one has left."""
        self._useless = self._useless + self._dropped if working else 0
        self._dropped = False
        if self._useless >= USELESS_ROUNDS:
            raise PacelineError(
                f"Training has diverged: no rank has brought one finite gradient in the last {USELESS_ROUNDS} rounds.",
                where=f"round {round_number}",
                cause="Probably the parameters are NaN or infinite: the learning rate is too high, or a loss "
                "overflows.",
                remedy="Start again from the last checkpoint (run.resume()) with a lower learning rate.",
            )

    def dropped(self) -> None:
        """What would have come here was dropped by the rank that had it, or was refused."""
        self._dropped = True

    def non_finite(self, count: int, round_number: int) -> None:
        """This rank's contribution had NaN or infinity in it and was dropped."""
        self.dropped()
        if not self._warned_non_finite:
            self._warned_non_finite = True
            self._warn(
                f"Rank {self._rank} dropped {count} samples of round {round_number}: their gradient has NaN or "
                "infinity. Further ones are dropped and counted silently. Probably the learning rate is too high, or "
                "the data has non-finite values; with float16 use a GradScaler."
            )

    def sparse(self, dense_bytes: int, of_bytes: int) -> None:
        """A sparse gradient was added up in dense memory of so many bytes, out of those of a whole contribution."""
        if not self._warned_sparse:
            self._warned_sparse = True
            self._warn(
                f"Sparse gradients become dense before they leave a rank: {dense_bytes / 1e6:,.1f} MB of the "
                f"{of_bytes / 1e6:,.1f} MB that each rank brings to a round, however few rows of the table its samples "
                "touch. If communication takes too long, have fewer rounds (local-sgd, or more micro-batches a round)."
            )
