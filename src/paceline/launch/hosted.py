"""The control service in a child process of rank 0."""

from __future__ import annotations

import json
import subprocess
import sys

from paceline.errors import PacelineError


class HostedService:
    """A control service that lives as long as this process, and until the other ranks have left.

    Args:
        world_size: ranks of the run.
        secret: of the run.
        host: the address to listen on.
        join_timeout: seconds to wait for every rank to arrive.
    """

    def __init__(self, world_size: int, secret: bytes, host: str, join_timeout: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.control"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        settings = {"world_size": world_size, "secret": secret.hex(), "host": host, "join_timeout": join_timeout}
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(settings) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline() or "{}")
        except OSError:
            answer = {}
        if "address" not in answer:
            self.close()
            raise PacelineError(answer.get("error", "The control service did not start."))
        host, port = answer["address"]
        self.address: tuple[str, int] = (host, port)

    def close(self) -> None:
        """Let it go; it ends by itself when the last rank has left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
