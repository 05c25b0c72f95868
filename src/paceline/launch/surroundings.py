"""Where a rank finds itself: alone, under torchrun, or under `paceline run`.

All three end in the same: a rank, a number of ranks, the address of the control plane, its secret and the run's folder.
Under `paceline run` the launcher hosts the control plane and outlives every rank; otherwise a child of rank 0 does.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from paceline.control.client import ControlClient
from paceline.errors import PacelineError
from paceline.launch.addresses import INTERFACE, find_interface, own_interfaces
from paceline.launch.hosted import HostedService
from paceline.launch.roles import SERVERS, Servers, place, serving_ranks

CONTROL, SECRET, FOLDER, ORIGIN = "PACELINE_CONTROL", "PACELINE_SECRET", "PACELINE_FOLDER", "PACELINE_ORIGIN"
JOINS = "PACELINE_JOINS"
_given: dict[str, str] = {}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class Surroundings:
    """What a rank knows before it knows its model.

    Args:
        rank, world_size: this rank, and with how many the run began; of those the last serve.
        servers: how many serve.
        control: the rank's line to the control plane.
        address: host and port of the control plane.
        secret: what every connection of the run is authenticated by.
        folder: the run's folder.
        origin: `time.time()` at which the run began.
        join_timeout: seconds to wait for the other ranks.
        service: the control plane, if a child of this process is it.
        joins: whether the rank joins a running training.
    """

    rank: int
    world_size: int
    servers: int
    control: ControlClient
    address: tuple[str, int]
    secret: bytes
    folder: Path
    origin: float
    join_timeout: float
    service: HostedService | None = None
    joins: bool = False

    @classmethod
    def find(
        cls, folder: Path, join_timeout: float, servers: Servers, check: Callable[[int, int], None]
    ) -> Surroundings:
        """Look at the environment that the launcher has left; what it says of servers counts more than `servers`.
        `check` protests at the numbers of workers and servers, before anybody is connected to."""
        rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        joins = os.environ.get(JOINS) == "1"
        if not 0 <= rank < world_size and not joins:  # a further rank has a higher number
            raise PacelineError(f"RANK={rank} and WORLD_SIZE={world_size} do not fit together.")
        servers = os.environ.get(SERVERS, servers)
        serving = serving_ranks(servers, world_size, _number("LOCAL_WORLD_SIZE", world_size))
        check(world_size - len(serving), len(serving))
        service = None
        if CONTROL in os.environ:
            card = _from_environment()
        elif world_size == 1:
            service, card = _host(folder, world_size, "127.0.0.1", join_timeout)
        else:
            service, card = _under_torchrun(rank, world_size, folder, join_timeout)
        address, secret = address_on(card), bytes.fromhex(card["secret"])
        rank = place(rank, world_size, serving) if rank < world_size else rank
        control = ControlClient(address, secret, rank, connect_seconds=join_timeout)
        folder, origin = Path(card["folder"]), float(card["origin"])
        run = (control, address, secret, folder, origin, join_timeout, service)
        return cls(rank, world_size, len(serving), *run, joins=joins)

    @property
    def workers(self) -> int:
        """Ranks that learn."""
        return self.world_size - self.servers

    @property
    def serves(self) -> bool:
        """Whether this rank is a server; those that have joined since the beginning, with higher numbers, learn."""
        return self.workers <= self.rank < self.world_size

    @property
    def loopback(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.address[0] in LOOPBACK

    @property
    def host(self) -> str:
        """The address at which other ranks find this one: of the interface that was chosen, else the one from which
        this machine reaches the control plane. A machine's name says nothing about that: it often is the loopback."""
        if self.loopback:
            return "127.0.0.1"
        chosen = os.environ.get(INTERFACE, "").split(",")[0].strip()
        return find_interface(chosen)[1] if chosen and own_interfaces() else self.control.local_host

    def tell_all(self, key: str, value: str) -> str:
        """Rank 0's value, on every rank; who joins later is told what was said at the beginning."""
        if self.rank == 0 and not self.joins:
            self.control.store_set(key, value.encode())
            return value
        return self.control.store_get(key, self.join_timeout).decode()

    def close(self) -> None:
        """Leave; who hosts the control plane keeps it for the others until they have left too."""
        self.control.close()
        if self.service is not None:
            self.service.close()


