"""Collectives in whose middle a rank is lost: ranks as threads of one process, with real process groups between them.

A rank is lost by never joining, as one that hangs: then nothing breaks, and only the membership tells of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from town import Town, together

from paceline.backends.collectives import Collectives, CollectiveWork, MissingRootError
from paceline.backends.flat import TRAILER, WEIGHT
from paceline.backends.lane import Care
from paceline.backends.movement import BLOCK, Movement
from paceline.errors import PacelineError

pytestmark = pytest.mark.parametrize("hosts", ["aaaa", "abab"])


def add_up(group: Collectives, tensor: Tensor) -> CollectiveWork[Tensor]:
    kept = tensor.clone()
    work: CollectiveWork[Tensor] = group.add_up(tensor, lambda: work.flight.tensor, "A sum", Care(kept.clone))
    return work


def test_alone_a_sum_is_there_at_once_and_is_not_kept_for_ever(hosts: str) -> None:
    """So a run of one rank takes the same course each time: nothing depends on when a thread of gloo's is through."""

    def act(rank: int, group: Collectives, town: Town) -> list[list[int]]:
        held = []
        for number in range(3):
            tensor = torch.tensor([2.0 + number])
            work = group.add_up(tensor, tensor.item, "A sum", Care(tensor.clone), round_number=number)
            assert work.done and work.finish() == 2.0 + number
            held.append(group.held_rounds)
        return held

    assert together(act, hosts[:1]) == [[[0], [1], [2]]]


def test_what_nobody_holds_is_repeated_without_the_lost_rank(hosts: str) -> None:
    def act(rank: int, group: Collectives, town: Town) -> float:
        add_up(group, torch.tensor([1.0])).finish()
        if rank == 3:
            town.lose(3)
            return 0.0
        return float(add_up(group, torch.tensor([10.0**rank])).finish())

    assert together(act, hosts) == [111.0, 111.0, 111.0, 0.0]


@pytest.mark.parametrize("slow", [False, True], ids=["", "its giver is slow"])
def test_what_one_rank_holds_the_others_get_bit_for_bit(hosts: str, slow: bool) -> None:
    """Rank 0 holds the second sum, with the lost rank's part in it; the others hear of the loss before they look."""
    gone = threading.Event()

    def give_slowly(group: Collectives, town: Town) -> Callable[..., None]:
        give = group._give

        def act(*gift: Any) -> None:
            looks = town.looks
            while town.looks < looks + 8:  # the others wait, look around, and wait on
                time.sleep(0.001)
            give(*gift)

        return act

    def act(rank: int, group: Collectives, town: Town) -> Tensor:
        add_up(group, torch.tensor([1.0])).finish()
        second = add_up(group, torch.tensor([0.1 * 3**rank]))
        if rank == 0:
            assert second.wait()
            town.lose(3)
            gone.set()
            if slow:
                group._give = give_slowly(group, town)  # type: ignore[method-assign]
        gone.wait()
        if rank == 3:
            return torch.zeros(1)
        second.flight.poll = lambda: second.flight.held  # type: ignore[method-assign]  # as if it had broken here
        group.look_around()
        return second.finish().clone() + add_up(group, torch.tensor([0.0])).finish()

    found = together(act, hosts)
    assert all(torch.equal(each, found[0]) for each in found[:3])
    assert float(found[0]) == pytest.approx(0.1 * (1 + 3 + 9 + 27)), "the lost rank's part counts on all"


def test_several_in_flight_and_a_second_loss_while_they_agree(hosts: str) -> None:
    def act(rank: int, group: Collectives, town: Town) -> list[float]:
        if rank == 3:
            town.lose(3)
            return []
        works = [add_up(group, torch.tensor([(number + 1) * 10.0**rank])) for number in range(3)]
        if rank == 2:  # it dies when the others wait for its word
            while not any("generation-1/" in key for key in list(town.said)):
                pass
            town.lose(2)
            return []
        return [float(work.finish()) for work in works]

    assert together(act, hosts)[:2] == [[11.0, 22.0, 33.0]] * 2


