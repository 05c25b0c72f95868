"""What the control plane has been told, on disk: a service that was killed begins again where it ended.

A line for each message that changes something, written before it takes effect and before anybody is answered:

    crc32 (8 hexadecimal digits) | JSON: [rank, kind, metadata, sequence, buffers in base64]

The handlers are deterministic, so that playing the lines gives the state back, and the answers too. From time to time
the whole state replaces the lines, in a new file that is renamed over the old one; the first line then is
[null, "state", state, 0, []]. A line cut off at the end is what the process died in: nobody was answered, and the
asker asks again. Any other damage is an error: with a hole in it the account of the samples would be wrong.

The lines are handed to the operating system at once, which outlives the process; a machine that fails takes its ranks
with it, so that nothing is gained by waiting for the disk. Only the file that replaces another is synced.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.control.wire import Frame
from paceline.errors import PacelineError

STATE = "state"
LINES = 20_000  # then the state replaces them: half a second to play, 3 MB
log = logging.getLogger("paceline.control")


@dataclass(frozen=True)
class Entry:
    """One line: what a rank has said, or (`kind` is no message's) what the service itself found."""

    rank: int | None
    frame: Frame


class Journal:
    """An append-only file.

    Args:
        path: of the file; what is there is read, and goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries, whole = _read(path)
        """What was there; the caller plays it, and may forget it then."""
        self.begun_again = path.exists()
        self._lines = len(self.entries)
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._file, whole)

    def note(self, rank: int | None, frame: Frame, state: Callable[[], Any]) -> None:
        """Before the message takes effect. `state` is asked when the lines have become too many."""
        if self._file is None:
            return
        try:
            if self._lines >= LINES:
                self._replace(state())
            _write(self._file, _line(rank, frame))
            self._lines += 1
        except OSError as error:
            self._give_up(error)

    def _replace(self, state: Any) -> None:
        aside = self._path.with_name(f".{self._path.name}.writing")
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write(file, _line(None, Frame(STATE, {STATE: state})))
            os.fsync(file)
            aside.replace(self._path)
        except OSError:
            os.close(file)
            raise
        old, self._file, self._lines = self._file, file, 1
        if old is not None:
            os.close(old)

    def _give_up(self, error: OSError) -> None:
        """A journal with a hole would be worse than none."""
        self.close()
        self._path.unlink(missing_ok=True)
        log.warning(
            "The control plane's journal cannot be written: %s. Training goes on, but could not if this process died.",
            error.strerror or error,
        )

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]


def _line(rank: int | None, frame: Frame) -> bytes:
    buffers = [base64.b64encode(buffer).decode() for buffer in frame.buffers]
    text = json.dumps([rank, frame.kind, frame.metadata, frame.sequence, buffers], separators=(",", ":")).encode()
    return b"%08x%s\n" % (zlib.crc32(text), text)


def _read(path: Path) -> tuple[list[Entry], int]:
    """The entries, and how many bytes of the file are whole."""
    content = path.read_bytes() if path.exists() else b""
    entries, whole = [], 0
    for number, line in enumerate(content.splitlines(keepends=True)):
        if not line.endswith(b"\n"):
            break  # what the process died in
        try:
            if int(line[:8], 16) != zlib.crc32(line[8:-1]):
                raise ValueError("its checksum differs")
            rank, kind, metadata, sequence, buffers = json.loads(line[8:])
            pieces = [memoryview(base64.b64decode(each)) for each in buffers]
        except (ValueError, TypeError) as error:
            raise PacelineError(
                f"The control plane's journal is damaged: {error}.",
                where=f"{path}, line {number + 1}",
                cause="Which samples are used, and by whom, cannot be known any more.",
                remedy="Start the run again from its last checkpoint.",
            ) from error
        entries.append(Entry(rank, Frame(kind, metadata, pieces, sequence=sequence)))
        whole += len(line)
    return entries, whole
