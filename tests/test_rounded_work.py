"""All-reduces of rounded gradients in whose middle a rank is lost, beside the simulator's arithmetic: the same, to the
bit. Ranks are threads of one process, with real process groups between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from town import RANKS, Town, together

from paceline.backends.collectives import Collectives, CollectiveWork
from paceline.backends.flat import TRAILER, Brought, FlatSum
from paceline.backends.replica import Replica
from paceline.backends.replica_learner import ReplicaLearner
from paceline.node import Gradient

ROUNDS = 4
CODES = ("fp16", "bf16", "int8")


def learner(rank: int, code: str) -> ReplicaLearner:
    model = nn.Linear(40, 30)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return ReplicaLearner(replica, lambda model, indices: None, samples=1, rank=rank).sending_as(code)


def gradient(own: ReplicaLearner, rank: int, round_number: int) -> Gradient:
    dice = torch.Generator().manual_seed(RANKS * round_number + rank)
    flat = own.replica.buffer()
    flat.sums.copy_(torch.randn(own.replica.size, generator=dice))
    return Gradient(flat, rank + 1)


def bring(group: Collectives, own: ReplicaLearner, round_number: int) -> CollectiveWork[Tensor]:
    contribution, _ = own.contribution(gradient(own, group.rank, round_number), True)
    assert isinstance(contribution, FlatSum)
    brought = Brought(contribution, own.replica, keep=True, works=lambda: True)
    return group.add_up_rounded(brought, lambda: brought.flat.whole.clone(), "The all-reduce", round_number)


def by_hand(code: str, who: Callable[[int], list[int]]) -> list[Tensor]:
    """What the simulator gets of every round, if these take part in it."""
    own, sums = [learner(rank, code) for rank in range(RANKS)], []
    for number in range(ROUNDS):
        # whoever takes part in no round any more was lost in the middle of one, and had brought something
        brought = {rank: own[rank].contribution(gradient(own[rank], rank, number), True)[0] for rank in who(number)}
        reduced: Any = own[0].reduce(list(brought.values()))
        sums.append(reduced.clone())
        for rank, each in brought.items():
            own[rank].total(each, reduced)
    return sums


def assert_all_have(found: list[Any], wanted: list[Tensor], ranks: range) -> None:
    for rank in ranks:
        for number, (one, other) in enumerate(zip(found[rank], wanted, strict=True)):
            where = f"round {number} on rank {rank}"
            assert torch.equal(one[:-TRAILER], other[:-TRAILER]), where
            # the order in which gloo adds is its own: squares may differ in the last bit, counts may not
            torch.testing.assert_close(one[-TRAILER:], other[-TRAILER:])
            assert one[-TRAILER] == other[-TRAILER], where
            assert torch.equal(one, found[ranks[0]][number]), where


@pytest.mark.parametrize("code", CODES)
def test_what_nobody_holds_is_repeated_with_the_same_codes_in_other_parts(code: str) -> None:
    def act(rank: int, group: Collectives, town: Town) -> list[Tensor]:
        own = learner(rank, code)
        sums = [bring(group, own, number).finish() for number in range(2)]
        if rank == RANKS - 1:
            town.lose(rank)
            return sums
        return sums + [bring(group, own, number).finish() for number in range(2, ROUNDS)]

    wanted = by_hand(code, lambda number: list(range(RANKS if number < 2 else RANKS - 1)))
    assert_all_have(together(act), wanted, range(RANKS - 1))


@pytest.mark.parametrize("code", CODES)
def test_what_one_rank_holds_the_others_get_and_each_keeps_what_it_had_to(code: str) -> None:
    """Rank 0 holds the second round, with the lost rank's part in it; the others hear of the loss before they look."""
    gone = threading.Event()

    def act(rank: int, group: Collectives, town: Town) -> list[Tensor]:
        own = learner(rank, code)
        sums = [bring(group, own, 0).finish()]
        second = bring(group, own, 1)
        if rank == 0:
            assert second.wait()
            town.lose(RANKS - 1)
            gone.set()
        gone.wait()
        if rank == RANKS - 1:
            return sums
        second.flight.poll = lambda: second.flight.held  # type: ignore[method-assign]  # as if it had broken here
        group.look_around()
        return [*sums, second.finish(), *(bring(group, own, number).finish() for number in range(2, ROUNDS))]

    wanted = by_hand(code, lambda number: list(range(RANKS if number < 2 else RANKS - 1)))
    assert_all_have(together(act), wanted, range(RANKS - 1))


def test_all_but_one_may_be_lost_before_the_first_round() -> None:
    def act(rank: int, group: Collectives, town: Town) -> list[Tensor]:
        own = learner(rank, "int8")
        if rank:
            town.lose(rank)
            return []
        return [bring(group, own, number).finish() for number in range(ROUNDS)]

    assert_all_have(together(act), by_hand("int8", lambda number: [0]), range(1))
