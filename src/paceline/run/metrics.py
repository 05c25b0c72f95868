"""Feeds the callbacks of a run from its record: a few additions an event, and all else on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import tomli_w

from paceline.callbacks import Callback, Scalars
from paceline.record import Event, FileRecorder

FAREWELL_SECONDS = 10.0  # for whatever a service still has to send when the training is over

log = logging.getLogger("paceline")


class Feed:
    """A recorder that writes to the rank's file and tells callbacks.

    Args:
        recorder: of the rank.
        callbacks: that are told, in this order.
        info: for their `begin`.
        applied: samples over all ranks so far.
    """

    def __init__(
        self, recorder: FileRecorder, callbacks: Sequence[Callback], info: dict[str, Any], applied: Callable[[], int]
    ) -> None:
        self._recorder, self._callbacks = recorder, list(callbacks)
        self._scalars = Scalars(applied)
        self._calls: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
        self._calls.put(("begin", (info,)))
        self._thread = threading.Thread(target=self._keep_calling, name="paceline-callbacks", daemon=True)
        self._thread.start()

    def write(self, kind: str, rank: int, t: float, **fields: Any) -> None:
        self._recorder.write(kind, rank, t, **fields)
        event: Event = {"kind": kind, "rank": rank, "t": t, **fields}
        told = self._scalars.see(event)
        if told is not None:
            self._calls.put(("scalars", told))

    def close(self, error: str) -> None:
        """Say the last things; whoever does not hear them in time is left behind."""
        self._calls.put(("end", (self._scalars.summary(error),)))
        self._thread.join(FAREWELL_SECONDS)
        if self._thread.is_alive():
            log.warning("A callback of the run did not end within %g s; it is left behind.", FAREWELL_SECONDS)

    def _keep_calling(self) -> None:
        name = ""
        while name != "end":
            name, arguments = self._calls.get()
            for callback in list(self._callbacks):
                try:
                    getattr(callback, name)(*arguments)
                except Exception as error:  # a training of days must not end because somebody's service did
                    self._callbacks.remove(callback)
                    kind = type(callback).__name__
                    log.warning("%s.%s failed and is not called again: %s. Training goes on.", kind, name, error)


def write_settings(folder: Path, info: dict[str, Any]) -> None:
    """`config.toml` in the run's folder. TOML knows no null, so what is not set is left out."""
    kept: dict[str, Any] = {}
    for name, value in info.items():
        if isinstance(value, dict):
            kept[name] = {key: each for key, each in value.items() if each is not None}
        elif value is not None and name != "folder":  # a folder may be moved
            kept[name] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(tomli_w.dumps(kept), encoding="utf-8")
