"""Who is expected, here and gone; pure, with the time given by the caller.

Everyone must have arrived before the run begins, and everyone must have described the same run: gloo does not notice
ranks with different models, it aborts the one that is right or returns half a sum. After that each change of the
membership has a number, the generation: the data plane is rebuilt for each, and messages of an old one are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError

Description = dict[str, Any]
ON_NOTICE = "it left on notice"
"""Why a rank is gone that was told to leave: it has handed in its work, and holds nothing any more."""
NEVER_CAME = "it never came"
"""Why a rank is not there that was given a number, while one with a higher number takes part."""


class DifferentRunError(PacelineError):
    """Two ranks do not train the same thing."""


@dataclass
class Member:
    """A rank that is here."""

    description: Description
    mailbox: tuple[str, int] | None
    last_seen: float


class Membership:
    """The ranks of one run, from the first arrival to the last farewell."""

    def __init__(self, world_size: int, heartbeat_timeout: float) -> None:
        self.world_size, self.heartbeat_timeout = world_size, heartbeat_timeout
        self.seats = self.numbers = world_size
        """Ranks are below this number; and those that further ones, who do not take part yet, were given."""
        self.generation = 0
        self.begun = False
        self.present: dict[int, Member] = {}
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self.joining: set[int] = set()
        """Newcomers that do not take part yet. To the others they are still lost."""
        self.admissions = 0
        self.admitted: tuple[list[int], int] = ([], 0)
        """How often newcomers were let in; those of the last time, and the generation in which they take part."""
        self._reference: tuple[int, Description] | None = None

    def arrive(self, rank: int, description: Description, mailbox: tuple[str, int] | None, now: float) -> None:
        """A rank is here. Raises when it cannot be, or does not fit the others."""
        if not 0 <= rank < self.numbers:
            raise PacelineError(
                f"Rank {rank} does not exist in a run of {self.numbers}: ranks go from 0 to {self.numbers - 1}.",
                remedy="Start as many processes as the run was given.",
            )
        if rank in self.present:
            raise PacelineError(
                f"Rank {rank} is already here.",
                cause="Two processes were started with the same rank, or a process of an earlier run is still alive.",
                remedy="Give every process a rank of its own.",
            )
        reference_rank, reference = self._reference or (rank, description)
        check_same_run(rank, description, reference_rank, reference)
        self._reference = (reference_rank, reference)
        if self.begun:
            self._wait_to_join(rank)
        else:
            self.lost.pop(rank, None)
        self.present[rank] = Member(description, mailbox, now)
        self.begun = self.begun or len(self.present) == self.world_size

    @property
    def servers(self) -> range:
        """Ranks that serve: the last of those with which the run began."""
        return range(self.world_size - self.description.get("servers", 0), self.world_size)

    def _check_that_it_admits(self) -> None:
        if not self.description.get("admits"):
            raise PacelineError(
                f"The strategy {self.description.get('strategy')} cannot take a newcomer into a running training yet.",
                remedy="Start the run again; with run.resume() it goes on from the last checkpoint.",
            )

    def _wait_to_join(self, rank: int) -> None:
        self._check_that_it_admits()
        if rank in self.servers:
            raise PacelineError(
                f"Rank {rank} is a server, and a server that was lost cannot be replaced while the run goes on.",
                cause="What it held of the model and of the optimizer's memory went with it.",
                remedy="Let the others go on without it, if they can. Or start the run again with all its servers: "
                "run.resume() goes on from the last checkpoint.",
            )
        if not self.taking_part or (rank < self.seats and rank not in self.lost):
            raise PacelineError(f"Rank {rank} cannot join the run any more: it is over.")
        self.joining.add(rank)

    def enlist(self, count: int) -> list[int]:
        """Numbers for so many further ranks, which may join from now on."""
        if not self.begun or not self.taking_part:
            raise PacelineError("The run has not begun yet, or is over.", remedy="Join it while it trains.")
        self._check_that_it_admits()
        first, self.numbers = self.numbers, self.numbers + count
        return list(range(first, self.numbers))

    def admit(self) -> None:
        """Whoever waits takes part from now on, in a new generation."""
        self.generation, self.admissions = self.generation + 1, self.admissions + 1
        self.admitted = (sorted(self.joining), self.generation)
        further = range(self.seats, max(self.joining, default=-1) + 1)
        self.lost |= dict.fromkeys(further, NEVER_CAME)
        self.seats += len(further)
        for rank in self.joining:
            del self.lost[rank]
        self.joining.clear()

    @property
    def taking_part(self) -> list[int]:
        """Who is here, and no newcomer that still waits."""
        return [rank for rank in self.present if rank not in self.joining]

    @property
    def description(self) -> Description:
        """Of the run, as its ranks gave it; empty before the first has come."""
        return self._reference[1] if self._reference else {}

    @property
    def missing(self) -> list[int]:
        """Ranks that have not arrived yet, or are gone."""
        return [rank for rank in range(self.seats) if rank not in self.present]

    @property
    def roster(self) -> list[tuple[str, int] | None]:
        """Where each rank receives messages; None for one that is not here, or receives none."""
        members = (self.present.get(rank) for rank in range(self.seats))
        return [member.mailbox if member else None for member in members]

    def heard(self, rank: int, now: float) -> None:
        """A sign of life."""
        if rank in self.present:
            self.present[rank].last_seen = now

    def silent(self, now: float) -> list[int]:
        """Ranks that have given no sign of life for too long."""
        return [rank for rank, member in self.present.items() if now - member.last_seen > self.heartbeat_timeout]

    def lose(self, rank: int, reason: str) -> bool:
        """A rank is gone without farewell. Whether there is any news in it: a better reason is news, too."""
        if rank in self.left or (self.lost.get(rank) == reason and rank not in self.joining):
            return False
        self._remove(rank)
        if rank < self.seats:
            self.lost[rank] = reason
        return True

    def leave(self, rank: int) -> None:
        """A rank said farewell."""
        self._remove(rank)
        self.left.add(rank)

    def state(self) -> dict[str, Any]:
        """As JSON can carry it. All who are here have given the same description."""
        return {
            "generation": self.generation,
            "begun": self.begun,
            "seats": [self.seats, self.numbers],
            "present": [[rank, member.mailbox] for rank, member in self.present.items()],
            "lost": [[rank, reason] for rank, reason in self.lost.items()],
            "left": sorted(self.left),
            "joining": sorted(self.joining),
            "admissions": [self.admissions, *self.admitted],
            "reference": self._reference,
        }

    def restore(self, state: dict[str, Any], now: float) -> None:
        """The inverse of `state`; who was here has until the time-out, from now, to give a sign of life."""
        self.generation, self.begun = state["generation"], state["begun"]
        self.seats, self.numbers = state["seats"]
        self.lost, self.left, self.joining = dict(state["lost"]), set(state["left"]), set(state["joining"])
        self.admissions, ranks, generation = state["admissions"]
        self.admitted = (ranks, generation)
        self._reference = tuple(state["reference"]) if state["reference"] else None
        here = {rank: tuple(mailbox) if mailbox else None for rank, mailbox in state["present"]}
        self.present = {rank: Member(self.description, mailbox, now) for rank, mailbox in here.items()}

    def _remove(self, rank: int) -> None:
        waited = rank in self.joining
        self.joining.discard(rank)
        if self.present.pop(rank, None) is not None and self.begun and not waited:
            self.generation += 1


def check_same_run(rank: int, description: Description, reference_rank: int, reference: Description) -> None:
    """Raise, with the first difference in words, when two ranks do not describe the same run."""
    difference = first_difference(description, f"rank {rank}", reference, f"rank {reference_rank}")
    if difference:
        raise DifferentRunError(
            f"Rank {rank} and rank {reference_rank} do not train the same thing: {difference}.",
            cause="Their programs, versions or arguments differ.",
            remedy="Start the same program with the same arguments on every rank.",
        )


def first_difference(here: Description, me: str, there: Description, other: str) -> str:
    """The first difference between two descriptions in words, or an empty string."""
    for field, noun in (("version", "version of Paceline"), ("strategy", "strategy"), ("world_size", "world size")):
        if here.get(field) != there.get(field):
            return f"the {noun} is {here.get(field)} on {me} but {there.get(field)} on {other}"
    return (
        _first_entry(here.get("options"), me, there.get("options"), other, "option")
        or _first_parameter(here.get("parameters") or [], me, there.get("parameters") or [], other)
        or _first_entry(here.get("data"), me, there.get("data"), other, "data set's")
        or _first_entry(here, me, there, other, "description's")
    )


def _first_entry(here: Any, me: str, there: Any, other: str, noun: str) -> str:
    here, there = here or {}, there or {}
    for key in sorted({*here, *there}):
        if key not in here or key not in there:
            owner, lacking = (me, other) if key in here else (other, me)
            return f"the {noun} {key} is given on {owner} but not on {lacking}"
        if here[key] != there[key]:
            return f"the {noun} {key} is {here[key]} on {me} but {there[key]} on {other}"
    return ""


def _first_parameter(here: list[Any], me: str, there: list[Any], other: str) -> str:
    names_here, names_there = dict.fromkeys(p[0] for p in here), dict.fromkeys(p[0] for p in there)
    for name in [*names_here, *names_there]:
        if name not in names_here or name not in names_there:
            owner, lacking = (me, other) if name in names_here else (other, me)
            return f"only {owner} has a parameter {name}; {lacking} has none"
    for (name, shape, dtype, strides), (other_name, *there_as) in zip(here, there, strict=False):
        other_shape, other_dtype, other_strides = there_as
        if name != other_name:
            return f"the parameter {name} on {me} stands where {other_name} stands on {other}"
        if list(shape) != list(other_shape):
            return f"parameter {name} has shape {tuple(shape)} on {me} but {tuple(other_shape)} on {other}"
        if dtype != other_dtype:
            return f"parameter {name} is {dtype} on {me} but {other_dtype} on {other}"
        if list(strides) != list(other_strides):
            here_so, there_so = tuple(strides), tuple(other_strides)
            return f"parameter {name} lies in memory with strides {here_so} on {me} but {there_so} on {other}"
    return ""
