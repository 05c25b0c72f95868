"""One rank's account of samples in a real run: what it has brought to an end, what was dropped, and what all have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.backends.rounds import RoundTotal


class Books:
    """What a rank knows of everybody's samples.

    Args:
        rank, world_size: whose books they are, and how many ranks there are.
        serves: whether the rank is a server: it counts samples of others between two rounds of all.
    """

    def __init__(self, rank: int, world_size: int, serves: bool) -> None:
        self._rank, self._serves = rank, serves
        self.progress = [0] * world_size
        """Samples that each rank has brought to an end, over all rounds."""
        self.applied = self.resumed = 0
        """Samples that the parameters are the result of; and those that they were when the run was resumed."""
        self._furthest = 0
        self._common = [0] * world_size  # progress after the last round of all
        self._discarded = 0  # samples, since the last contribution or step alone
        self._alone = 0  # samples settled by this rank alone, since the last round of all
        self._dropped_alone = 0  # of those, the ones that were discarded
        self._dropped = 0  # by all ranks in steps alone, until the last round of all

    def make_room(self, seats: int) -> None:
        """So many ranks may take part from now on."""
        more = [0] * (seats - len(self._common))
        self.progress, self._common = self.progress + more, self._common + more

    def go_on_from(self, progress: Mapping[int, int]) -> None:
        """The successors of these ranks count on from there: of what those had settled alone, others have heard more or
        less."""
        for rank, settled in progress.items():
            self.progress[rank] = self._common[rank] = max(self._common[rank], settled)

    def discard(self, samples: int) -> None:
        """Computed and not used: this rank's next contribution settles them."""
        self._discarded += samples

    def settle(self, samples: int) -> int:
        """This rank has brought so many to an end by itself; with what it has discarded, how many these are."""
        settled, self._discarded = samples + self._discarded, 0
        self._alone += settled
        self._dropped_alone += settled - samples
        self.progress[self._rank] += settled
        return settled

    def take_back(self, samples: int) -> None:
        """So many that were settled were not used after all."""
        self._dropped_alone += samples

    def settle_for(self, worker: int, samples: int, handed_in: int) -> None:
        """A server has used so many samples of a worker, which has handed in so many up to these."""
        self.progress[worker] = max(self.progress[worker], handed_in)
        self.applied += samples

    def hear(self, rank: int, settled: int) -> None:
        """What has come from a rank that steps alone is the result of its first so many samples."""
        self.progress[rank] = max(self.progress[rank], settled)

    def settled_since(self, ranks: Iterable[int]) -> dict[int, int]:
        """What these ranks have settled since the last round of all, as far as this rank knows."""
        return {rank: self.progress[rank] - self._common[rank] for rank in ranks}

    def contribute(self, samples: int, of_models: bool) -> tuple[int, int, int]:
        """A round of all begins: what this rank has settled with it, how much of that it knew before, and what it has
        dropped in steps alone."""
        settled = self._discarded + samples
        alone, dropped = self._alone, self._dropped_alone + (self._discarded if of_models else 0)
        self._alone = self._dropped_alone = self._discarded = 0
        return alone + settled, alone, dropped

    def round_applied(self, settled: Sequence[int], total: RoundTotal) -> None:
        """A round of all is applied; `settled`: since the last one, and of this rank itself what is new to it."""
        if not self._serves:
            self._common[self._rank] = self.progress[self._rank]
        self._common = [known + more for known, more in zip(self._common, settled, strict=True)]
        known = self._common if self._serves else self.progress  # of a lost rank more than others may have heard
        self.progress = [max(each) for each in zip(self._common, known, strict=True)]
        self._dropped += total.dropped
        self.applied += sum(count for _, count, _ in total.parts)
        if total.of_models:  # steps alone have guessed
            self.applied = self.resumed + sum(self._common) - self._dropped

    def state(self) -> dict[str, Any]:
        """What all ranks know alike after a round of all."""
        counts = {"applied": self.applied, "resumed": self.resumed, "furthest": self._furthest}
        return {"progress": list(self._common), "dropped": self._dropped, **counts}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`, for a newcomer."""
        self.progress, self._common = list(state["progress"]), list(state["progress"])
        self.applied, self.resumed = state["applied"], state["resumed"]
        self._furthest, self._dropped = state["furthest"], state["dropped"]

    def advance(self, samples: int) -> tuple[int, int]:
        """The parameters are the result of so many samples: from where to where schedules go, which never go back."""
        before = max(self._furthest, self.resumed)
        self._furthest = max(before, samples)
        self.applied = samples
        return before, self._furthest
