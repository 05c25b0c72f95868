"""The samples of a run, as its service keeps them: the ledger, what it was opened with, and whose are in doubt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.control.doubt import Doubts
from paceline.control.ledger import Ledger
from paceline.control.messages import Metadata, to_ranges, to_spans
from paceline.control.wire import Frame
from paceline.errors import PacelineError


class Samples:
    """A ledger that the first rank opens and all agree on.

    Args:
        ranks: that share the work.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._ledger: Ledger | None = None
        self._terms: Metadata = {}
        self._doubts = Doubts()

    def open(self, rank: int, terms: Metadata) -> None:
        """Raises unless all ranks say the same of their data."""
        if self._ledger is None:
            self._begin(terms)
        for field, value in terms.items():
            if value != self._terms[field]:
                raise PacelineError(
                    f"Rank {rank} opens the data with {field} = {str(value)[:200]}, but another rank said "
                    f"{str(self._terms[field])[:200]}.",
                    remedy="Give every rank the same data, epochs, micro-batch and checkpoint.",
                )

    def _begin(self, terms: Metadata) -> None:
        data = (terms["samples"], terms["epochs"], terms["micro_batch"])
        self._ledger = Ledger(*data, workers=self._ranks, used=to_ranges(terms["used"]))
        self._terms = terms

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            raise PacelineError("No rank has opened the data yet.", remedy="Make the loader before asking for samples.")
        return self._ledger

    def lease(self, rank: int, micro_batches: int) -> Frame:
        leases = self.ledger.lease(rank, micro_batches)
        return Frame("leased", {"ranges": to_spans(leases), "complete": self.ledger.complete})

    def settled_by(self, samples: Sequence[int]) -> Frame:
        """What a checkpoint at this progress has settled."""
        self.ledger.settle(samples)
        return Frame("ranges", {"ranges": to_spans(self.ledger.settled)})

    # ---- who is gone

    def heard(self, rank: int, samples: Sequence[int], generation: int) -> None:
        """A rank tells how far all have come, knowing of that generation."""
        self.ledger.settle(samples)
        self._release(self._doubts.heard(rank, generation))

    def lost(self, rank: int, generation: int, witnesses: Iterable[int]) -> None:
        self._release(self._doubts.lost(rank, generation, witnesses))

    def left(self, rank: int) -> None:
        """After telling all that it knew."""
        self._release([rank, *self._doubts.gone(rank)])

    def _release(self, ranks: Iterable[int]) -> None:
        for rank in ranks if self._ledger is not None else []:
            self.ledger.release(rank)

    # ---- for reports, and for a journal

    @property
    def counters(self) -> Metadata | None:
        return None if self._ledger is None else dict(self._ledger.counters)

    @property
    def held(self) -> dict[str, int]:
        return {} if self._ledger is None else self._ledger.held

    @property
    def progress(self) -> dict[str, int]:
        return {} if self._ledger is None else self._ledger.progress

    def state(self) -> dict[str, Any]:
        """As JSON can carry it."""
        ledger = None if self._ledger is None else self._ledger.state()
        return {"terms": self._terms, "ledger": ledger, "doubts": self._doubts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        if state["ledger"] is not None:
            self._begin(state["terms"])
            self.ledger.restore(state["ledger"])
        self._doubts.restore(state["doubts"])
