"""A run over several hosts: each has a launcher of its own, and they meet at the first one's address.

The first host's launcher also hosts the control plane. A launcher needs no line to the others while the run runs: its
ranks hear from the control plane who is lost, and stop or go on as they would on one machine.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline import __version__
from paceline.errors import PacelineError
from paceline.launch.addresses import INTERFACE, NCCL_INTERFACE, Address, find_interface, own_address, parse_address
from paceline.launch.hosted import HostedService
from paceline.launch.local import JOIN_SECONDS, Place
from paceline.launch.rendezvous import Arrival, Rendezvous, Seat, join, new_nonce, secret_of_run
from paceline.launch.roles import environment_of_servers
from paceline.launch.secret import find_secret
from paceline.launch.surroundings import SECRET, card_of, new_run

MASTER_PORT = 29500  # torchrun's
FIRST = 0


@dataclass(frozen=True)
class Hosts:
    """Which of several hosts this is, and where they meet.

    Args:
        nnodes: how many there are.
        node_rank: the number of this one; 0 is the first, where the control plane is.
        master: where they meet: an address of the first host.
        secret: that all share.
        interface: of this machine, by name, for all that ranks send; None for the one that leads to the first host.
    """

    nnodes: int
    node_rank: int
    master: Address
    secret: bytes
    interface: str | None = None

    @classmethod
    def of_options(
        cls,
        nnodes: int,
        node_rank: int | None,
        master: str | None,
        *,
        interface: str | None = None,
        secret_file: Path | None = None,
    ) -> Hosts | None:
        """What the options of `paceline run` say; None for one machine."""
        if nnodes == 1:
            given = {
                "--node-rank": node_rank,
                "--master": master,
                "--interface": interface,
                "--secret-file": secret_file,
            }
            for option, value in given.items():
                if value not in (None, 0):
                    raise PacelineError(
                        f"{option} is for several hosts.", remedy="Say how many with --nnodes, or leave it out."
                    )
            return None
        if master is None or node_rank is None:
            raise PacelineError(
                f"{nnodes} hosts need --master and --node-rank.",
                remedy="On every host give the same --master, an address of the first one, as in 10.0.0.1:29500, "
                f"and a --node-rank of its own from 0 to {nnodes - 1}.",
            )
        if not 0 <= node_rank < nnodes:
            raise PacelineError(
                f"--node-rank {node_rank} does not exist among {nnodes} hosts.",
                remedy=f"Give each its own, from 0 to {nnodes - 1}.",
            )
        secret, _ = find_secret(secret_file, make=False)
        os.environ.pop(
            SECRET, None
        )  # the run gets one of its own, and what ranks start must not inherit the shared one
        chosen = None if interface is None else find_interface(interface)[0]
        return cls(nnodes, node_rank, parse_address(master, "--master", MASTER_PORT), secret, chosen)


class Launcher:
    """This host's part in the run, for as many attempts as it takes.

    Args:
        hosts: see `Hosts`.
        nproc, servers: processes of this host that learn, and that serve.
        folder: where this host keeps the folders of runs.
        port: of the control plane, on the first host; 0 takes a free one.
        timeouts: see `launch`.
    """

    def __init__(self, hosts: Hosts, nproc: int, servers: int, folder: Path, port: int = 0, **timeouts: float) -> None:
        self._hosts, self._folder, self._port = hosts, folder, port
        self._timeouts = {"join_timeout": JOIN_SECONDS, **timeouts}
        self._seconds = self._timeouts["join_timeout"]
        self._own = Arrival(hosts.node_rank, hosts.nnodes, nproc, servers, socket.gethostname(), __version__)
        self._rendezvous: Rendezvous | None = None
        if hosts.node_rank == FIRST:
            self._host = _patiently_own(hosts.master[0], self._seconds)
            self._rendezvous = Rendezvous((self._host, hosts.master[1]), hosts.secret, self._own)

    @contextmanager
    def place(self) -> Iterator[tuple[Place, Seat]]:
        """Meet the others; the ranks of this host, and on the first the control plane as long as the block lasts."""
        if self._rendezvous is None:
            seat, origin = join(self._hosts.master, self._hosts.secret, self._own, self._seconds)
            yield self._place_of(seat, origin, self._made(seat.run)), seat
            return
        arrivals = self._rendezvous.gather(self._seconds)
        world_size = sum(arrival.nproc + arrival.servers for arrival in arrivals)
        folder, nonce, origin = new_run(self._folder), new_nonce(), time.time()
        secret = secret_of_run(self._hosts.secret, nonce)
        with HostedService(world_size, secret, self._host, folder, self._port, **self._timeouts) as service:
            seat, origin = self._rendezvous.seat(arrivals, service.address, folder.name, nonce=nonce, origin=origin)
            yield self._place_of(seat, origin, folder), seat

    def _made(self, run: str) -> Path:
        """The first host's folder by its name: the same one on a shared file system, else this host's own part."""
        made = (self._folder / run).absolute()
        try:
            made.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PacelineError(
                f"The run's folder {made} cannot be made: {error.strerror}.", remedy="Give another place with --out."
            ) from error
        return made

    def _place_of(self, seat: Seat, origin: float, folder: Path) -> Place:
        host, port = seat.control
        card = card_of((host, port), folder, secret_of_run(self._hosts.secret, seat.nonce)) | {"origin": repr(origin)}
        environment = environment_of_servers(seat.servers)
        if self._hosts.interface is not None:
            environment |= {INTERFACE: self._hosts.interface, NCCL_INTERFACE: self._hosts.interface}
        return Place(seat.ranks, seat.world_size, card, environment)

    def close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _patiently_own(host: str, seconds: float) -> str:
    """In a cluster the name of a machine that has just started may become known a moment later."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return own_address(host)
        except OSError as error:
            if time.monotonic() + 1 > deadline:
                raise PacelineError(
                    f"The name {host} is not known on this machine: {error.strerror}.",
                    where="--master",
                    remedy="Give the first host's address instead.",
                ) from error
        time.sleep(1.0)
