"""The one record of what happened. Progress, report, trace and race all read it; both backends write it.

Every event is a flat dictionary with `kind`, `rank` and `t` (seconds since the run began, wall or virtual):

| kind     | further fields                | meaning                                                              |
|----------|-------------------------------|----------------------------------------------------------------------|
| start    | pid                           | the rank is ready for its first micro-batch                          |
| compute  | end, samples                  | one micro-batch was computed from `t` to `end`                       |
| join     | round, samples, bytes         | the rank started the collective of the round with so many samples    |
| wait     | end, round                    | the rank stood still from `t` to `end` for the round's collective    |
| applied  | round, samples, own           | a step over `samples` of all ranks, `own` of them this rank's        |
| step     | round, samples, bytes         | a step of this rank alone, its own round; bytes sent since the last  |
|          | of, delay                     | of a server: whose samples, and steps since that worker's parameters |
| discard  | samples, reason               | computed, but not used                                               |
| noise    | round, squared_norm, variance | estimates of |g|² and of the trace of one sample's covariance        |
| metric   | samples, metric, loss         | held-out metric and loss of a snapshot taken at `t`                  |
| warning  | text                          | something is wrong, and the user should know                         |
| note     | text                          | what was decided, and why                                            |
| lost     | reason                        | the rank is lost, and the others go on; told by one of them          |
| end      |                               | the rank is done                                                     |

`applied` and `step` may have a `delay`: how many steps the parameters had made since they were read for this gradient.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from paceline.errors import PacelineError

Event = dict[str, Any]

FLUSH_SECONDS = 0.2
"""Often enough for a live display, rare enough that writing costs nothing. A killed process loses no more than this."""

logger = logging.getLogger("paceline")


class Recorder(Protocol):
    """Where a rank's events go. Writing never blocks training."""

    def write(self, kind: str, rank: int, t: float, **fields: Any) -> None: ...


class MemoryRecorder:
    """Keeps the events in a list, for the simulator and for tests.

    >>> recorder = MemoryRecorder()
    >>> recorder.write("compute", 0, 1.0, end=1.5, samples=32)
    >>> recorder.events
    [{'kind': 'compute', 'rank': 0, 't': 1.0, 'end': 1.5, 'samples': 32}]
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, kind: str, rank: int, t: float, **fields: Any) -> None:
        self.events.append({"kind": kind, "rank": rank, "t": t, **fields})


class FileRecorder:
    """Appends one rank's events to `folder/rank-0003.jsonl`; a thread of its own does all that may take time.

    A folder holds one run, so a file that is already there is begun anew, unless the rank `joins` a running training:
    then it is gone on with. That the folder cannot be written to at the start is an error: nothing is lost yet. Later
    trouble (a full disk) is logged once, and what could not be written is counted in `dropped`: a training of days must
    not end because its diary did.
    """

    def __init__(self, folder: Path | str, rank: int, joins: bool = False) -> None:
        self.path = Path(folder) / f"rank-{rank:04d}.jsonl"
        self.dropped = 0
        self._pending: deque[Event] = deque()
        self._recording = True
        self._closing = threading.Event()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self.path.open("ab" if joins else "wb")
        except OSError as error:
            raise PacelineError(
                f"The events of rank {rank} cannot be written: {error.strerror}.",
                where=str(self.path),
                remedy="Give a folder that this user may write to.",
            ) from error
        self._thread = threading.Thread(target=self._keep_flushing, name=f"paceline-record-{rank}", daemon=True)
        self._thread.start()

    def write(self, kind: str, rank: int, t: float, **fields: Any) -> None:
        if self._recording:
            self._pending.append({"kind": kind, "rank": rank, "t": t, **fields})
        else:
            self.dropped += 1

    def close(self) -> None:
        """Write what is left. Raises nothing: the training's result matters more than its record."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._recording = False
            with contextlib.suppress(OSError):  # whatever stays unwritten has been reported by the thread
                self._file.close()

    def __enter__(self) -> FileRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep_flushing(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        lines = []
        while self._pending:
            # `default=str`: a stray value that JSON does not know must cost its own readability and nothing else
            lines.append(json.dumps(self._pending.popleft(), separators=(",", ":"), default=str))
        if not lines:
            return
        if self._recording:
            try:
                self._file.write(("\n".join(lines) + "\n").encode())
                self._file.flush()
                return
            except OSError as error:
                self._recording = False  # the file may end in half a line now: nothing may follow it
                logger.warning("No more events are recorded in %s: %s. Training goes on.", self.path, error)
        self.dropped += len(lines)


class Follower:
    """Reads a run's events while they are being written; see `follow`."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._offsets: dict[Path, int] = {}

    def new_events(self) -> list[Event]:
        """What all ranks have written since the last call, in (t, rank) order.

        A damaged line is passed over: a display must go on. `read_events` is the one that names it.
        """
        events: list[Event] = []
        for path in _files(self._folder):
            for line in self._new_lines(path):
                with contextlib.suppress(ValueError):
                    events.append(_parsed(line))
        return sorted(events, key=_order)

    def _new_lines(self, path: Path) -> list[bytes]:
        offset = self._offsets.get(path, 0)
        try:
            if path.stat().st_size < offset:  # the rank began its file anew
                offset = 0
            with path.open("rb") as file:
                file.seek(offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:  # the file was taken away, or is not ours to read yet
            return []
        self._offsets[path] = offset + len(whole) + len(newline)
        return whole.splitlines()


def follow(folder: Path | str) -> Follower:
    """Follow a run's folder of events. Files, and the folder itself, may appear later."""
    return Follower(folder)


def read_events(folder: Path | str) -> list[Event]:
    """All events of a run in (t, rank) order.

    A last line without its end is still being written, or was when the process died, and is left out. A damaged line
    before it means that the record cannot be trusted, and is an error that names the file and the line.
    """
    events: list[Event] = []
    for path in _files(Path(folder)):
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                events.append(_parsed(line))
            except ValueError as error:
                raise PacelineError(
                    "A line of the run's record is damaged.",
                    where=f"{path}:{number}",
                    cause=f"It is not an event ({error}).",
                    remedy="If the disk was full or the file was edited, remove this line and read it again.",
                ) from error
    return sorted(events, key=_order)


def write_events(folder: Path | str, events: Iterable[Event]) -> None:
    """Put the events of a simulated run where those of a real one are."""
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event["rank"], []).append(event)
    for rank, own in by_rank.items():  # one after the other: thousands of ranks would be too many open files
        with FileRecorder(folder, rank) as recorder:
            for event in own:
                recorder.write(**event)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.jsonl"))


def _parsed(line: bytes) -> Event:
    event = json.loads(line)
    if not isinstance(event, dict):
        raise ValueError("no JSON object")
    for name, kinds in (("kind", str), ("rank", int), ("t", (int, float))):
        if not isinstance(event.get(name), kinds):
            raise ValueError(f"no {name}")
    return event


def _order(event: Event) -> tuple[float, int]:
    return event["t"], event["rank"]
