"""The control service in a child process, which is started again if it dies."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from paceline.errors import PacelineError

MOST_RESTARTS = 5  # of one run: whatever ends it more often than that is no accident
PAUSE = 0.2  # seconds before the second restart, and twice as long before each further one
log = logging.getLogger("paceline")


class HostedService:
    """A control service that lives as long as this process, and until the other ranks have left.

    Args:
        world_size: ranks of the run.
        secret: of the run.
        host: the address to listen on.
        folder: of the run; the service's journal is kept there while it runs.
        port: 0 takes any free one.
        timeouts: see `ControlService`.
    """

    def __init__(
        self, world_size: int, secret: bytes, host: str, folder: Path, port: int = 0, **timeouts: float
    ) -> None:
        self._journal = folder / "control.journal"
        settings = {"world_size": world_size, "secret": secret.hex(), "journal": str(self._journal)}
        self._settings: dict[str, Any] = {**settings, "host": host, "port": port, **timeouts}
        self._lock = threading.Lock()
        self._closing = False
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, name="paceline-hosting", daemon=True)
        self._watcher.start()

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-m", "paceline.control"], stdin=pipe, stdout=pipe, text=True)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(self._settings) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or "{}")
        except OSError:
            answer = {}
        if "address" not in answer:
            _end(process)
            raise PacelineError(answer.get("error", "The control service did not start."))
        host, port = answer["address"]
        self.address: tuple[str, int] = (host, port)
        self._settings["port"] = port  # the same, if it has to be started again
        return process

    def _watch(self) -> None:
        restarts = 0
        while True:
            code = self._process.wait()
            with self._lock:
                if self._closing:
                    return
                if restarts == MOST_RESTARTS:
                    log.error("The control service ended again (%d), and is not started any more.", code)
                    return
                restarts += 1
                log.warning("The control service ended (%d) and is started again.", code)
                try:
                    ended, self._process = self._process, self._start()
                    _end(ended)
                except PacelineError as error:
                    log.error("The control service cannot be started again: %s", error)
                    return
            time.sleep(PAUSE * 2**restarts)

    def close(self) -> None:
        """Let it go; it ends by itself when the last rank has left."""
        with self._lock:
            self._closing = True
        _end(self._process)
        self._watcher.join()
        self._journal.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()
