"""A merge in flight: ranks as threads of one process, with real process groups between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from paceline.backends import movement as module
from paceline.backends.collectives import Collectives
from paceline.backends.flat import TRAILER, WEIGHT
from paceline.backends.movement import BLOCK, Movement
from paceline.backends.peers import NobodyIsLost
from paceline.errors import PacelineError

RANKS = 3
SIZE = 9 * BLOCK + 5


class Lost(Exception):  # noqa: N818  (as the run's own is called elsewhere)
    """A peer is known to be lost."""


def together(
    act: Callable[[int, Collectives], Any], check_peers: Callable[[float], None] = lambda _: None
) -> list[Any]:
    """What the act of each rank returns."""
    store = c10d.HashStore()

    def rank(number: int) -> Any:
        peers = NobodyIsLost(store, check_peers)
        return act(number, Collectives(peers, number, RANKS, torch.device("cpu"), "127.0.0.1"))

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(rank, range(RANKS)))


def part(model: torch.Tensor, common: torch.Tensor, weight: float) -> Movement:
    trailer = torch.zeros(TRAILER)
    trailer[WEIGHT] = weight
    return Movement(model, common, weight, trailer)


def models() -> tuple[torch.Tensor, list[torch.Tensor]]:
    chance = torch.Generator().manual_seed(3)
    common = torch.randn(SIZE, generator=chance)
    moved = [common.clone() for _ in range(RANKS)]
    for rank, model in enumerate(moved):
        model[rank * BLOCK : (2 * rank + 1) * BLOCK] += torch.randn((rank + 1) * BLOCK, generator=chance)
        model[-1] += rank
    return common, moved


def test_merges_one_after_the_other_are_the_mean_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2 * BLOCK)  # several chunks, and one that is not full
    monkeypatch.setattr(module, "SMALL", 0)
    common, moved = models()

    def act(rank: int, group: Collectives) -> tuple[int, torch.Tensor]:
        own = common.clone()
        first = group.merge(part(moved[rank], own, 1.0 + rank), lambda: None, "The first", 0)
        second = group.merge(part(moved[rank], own, 1.0), lambda: own, "The second", 1)
        assert second.wait() and first.done
        return first.nbytes, second.result()

    found = together(act)
    for nbytes, merged in found:
        torch.testing.assert_close(merged, torch.stack(moved).mean(0))
        assert nbytes == 9 + 4 * (5 * BLOCK + 5 + TRAILER), "blocks 0 to 4 were moved by somebody, the others by nobody"
        assert torch.equal(merged, found[0][1])


def test_a_merge_that_breaks_names_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 0)
    """One rank brings a model of another size: the group breaks in the middle, and nobody waits for ever."""
    common, moved = models()

    def breaks(*_: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Movement, "pack", breaks)

    def act(rank: int, group: Collectives) -> str:
        work = group.merge(part(moved[rank], common.clone(), 1.0), lambda: None, "The merge of round 7", 7)
        assert work.wait()
        with pytest.raises(PacelineError, match="The merge of round 7 failed") as error:
            work.result()
        return str(error.value)

    assert all("Connection closed by peer" in text for text in together(act))


def test_who_waits_for_a_merge_looks_around() -> None:
    common, moved = models()
    asked: list[float] = []

    def check(seconds: float) -> None:
        asked.append(seconds)
        raise Lost

    def act(rank: int, group: Collectives) -> None:
        if rank == 0:  # the others never join
            with pytest.raises(Lost):
                group.merge(part(moved[rank], common.clone(), 1.0), lambda: None, "The merge", 0).wait()
            group.abandon()

    together(act, check)
    assert asked == [0.0]


def test_a_model_smaller_than_a_block_is_merged_and_nothing_empty_travels() -> None:
    """gloo is through with an empty tensor before the others have started it. A rank that was lost just then left the
    others with different numbers of collectives in their new group, and they waited for each other for ever."""
    models = [torch.tensor([1.0, 2.0, 3.0]) * (rank + 1) for rank in range(RANKS)]

    def act(rank: int, collectives: Collectives) -> torch.Tensor:
        own = part(models[rank], torch.zeros(3), 1.0)
        work = collectives.merge(own, lambda: None, "The merge", None)
        work.wait()
        work.result()
        with pytest.raises(AssertionError, match="empty collective"):
            collectives.sum_now(torch.empty(0), "Nothing")
        return own.common

    for merged in together(act):
        torch.testing.assert_close(merged, torch.tensor([2.0, 4.0, 6.0]))
