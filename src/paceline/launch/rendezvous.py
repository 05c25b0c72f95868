"""Where the launchers of several hosts meet before a run, and once more before each restart.

The launcher of the first host listens on the address that all were given. The others come, over connections that prove
the shared secret, and say how many processes they will start; when all are there each is told which ranks it has and
where the control plane is. Whoever does not fit (another number of hosts, a node rank that is taken) is told so and
turned away, and the others wait on: the mistake can be mended on that host alone.

The run has a secret of its own, made of the shared one and of a number that is used once: a process that an earlier
run has left behind does not get into this one.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from paceline.control.connection import Connection, Listener, connect
from paceline.control.wire import Frame, WireError, error_frame
from paceline.errors import PacelineError
from paceline.launch.addresses import Address, in_words

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts to reach a first host that is not up yet
log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Arrival:
    """What a host says of itself.

    Args:
        node_rank: its number, from 0.
        nnodes: how many hosts it was told there are.
        nproc: processes there that learn.
        servers: further ones that serve.
        name: of the machine, for people.
        version: of Paceline.
    """

    node_rank: int
    nnodes: int
    nproc: int
    servers: int
    name: str
    version: str


@dataclass(frozen=True)
class Seat:
    """What a host is told.

    Args:
        ranks: that it starts, in the order of their local ranks.
        servers: how many ranks of the run serve; they are the last.
        where: the name of each rank's host; there are as many ranks in the run.
        control: address of the control plane.
        run: the run's name in the folder of runs.
        nonce: what the run's secret is made with.
        elapsed: seconds since the run began.
    """

    ranks: list[int]
    servers: int
    where: list[str]
    control: list[Any]
    run: str
    nonce: str
    elapsed: float

    @property
    def world_size(self) -> int:
        return len(self.where)


def seating(arrivals: Sequence[Arrival]) -> list[list[int]]:
    """The ranks of each host: workers by host, and behind all workers the servers by host.

    >>> def host(nproc, servers=0):
    ...     return Arrival(0, 2, nproc, servers, "", "")
    >>> seating([host(2, servers=1), host(3, servers=1)])
    [[0, 1, 5], [2, 3, 4, 6]]
    """
    ranks: list[list[int]] = [[] for _ in arrivals]
    number = 0
    for kind in ("nproc", "servers"):
        for seats, arrival in zip(ranks, arrivals, strict=True):
            count = getattr(arrival, kind)
            seats += range(number, number + count)
            number += count
    return ranks


def secret_of_run(shared: bytes, nonce: str) -> bytes:
    """The secret of one run, which only holders of the shared one can work out."""
    return hmac.digest(shared, b"run" + nonce.encode(), "sha256")


class Rendezvous:
    """The first host's side; it listens until it is closed.

    Args:
        address: to listen on.
        secret: shared by all hosts.
        own: what the first host says of itself.
    """

    def __init__(self, address: Address, secret: bytes, own: Arrival) -> None:
        self._secret, self._own = secret, own
        self._news = threading.Condition()
        self._guests: dict[int, tuple[Arrival, Connection]] = {}
        self._listener = Listener(secret, self._serve, address)
        self.address = self._listener.address

    def gather(self, seconds: float) -> list[Arrival]:
        """All hosts, in order, when they are there. Raises, also at those who came, when one does not come."""
        deadline = time.monotonic() + seconds
        with self._news:
            while self._missing and time.monotonic() < deadline:
                self._news.wait(deadline - time.monotonic())
            missing = self._missing
            if not missing:
                return [self._own, *(self._guests[rank][0] for rank in range(1, self._own.nnodes))]
        came = self._own.nnodes - len(missing)
        error = PacelineError(
            f"Only {came} of {self._own.nnodes} hosts came to {in_words(self.address)} within {seconds:g} s; missing: "
            f"node rank {', '.join(map(str, missing))}.",
            cause="The command was not started there, failed, or a firewall is between.",
            remedy="Look at its output there; try `nc -vz HOST PORT` from it; give more time with --join-timeout.",
        )
        self._dismiss(lambda node_rank: error_frame(error))
        raise error

    def seat(
        self, arrivals: Sequence[Arrival], control: Address, run: str, *, nonce: str, origin: float
    ) -> tuple[Seat, float]:
        """Tell every guest its seat; the first host's own one, and when the run began, are returned."""
        ranks = seating(arrivals)
        host_of = {rank: arrival.name for seats, arrival in zip(ranks, arrivals, strict=True) for rank in seats}
        where = [host_of[rank] for rank in range(len(host_of))]
        servers = sum(arrival.servers for arrival in arrivals)

        def seat_of(node_rank: int) -> Seat:
            return Seat(ranks[node_rank], servers, where, list(control), run, nonce, max(0.0, time.time() - origin))

        self._dismiss(lambda node_rank: Frame("seat", asdict(seat_of(node_rank))))
        return seat_of(0), origin

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._own.nnodes) if rank not in self._guests]

    def _dismiss(self, answer_of: Any) -> None:
        with self._news:
            guests, self._guests = self._guests, {}
        for node_rank, (arrival, connection) in guests.items():
            try:
                connection.send(answer_of(node_rank))
            except OSError as error:
                log.warning("Node rank %d (%s) is gone: %s", node_rank, arrival.name, error)

    def _serve(self, connection: Connection) -> None:
        arrival = None
        try:
            frame = connection.receive()
            if frame.kind != "arrive":
                raise WireError(f"{frame.kind} is nothing that a rendezvous is asked")
            arrival = Arrival(**frame.metadata)
            self._let_in(arrival, connection)
            connection.receive()  # it says no more: this ends when it has its seat, or is gone
        except WireError as error:
            log.warning("Closed a connection from %s: %s", connection.peer, error)
        except PacelineError as error:
            log.warning(
                "Turned away node rank %d from %s: %s", arrival.node_rank if arrival else -1, connection.peer, error
            )
            self._refuse(connection, error)
        except OSError:
            pass  # the end of the stream
        finally:
            with self._news:
                if arrival is not None and self._guests.get(arrival.node_rank, (None, None))[1] is connection:
                    del self._guests[arrival.node_rank]

    @staticmethod
    def _refuse(connection: Connection, error: PacelineError) -> None:
        try:
            connection.send(error_frame(error))
            connection.receive()  # until it has read that and is gone
        except (OSError, WireError):
            pass

    def _let_in(self, arrival: Arrival, connection: Connection) -> None:
        own, here = self._own, f"{arrival.name} ({connection.peer})"
        if arrival.version != own.version:
            raise PacelineError(
                f"Paceline is {arrival.version} on {here} and {own.version} on the first host, {own.name}.",
                remedy="Install the same version on every host.",
            )
        if arrival.nnodes != own.nnodes:
            raise PacelineError(
                f"{here} was started with --nnodes {arrival.nnodes}, the first host {own.name} with {own.nnodes}.",
                remedy="Give every host the same number of hosts.",
            )
        if arrival.node_rank >= own.nnodes:
            raise PacelineError(f"Node rank {arrival.node_rank} of {here} does not exist among {own.nnodes} hosts.")
        with self._news:
            other = own.name if arrival.node_rank == 0 else None
            if arrival.node_rank in self._guests:
                taken, its = self._guests[arrival.node_rank]
                other = f"{taken.name} ({its.peer})"
            if other is not None:
                raise PacelineError(
                    f"Node rank {arrival.node_rank} of {here} is taken by {other}.",
                    cause="Two hosts were started with the same --node-rank, or an earlier start is still alive.",
                    remedy=f"Give every host its own, from 0 to {own.nnodes - 1}; the others wait for it.",
                )
            self._guests[arrival.node_rank] = (arrival, connection)
            self._news.notify_all()

    def close(self) -> None:
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join(master: Address, secret: bytes, arrival: Arrival, seconds: float) -> tuple[Seat, float]:
    """Go to the first host and wait for the seat; also when the run began, by this machine's clock: clocks of hosts may
    be apart, and the time that an answer travels is short beside that."""
    with _connect_patiently(master, secret, seconds) as connection:
        try:
            connection.send(Frame("arrive", asdict(arrival)))
            answer = connection.receive()
        except OSError as error:
            raise PacelineError(
                f"The first host at {in_words(master)} went away before all hosts had come: {error}.",
                remedy="Look at the output of its command.",
            ) from error
    if answer.kind == "error":
        raise PacelineError(**answer.metadata)
    if answer.kind != "seat":
        raise WireError(f"{answer.kind} is nothing that a rendezvous answers")
    seat = Seat(**answer.metadata)
    if Path(seat.run).name != seat.run:  # it becomes a folder here
        raise WireError(f"{seat.run!r} is no name of a run")
    return seat, time.time() - seat.elapsed


def new_nonce() -> str:
    return secrets.token_hex(16)


def _connect_patiently(master: Address, secret: bytes, seconds: float) -> Connection:
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    while True:
        try:
            return connect(master, secret)
        except OSError as error:  # also a name that is not known yet: in a cluster it may be, a moment later
            if time.monotonic() + pause > deadline:
                raise PacelineError(
                    f"The first host did not answer at {in_words(master)} within {seconds:g} s: "
                    f"{error.strerror or error}.",
                    cause="Its command was not started, listens on another address, or a firewall is between.",
                    remedy="Start it there with --node-rank 0 and the same --master; try `nc -vz HOST PORT` from here.",
                ) from error
        time.sleep(pause)
        pause = min(LONGEST_PAUSE, 2 * pause)
