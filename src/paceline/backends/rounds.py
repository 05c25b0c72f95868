"""What ranks tell each other along with the sums of a round, and what a round is to the user's loop."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.node import Gradient

FLAGS = 2  # a wish for a checkpoint, a scheduler's step


@dataclass(frozen=True)
class RoundNews:
    """A round is over. `number`: of one of all ranks, the same on all; None of a step alone. `before`: samples applied
    until then. Whether a rank wants a checkpoint, and whether one has called a scheduler."""

    number: int | None
    before: int
    saving: bool = False
    scheduler_called: bool = False


class RoundTotal(Gradient):
    """The gradient of a whole round, and what else travelled with it: whether a rank has data left, whether one wants
    a checkpoint or has called a scheduler, how many samples each rank has settled, and each rank's note. Totals of
    several rounds can be added up and applied in one step; `parts` are the rounds, with their samples and this rank's
    own. A mean of models (`own` is None) is over no samples."""

    __slots__ = ("of_models", "parts", "saving", "scheduler_called", "settled", "working")

    def __init__(
        self, gradient: Gradient, round_number: int, own: int | None, working: bool, extra: list[float]
    ) -> None:
        super().__init__(gradient.values, gradient.count)
        self.of_models, self.working = own is None, working
        self.parts = [(round_number, 0, 0) if own is None else (round_number, gradient.count, own)]
        ranks = (len(extra) - FLAGS) // 2
        self.saving, self.scheduler_called = extra[0] > 0, extra[1] > 0
        self.settled, self.notes = extra[FLAGS : FLAGS + ranks], tuple(extra[FLAGS + ranks :])

    def __iadd__(self, other: Gradient) -> Gradient:
        assert isinstance(other, RoundTotal)
        super().__iadd__(other)
        self.parts += other.parts
        self.working, self.notes = other.working, other.notes
        self.saving, self.scheduler_called = (
            self.saving or other.saving,
            self.scheduler_called or other.scheduler_called,
        )
        self.settled = [mine + more for mine, more in zip(self.settled, other.settled, strict=True)]
        return self


def extra_numbers(world_size: int) -> int:
    """How many numbers a rank adds to a contribution: the flags, and two places a rank."""
    return FLAGS + 2 * world_size
