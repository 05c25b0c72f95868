"""What happened: totals for each rank always, single events only for a recorder.

A run with thousands of workers has millions of events; their sums cost a few additions each.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.record import Recorder


@dataclass(slots=True)
class Totals:
    """One rank's run. Seconds are virtual; `nbytes` is what it gave to collectives and messages. It waits for other
    ranks, and, once all have joined a collective, for the network: that part of `waiting` is `communicating`."""

    computing: float = 0.0
    waiting: float = 0.0
    communicating: float = 0.0
    micro_batches: int = 0
    samples: int = 0
    applied: int = 0
    discarded: int = 0
    nbytes: int = 0
    ended: float = 0.0


class Trace:
    """Adds up, and passes every event on if somebody records."""

    def __init__(self, ranks: int, recorder: Recorder | None = None) -> None:
        self.ranks = [Totals() for _ in range(ranks)]
        self._recorder = recorder

    def start(self, rank: int, t: float) -> None:
        if self._recorder is not None:
            self._recorder.write("start", rank, t, pid=0)  # no process of its own; a real one would spoil the replay

    def compute(self, rank: int, t: float, end: float, samples: int) -> None:
        totals = self.ranks[rank]
        totals.computing += end - t
        totals.micro_batches += 1
        totals.samples += samples
        if self._recorder is not None:
            self._recorder.write("compute", rank, t, end=end, samples=samples)

    def join(self, rank: int, t: float, round_number: int, samples: int, nbytes: int) -> None:
        if self._recorder is not None:
            self._recorder.write("join", rank, t, round=round_number, samples=samples, bytes=nbytes)

    def wait(self, rank: int, t: float, end: float, joined: float, round_number: int | None) -> None:
        """The rank stood still for what all ranks had joined at `joined`. The record knows only waits for a round."""
        totals = self.ranks[rank]
        totals.waiting += end - t
        totals.communicating += max(end - max(t, joined), 0.0)
        if self._recorder is not None and round_number is not None:
            self._recorder.write("wait", rank, t, end=end, round=round_number)

    def applied(self, rank: int, t: float, round_number: int, samples: int, own: int) -> None:
        self.ranks[rank].applied += own
        if self._recorder is not None:
            self._recorder.write("applied", rank, t, round=round_number, samples=samples, own=own)

    def step(self, rank: int, t: float, round_number: int, samples: int, nbytes: int) -> None:
        self.ranks[rank].applied += samples
        if self._recorder is not None:
            self._recorder.write("step", rank, t, round=round_number, samples=samples, bytes=nbytes)

    def step_for(
        self, rank: int, t: float, round_number: int, samples: int, nbytes: int, worker: int, delay: int
    ) -> None:
        """A server's step with a worker's samples."""
        self.ranks[worker].applied += samples
        if self._recorder is not None:
            facts = {"round": round_number, "samples": samples, "bytes": nbytes, "of": worker, "delay": delay}
            self._recorder.write("step", rank, t, **facts)

    def discard(self, rank: int, t: float, samples: int, reason: str) -> None:
        self.ranks[rank].discarded += samples
        if self._recorder is not None:
            self._recorder.write("discard", rank, t, samples=samples, reason=reason)

    def say(self, kind: str, rank: int, t: float, text: str) -> None:
        """A `warning` or a `note` to the user."""
        if self._recorder is not None:
            self._recorder.write(kind, rank, t, text=text)

    def noise(self, rank: int, t: float, round_number: int, squared_norm: float, variance: float) -> None:
        if self._recorder is not None:
            self._recorder.write("noise", rank, t, round=round_number, squared_norm=squared_norm, variance=variance)

    def lost(self, rank: int, t: float, reason: str) -> None:
        if self._recorder is not None:
            self._recorder.write("lost", rank, t, reason=reason)

    def end(self, rank: int, t: float) -> None:
        self.ranks[rank].ended = t
        if self._recorder is not None:
            self._recorder.write("end", rank, t)
