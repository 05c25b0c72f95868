"""A rank's line to the control service, which may die and be started again.

Messages are numbered and kept until the service is known to have heard them. When the line breaks, its owner connects
to the service that was started in place of the old one, says who it is, and repeats what was kept, in order; the
service knows from its journal what of it has taken effect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from paceline.control.connection import Address, Connection, connect
from paceline.control.messages import Metadata
from paceline.control.wire import Frame, WireError
from paceline.errors import PacelineError

RETRY_SECONDS = 0.05  # between two attempts to reach a service that is being started again


class Line:
    """Numbered messages over one connection after another.

    Args:
        address, secret: of the service.
        connect_seconds: how long to try while nobody listens yet.
    """

    def __init__(self, address: Address, secret: bytes, connect_seconds: float) -> None:
        self._address, self._secret = address, secret
        self.connection = _connect_patiently(address, secret, connect_seconds)
        self._order = threading.Lock()  # messages are sent, and sent again, in the order of their numbers
        self._number = 0
        self._kept: dict[int, Frame] = {}
        self._asked: set[int] = set()  # of those kept, the ones that get an answer
        self._incarnation = 0
        self.introduction: Metadata | None = None
        """Who is at this end, as the service knows it; None before the hello."""
        self.return_seconds = 0.0
        """How long to look for a service in place of the one that is gone."""

    def agree(self, terms: Metadata) -> None:
        """What the service's greeting says of its coming back."""
        self._incarnation, self.return_seconds = terms["incarnation"], float(terms["return_seconds"])

    @property
    def unheard(self) -> int:
        """How many messages may have to be repeated."""
        return len(self._kept)

    def say(self, frame: Frame, *, asks: bool, register: Callable[[int], None]) -> None:
        """Send it with the next number, of which `register` is told before. Raises `OSError` if the line is broken and
        the service does not return; if it may, the message waits for it."""
        with self._order:
            register(self._number + 1)
            self._number += 1
            numbered = self._kept[self._number] = replace(frame, sequence=self._number)
            if asks:
                self._asked.add(self._number)
            try:
                self.connection.send(numbered)
            except OSError:
                self.connection.close()  # half of it may be sent: then nothing may follow
                if not self.return_seconds:
                    raise

    def answered(self, number: int) -> None:
        """The service has answered this one, and so has heard all before it. Of those, the ones that are answered
        later (it may have to wait) are still kept."""
        self._asked.discard(number)
        for each in [each for each in list(self._kept) if each <= number and each not in self._asked]:
            self._kept.pop(each, None)

    def come_back(self, take: Callable[[Frame], None], closing: threading.Event) -> str:
        """Look for the service in place of the one that is gone; why there is none, or an empty string.

        Args:
            take: is given the news that the service has for us.
            closing: set when nobody wants the line any more.
        """
        self.connection.close()
        deadline = time.monotonic() + self.return_seconds
        while time.monotonic() < deadline and not closing.wait(RETRY_SECONDS):
            try:
                connection = connect(self._address, self._secret)
            except OSError:
                continue  # not up yet
            except PacelineError as error:
                return str(error)
            try:
                return self._resume(connection, take, closing)
            except (OSError, WireError):
                connection.close()  # gone again
            except PacelineError as error:
                connection.close()
                return str(error)
        return f"it did not come back within {self.return_seconds:g} s" if self.return_seconds else "it is gone"

    def _resume(self, connection: Connection, take: Callable[[Frame], None], closing: threading.Event) -> str:
        terms = connection.receive().metadata
        if terms["incarnation"] == self._incarnation:
            connection.close()
            return "it has let this rank go"
        with self._order:
            if self.introduction is not None:
                connection.send(Frame("return", self.introduction))
                while (news := connection.receive()).kind not in ("returned", "error"):
                    take(news)
                if news.kind == "error":
                    raise PacelineError(**news.metadata)
                for number in news.metadata["rounds"]:
                    take(Frame("signalled", {"round": number}))
            for frame in list(self._kept.values()):
                connection.send(frame)
            self.connection, self._incarnation = connection, terms["incarnation"]
        if closing.is_set():  # whoever closes closes the connection that it finds
            connection.close()
        return ""


def _connect_patiently(address: Address, secret: bytes, seconds: float) -> Connection:
    deadline, pause = time.monotonic() + seconds, 0.02
    while True:
        try:
            return connect(address, secret)
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise PacelineError(
                    f"Nobody answers at {address[0]}:{address[1]}: {error.strerror or error}.",
                    cause="The control service (in the launcher or in rank 0) does not run, or a firewall is between.",
                    remedy="Check that it is up and that address and port are right.",
                ) from error
        time.sleep(pause)
        pause = min(1.0, 2 * pause)
