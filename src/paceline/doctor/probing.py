"""How fast the way to another machine is, and whether its ports are open: one side listens, the other measures.

Everything goes over the authenticated connections that runs use. A run also needs ports that nobody can name before
(gloo takes any), in both directions; so each side opens one for a moment, on the address of this very connection, and
the other calls it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from paceline.control.connection import Connection, HandshakeError, Listener, connect
from paceline.control.messages import Metadata
from paceline.control.wire import Frame, WireError, error_frame
from paceline.doctor.host import Host
from paceline.errors import PacelineError
from paceline.simulator.network import Network

PAYLOAD_LIMIT = 64 * 2**20
FIRST_BYTES, GROWTH = 2**16, 4
LONG_ENOUGH, ROUND_TRIPS_WITHIN = 0.2, 5  # seconds and round trips, so that TCP has found its pace
ROUND_TRIPS, TRANSFERS = 50, 3
PROBING_SECONDS = 60.0  # for all transfers; a link that needs longer is of no use to a run
EXAMINING_SECONDS = 180.0

Examine = Callable[[str, str | None], Host]
"""Measures this machine with the workload and model of that name."""


class Responder:
    """The side that listens. One caller is measured for at a time: two would slow each other down.

    Args:
        secret: that callers must know.
        examine: see `Examine`.
        address: to listen on.
        say: is told what is asked.
    """

    def __init__(
        self, secret: bytes, examine: Examine, address: tuple[str, int], say: Callable[[str], None] = lambda said: None
    ) -> None:
        self._secret, self._examine, self._say = secret, examine, say
        self._alone = threading.Lock()
        self._listener = Listener(secret, self._serve, address, payload_limit=PAYLOAD_LIMIT)
        self.address = self._listener.address

    def _serve(self, connection: Connection) -> None:
        door: Listener | None = None
        try:
            while True:
                asked = connection.receive()
                if asked.kind == "open_port" and door is None:
                    door = Listener(self._secret, lambda caller: None, (connection.local_host, 0))
                    connection.send(Frame("port", {"port": door.address[1]}))
                else:
                    connection.send(self._answer(asked, connection))
        except OSError:
            pass  # it has all it wanted
        except WireError as error:
            self._say(f"{connection.peer}: {error}")
        finally:
            if door is not None:
                door.close()

    def _answer(self, asked: Frame, connection: Connection) -> Frame:
        wanted = asked.metadata
        match asked.kind:
            case "probe":
                payload = [memoryview(bytes(min(wanted["answer_bytes"], PAYLOAD_LIMIT)))]
                return Frame("probed", {"clock": time.time()}, payload)
            case "call_back":
                return Frame("truth", {"value": reaches((connection.peer, wanted["port"]), self._secret)})
            case "examine":
                return self._examined(connection.peer, wanted)
        return error_frame(PacelineError(f"A doctor cannot answer {asked.kind!r}."))

    def _examined(self, caller: str, wanted: Metadata) -> Frame:
        self._say(f"{caller} asks for the speed of {wanted['workload']}.")
        try:
            with self._alone:
                return Frame("examined", self._examine(wanted["workload"], wanted["model"]).as_dict())
        except PacelineError as error:
            return error_frame(error)

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> Responder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reaches(address: tuple[str, int], secret: bytes) -> bool:
    """Whether what listens there can be called."""
    try:
        connect(address, secret).close()
    except (OSError, HandshakeError):
        return False
    return True


def seconds_a_byte(transfer: Callable[[int], float], latency: float) -> float:
    """What one byte more costs, by transfers of sizes that grow until one is long enough to tell.

    One long transfer may be a machine that was busy, which says nothing about the way: so one that is not very long is
    repeated, and counts with the median.

    Args:
        transfer: takes a number of bytes there, or back, and says how many seconds went by.
        latency: of one way, in seconds.

    >>> round(1 / seconds_a_byte(lambda nbytes: 0.002 + nbytes / 1e6, 0.001))
    1000000
    """
    nbytes, enough = FIRST_BYTES, max(LONG_ENOUGH, ROUND_TRIPS_WITHIN * 2 * latency)
    while True:
        seconds = transfer(nbytes)
        if enough <= seconds < 10 * enough or nbytes == PAYLOAD_LIMIT:
            seconds = median([seconds, *(transfer(nbytes) for _ in range(TRANSFERS - 1))])
        if seconds >= enough or nbytes == PAYLOAD_LIMIT:
            return max(seconds - 2 * latency, 1e-9) / nbytes
        nbytes = min(nbytes * GROWTH, PAYLOAD_LIMIT)


class Caller:
    """The side that measures, over a connection to a `Responder`."""

    def __init__(self, connection: Connection, secret: bytes) -> None:
        self._connection, self._secret = connection, secret

    def examine(self, workload: str, model: str | None) -> Host:
        """The other machine, as it sees itself."""
        with self._no_longer_than(EXAMINING_SECONDS):
            answer = self._ask("examined", Frame("examine", {"workload": workload, "model": model}))
        return Host.from_dict(answer.metadata)

    def measure(self) -> tuple[Network, float]:
        """The way there, and by how many seconds the clocks differ. Of the two directions the slower one counts."""
        with self._no_longer_than(PROBING_SECONDS):
            trips = [self._round_trip(b"", 0) for _ in range(ROUND_TRIPS)]
            latency = median(seconds for seconds, _ in trips) / 2
            slower = max(self._seconds_a_byte(upwards, latency) for upwards in (True, False))
        _, apart = min(trips)  # the quickest one says it most exactly
        return Network(latency=latency, bandwidth=1 / slower), apart

    def _seconds_a_byte(self, upwards: bool, latency: float) -> float:
        def transfer(nbytes: int) -> float:
            payload, wanted = (bytes(nbytes), 0) if upwards else (b"", nbytes)
            return self._round_trip(payload, wanted)[0]

        return seconds_a_byte(transfer, latency)

    def _round_trip(self, payload: bytes, wanted: int) -> tuple[float, float]:
        """Seconds, and how far the other clock is ahead of the middle of them."""
        began, clock = time.perf_counter(), time.time()
        answer = self._ask("probed", Frame("probe", {"answer_bytes": wanted}, [memoryview(payload)]))
        seconds = time.perf_counter() - began
        return seconds, float(answer.metadata["clock"]) - (clock + seconds / 2)

    def other_ports_open(self) -> tuple[bool, bool]:
        """Whether a port that nobody named before can be reached there from here, and here from there."""
        with self._no_longer_than(PROBING_SECONDS):
            port = self._ask("port", Frame("open_port")).metadata["port"]
            there = reaches((self._connection.peer, port), self._secret)
            with Listener(self._secret, lambda caller: None, (self._connection.local_host, 0)) as door:
                asked = Frame("call_back", {"port": door.address[1]})
                here = bool(self._ask("truth", asked).metadata["value"])
        return there, here

    def _ask(self, kind: str, frame: Frame) -> Frame:
        self._connection.send(frame)
        answer = self._connection.receive()
        if answer.kind == "error":
            raise PacelineError(**answer.metadata)
        if answer.kind != kind:
            raise WireError(f"{answer.kind!r} is no answer to {frame.kind!r}")
        return answer

    @contextmanager
    def _no_longer_than(self, seconds: float) -> Iterator[None]:
        """Closing the connection wakes whoever waits for an answer on it."""
        over = threading.Event()

        def give_up() -> None:
            over.set()
            self._connection.close()

        watch = threading.Timer(seconds, give_up)
        watch.daemon = True
        watch.start()
        try:
            yield
        except OSError as error:
            if not over.is_set():
                raise
            raise TimeoutError(f"no answer within {seconds:.0f} s") from error
        finally:
            watch.cancel()
