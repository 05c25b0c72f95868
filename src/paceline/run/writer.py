"""Writes checkpoints while training goes on: one at a time, on a thread of its own.

What it is given is a snapshot, taken between two rounds in memory of its own. A disk that is full, or slow, or gone is
no reason to end a training of days, so a failure is told and the run goes on; the last checkpoint is another matter,
because nothing comes after it.
"""

from __future__ import annotations

import threading
from pathlib import Path

from paceline.errors import PacelineError
from paceline.run import checkpoint
from paceline.run.checkpoint import Checkpoint


class Writer:
    """The checkpoints of one run on their way to the disk.

    Args:
        folder: of the checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self.failure: PacelineError | None = None
        """Of the last checkpoint, if it could not be written."""

    def start(self, round_number: int, snapshot: Checkpoint) -> None:
        """Begin to write; the one before must be through: see `wait`. Not a daemon: an interpreter that ends waits
        for it."""
        self.failure = None
        work = (round_number, snapshot)
        self._thread = threading.Thread(target=self._write, args=work, name="paceline-checkpoint")
        self._thread.start()

    def _write(self, round_number: int, snapshot: Checkpoint) -> None:
        try:
            checkpoint.write(self._folder, round_number, snapshot)
        except PacelineError as error:
            self.failure = error
        except Exception as error:  # whatever it is, whoever waits for the checkpoint must hear of it
            self.failure = PacelineError(
                f"The checkpoint of round {round_number} could not be written: {type(error).__name__}: {error}.",
                where=str(self._folder),
                cause="The checkpoints before it are whole.",
            )

    def wait(self) -> None:
        """Until all that was started is on the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
