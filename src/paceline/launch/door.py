"""The door of a running training: how further ranks come in, more than it began with.

While a run runs, its folder holds a file that only its owner may read: where the control plane is, and the secret.
`paceline run --join FOLDER` reads it, asks the control plane for the next numbers of ranks, and starts processes that
join. On another machine a copy of the file will do, if the control plane can be reached from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.control.client import ControlClient
from paceline.errors import PacelineError
from paceline.launch.addresses import INTERFACE, NCCL_INTERFACE, find_interface
from paceline.launch.local import Place
from paceline.launch.roles import SERVERS, environment_of_servers
from paceline.launch.surroundings import address_on

FILE = "door.json"
CONNECT_SECONDS = 5.0  # a run that can be joined is there


@contextmanager
def open_door(place: Place) -> Iterator[None]:
    """As long as the block lasts, others can join the run."""
    path = place.folder / FILE
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        known = {"world_size": place.world_size, "servers": place.environment.get(SERVERS, "0")}
        json.dump({**place.card, **known}, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Door:
    """Of a run that somebody has started.

    Args:
        card: all that a rank needs to find the run.
        world_size: with how many ranks it began.
        environment: further variables for the processes that join.
    """

    card: dict[str, str]
    world_size: int
    environment: dict[str, str]

    @classmethod
    def of_options(cls, where: Path | None, interface: str | None, others: dict[str, Any]) -> Door | None:
        """What `paceline run --join` says, if it is there; `others` are options that make no sense with it, if they are
        given."""
        if where is None:
            return None
        for option, value in others.items():
            if value:
                raise PacelineError(f"{option} and --join do not fit together: the run was started before.")
        environment = {}
        if interface is not None:
            chosen = find_interface(interface)[0]
            environment = {INTERFACE: chosen, NCCL_INTERFACE: chosen}
        path = where / FILE if where.is_dir() else where
        try:
            card = json.loads(path.read_text())
            environment |= environment_of_servers(int(card.pop("servers")))
            return cls(card, int(card.pop("world_size")), environment)
        except FileNotFoundError:
            raise PacelineError(
                f"There is no run to join in {where}.",
                cause="It is over, or was not started by `paceline run` with processes of its own.",
                remedy="Give the folder of a run that trains now, OUT/NAME/TIME.",
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PacelineError(f"The door of the run, {path}, cannot be read: {error}.") from error

    def place(self, nproc: int, folder: Path) -> Place:
        """So many further ranks; `folder`: where runs are kept, if that of the run is on another machine."""
        own = Path(self.card["folder"])
        if not (own / FILE).exists():
            own = (folder / own.name).absolute()
            own.mkdir(parents=True, exist_ok=True)
        secret = bytes.fromhex(self.card["secret"])
        with ControlClient(address_on(self.card), secret, self.world_size, connect_seconds=CONNECT_SECONDS) as control:
            ranks = control.enlist(nproc)
        place = Place(ranks, self.world_size, {**self.card, "folder": str(own)}, self.environment)
        return replace(place, joins=True)
