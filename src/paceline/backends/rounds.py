"""What ranks tell each other along with the sums of a round, and what a round is to the user's loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.node import Gradient

FLAGS = 3  # a wish for a checkpoint, a scheduler's step, a newcomer that waits
PLACES = 5  # of each rank: samples settled, in two parts, samples dropped, its note, and that it took part
WHOLE = 2**20  # float32 counts up to 2²⁴: between two rounds of all a rank may settle more


@dataclass(frozen=True)
class RoundNews:
    """A round is over. `before`, `after`: samples applied, which never go back. `number`: of a round of all ranks, the
    same on all; None of a step alone. Whether a rank wants a checkpoint, has called a scheduler, or knows of a newcomer
    that waits to take part."""

    before: int
    after: int
    number: int | None = None
    saving: bool = False
    scheduler_called: bool = False
    joining: bool = False


class RoundTotal(Gradient):
    """The gradient of a whole round, and what else travelled with it: whether a rank has data left, whether one wants
    a checkpoint or has called a scheduler, how many samples each rank has settled, and each rank's note. Totals of
    several rounds can be added up and applied in one step; `parts` are the rounds, with their samples and this rank's
    own. A mean of models (`own` is None) is over no samples."""

    __slots__ = ("dropped", "joining", "of_models", "parts", "saving", "scheduler_called", "settled", "working")

    def __init__(
        self, gradient: Gradient, round_number: int, own: int | None, working: bool, extra: list[float]
    ) -> None:
        super().__init__(gradient.values, gradient.count)
        self.of_models, self.working = own is None, working
        self.parts = [(round_number, 0, 0) if own is None else (round_number, gradient.count, own)]
        self.saving, self.scheduler_called, self.joining = extra[0] > 0, extra[1] > 0, extra[2] > 0
        places = len(extra[FLAGS:]) // PLACES
        blocks = [extra[FLAGS + place * places : FLAGS + (place + 1) * places] for place in range(PLACES)]
        self.settled = [int(low) + WHOLE * int(high) for low, high in zip(blocks[0], blocks[1], strict=True)]
        self.dropped, self.notes = int(sum(blocks[2])), tuple(blocks[3])
        self.ranks = tuple(rank for rank, there in enumerate(blocks[4]) if there)

    def __iadd__(self, other: Gradient) -> Gradient:
        assert isinstance(other, RoundTotal)
        super().__iadd__(other)
        self.parts += other.parts
        self.working, self.notes, self.ranks = other.working, other.notes, other.ranks
        self.saving, self.scheduler_called = (
            self.saving or other.saving,
            self.scheduler_called or other.scheduler_called,
        )
        self.joining = self.joining or other.joining
        self.dropped += other.dropped
        self.settled = [mine + more for mine, more in zip(self.settled, other.settled, strict=True)]
        return self


def extra_numbers(world_size: int) -> int:
    """How many numbers a rank adds to a contribution: the flags, and its places."""
    return FLAGS + PLACES * world_size


def extra_of(rank: int, world_size: int, facts: tuple[int, int, float]) -> list[float]:
    """What a rank adds, without flags: samples settled, of those the ones dropped in steps alone, and its note."""
    settled, dropped, note = facts
    extra = [0.0] * extra_numbers(world_size)
    for place, value in enumerate((*_two_parts(settled), dropped, note, 1)):
        extra[FLAGS + place * world_size + rank] = float(value)
    return extra


def settled_by_others(extra: list[float], world_size: int, settled: Mapping[int, int]) -> list[float]:
    """The same, with samples that lost ranks had settled: who knows of them tells it for them."""
    told = list(extra)
    for rank, samples in settled.items():
        for place, value in enumerate(_two_parts(samples)):
            told[FLAGS + place * world_size + rank] = float(value)
    return told


def _two_parts(settled: int) -> tuple[int, int]:
    high, low = divmod(settled, WHOLE)
    return low, high