def new_run(folder: Path) -> Path:
    """A fresh folder for a run, named by the time. Two runs in one second get different ones."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        made = folder / (stamp + suffix)
        try:
            made.mkdir(parents=True)
            return made.absolute()
        except FileExistsError:
            continue
        except OSError as error:
            raise PacelineError(
                f"The run's folder {made} cannot be made: {error.strerror}.",
                remedy="Give a place that can be written with Run(out=...) or --out.",
            ) from error
    raise PacelineError(f"There are too many runs of this second in {folder}.")


def card_of(address: tuple[str, int], folder: Path, secret: bytes) -> dict[str, str]:
    """All that a rank needs to find its run."""
    host, port = address
    return {
        "control": f"{host}:{port}",
        "secret": secret.hex(),
        "folder": str(folder),
        "origin": repr(time.time()),
    }


def address_on(card: dict[str, str]) -> tuple[str, int]:
    """Of the control plane."""
    host, _, port = card["control"].rpartition(":")
    return host, int(port)


def environment_of(card: dict[str, str]) -> dict[str, str]:
    """The card as environment variables for child processes; never on a command line, where anyone can read it."""
    return {CONTROL: card["control"], SECRET: card["secret"], FOLDER: card["folder"], ORIGIN: card["origin"]}


def _from_environment() -> dict[str, str]:
    names = {"control": CONTROL, "folder": FOLDER, "origin": ORIGIN}
    return {"secret": _given_secret() or "", **{key: os.environ[name] for key, name in names.items()}}


def _given_secret() -> str | None:
    """The secret that this process was started with. From the first question on it is no longer in the environment:
    there every program that the script starts would inherit it, and every tool that notes down its surroundings."""
    if SECRET in os.environ:
        _given[SECRET] = os.environ.pop(SECRET)
        if not re.fullmatch(r"([0-9a-fA-F]{2}){16,}", _given[SECRET]):
            raise PacelineError(
                f"{SECRET} is no secret: it must be at least 32 hexadecimal digits.",
                remedy="Make one with `openssl rand -hex 32` and give the same to every rank.",
            )
    return _given.get(SECRET)


def _host(folder: Path, world_size: int, host: str, join_timeout: float) -> tuple[HostedService, dict[str, str]]:
    given = _given_secret()
    secret = bytes.fromhex(given) if given else secrets.token_bytes(32)
    made = new_run(folder)
    service = HostedService(world_size, secret, host, made, join_timeout=join_timeout)
    return service, card_of(service.address, made, secret)


def _under_torchrun(
    rank: int, world_size: int, folder: Path, join_timeout: float
) -> tuple[HostedService | None, dict[str, str]]:
    """Rank 0 hosts the control plane; torchrun's own store tells the others where it is. Anybody can read that store:
    a secret that every rank was started with does not pass through it."""
    from torch._C._distributed_c10d import TCPStore

    for needed in ("MASTER_ADDR", "MASTER_PORT"):
        if needed not in os.environ:
            raise PacelineError(
                f"WORLD_SIZE is {world_size} but {needed} is not set.",
                cause="The ranks cannot find each other.",
                remedy="Start with torchrun or `paceline run`, or unset WORLD_SIZE to train alone.",
            )
    host = os.environ["MASTER_ADDR"]
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            host,
            _number("MASTER_PORT", 0),
            world_size,
            is_master=serves,
            timeout=timedelta(seconds=join_timeout),
            wait_for_workers=False,
        )
        # A restart by torchrun finds the keys of the attempt before it: each attempt has its own.
        key = f"paceline/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        service = None
        if rank == 0:
            service, card = _host(folder, world_size, host, join_timeout)
            store.set(key, json.dumps(card if _given_secret() is None else {**card, "secret": ""}))
        else:
            card = json.loads(store.get(key))
            card["secret"] = card["secret"] or _given_secret() or ""
    except (RuntimeError, OSError) as error:
        raise PacelineError(
            f"Rank {rank} did not find rank 0 at {host}:{os.environ['MASTER_PORT']}.",
            cause=f"Rank 0 never arrived within {join_timeout:g} s, or the port is taken: {str(error).splitlines()[0]}",
            remedy="Look at rank 0's log; give another port to the launcher.",
        ) from error
    return service, card


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        raise PacelineError(f"{name}={os.environ[name]!r} is not a whole number.") from None