def test_a_wait_shorter_than_a_millisecond_ends(hosts: str) -> None:
    """It did not: whoever was left with so little of its slice never looked around again."""

    def act(rank: int, group: Collectives, town: Town) -> bool:
        return rank > 0 or add_up(group, torch.tensor([1.0])).wait(1e-4)

    assert together(act, hosts) == [False, True, True, True]


def test_all_but_one_may_be_lost(hosts: str) -> None:
    def act(rank: int, group: Collectives, town: Town) -> float:
        if rank:
            town.lose(rank)
            return 0.0
        return float(add_up(group, torch.tensor([7.0])).finish())

    assert together(act, hosts)[0] == 7.0


def test_without_the_root_a_broadcast_cannot_go_on(hosts: str) -> None:
    def act(rank: int, group: Collectives, town: Town) -> float:
        if rank == 0:
            town.lose(0)
            return 0.0
        with pytest.raises(MissingRootError, match="Rank 0 was lost before"):
            group.broadcast(torch.zeros(1))
        return 1.0

    assert together(act, hosts) == [0.0, 1.0, 1.0, 1.0]


def test_nobody_goes_on_before_all_have_what_the_root_gave(hosts: str) -> None:
    """The root went on, and took the start with it when it was lost before a slow rank had come to it."""

    def act(rank: int, group: Collectives, town: Town) -> float:
        if rank == 3:
            while not all(f"came-{other}" in town.said for other in range(3)):
                pass
        town.said[f"came-{rank}"] = b""
        given = torch.tensor([7.0 if rank == 0 else 0.0])
        group.broadcast(given)
        if rank == 0:
            town.lose(0)
            return float(given)
        return float(add_up(group, given).finish())

    assert together(act, hosts) == [7.0, 21.0, 21.0, 21.0]


def test_what_a_lost_root_gave_to_somebody_reaches_all(hosts: str) -> None:
    gone = threading.Event()

    def act(rank: int, group: Collectives, town: Town) -> float:
        given = torch.tensor([7.0 if rank == 0 else 0.0])
        flight = group._rounds.start(given, Care(), 0)
        work = CollectiveWork(group, group._rounds, flight, lambda: given, "It")
        if rank == 3:  # as if it had broken here
            flight.poll = lambda: flight.held  # type: ignore[method-assign]
        else:
            assert work.wait()
        if rank == 0:
            town.lose(0)
            gone.set()
            return float(given)
        gone.wait()
        group.look_around()
        return float(work.finish())

    assert together(act, hosts) == [7.0] * 4


@pytest.mark.parametrize("refused", [False, True], ids=["", "the store refuses"])
def test_a_merge_goes_on_by_the_weights_of_those_who_are_left(hosts: str, refused: bool) -> None:
    """Also if the control plane answers who looks for the lost rank in its store that it is lost."""
    common = torch.arange(3.0 * BLOCK + 5)

    def act(rank: int, group: Collectives, town: Town) -> Tensor:
        own = common.clone()
        trailer = torch.zeros(TRAILER)
        trailer[WEIGHT] = rank + 1.0
        movement = Movement(common + rank, own, rank + 1.0, trailer)
        if rank == 3:
            town.lose(3)
            return own
        build = group._build

        def refuse_once(lane: str) -> object:
            vars(group)["_build"] = build
            raise PacelineError("Rank 3 was lost.")

        if refused:
            vars(group)["_build"] = refuse_once
        work = group.merge(movement, lambda: own, "The merge", 0)
        work.wait()
        return work.result()

    found = together(act, hosts)
    assert all(torch.equal(each, found[0]) for each in found[:3])
    torch.testing.assert_close(found[0], common + (0 * 1 + 1 * 2 + 2 * 3) / 6)
