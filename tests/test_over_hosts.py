"""Sums inside of hosts first, then between them: ranks as threads of one process, with real process groups."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from town import Town, together

from paceline.backends.collectives import Collectives, CollectiveWork
from paceline.backends.lane import MAX, Care
from paceline.backends.over_hosts import OverHosts


def add_up(group: Collectives, tensor: Tensor) -> CollectiveWork[Tensor]:
    kept = tensor.clone()
    work: CollectiveWork[Tensor] = group.add_up(tensor, lambda: work.flight.tensor, "A sum", Care(kept.clone))
    return work


@pytest.mark.parametrize("hosts", ["aabb", "abcb", "abc", "aaabbc"])
def test_all_ranks_get_the_same_bits_of_the_sum_whatever_its_size(hosts: str) -> None:
    """Also of fewer numbers than there are hosts; and several may be on their way."""
    sizes = (1, 2, 7, 1000)
    brought = [
        [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for size in sizes] for rank in range(6)
    ]

    def act(rank: int, group: Collectives, town: Town) -> list[Tensor]:
        works = [add_up(group, tensor.clone()) for tensor in brought[rank]]
        assert isinstance(group._rounds.group, OverHosts)
        return [work.finish().clone() for work in works]

    found = together(act, hosts)
    for number in range(len(sizes)):
        assert all(torch.equal(found[0][number], each[number]) for each in found)
        expected = torch.stack([brought[rank][number] for rank in range(len(hosts))]).sum(0)
        torch.testing.assert_close(found[0][number], expected)


def test_the_largest_of_each_number_is_found() -> None:
    def act(rank: int, group: Collectives, town: Town) -> list[int]:
        flight = group._rounds.start(torch.tensor([rank, -rank, 5], dtype=torch.uint8), Care(), MAX)
        group._rounds.drain(group.look_around)
        return flight.tensor.tolist()

    assert together(act, "abb") == [[2, 255, 5]] * 3


@pytest.mark.parametrize(
    ("hosts", "lost"),
    [
        ("aabbb", {2}),  # the first of its host: the others of the host go on, with another first
        ("aabb", {0}),  # who is the first of all, too
        ("aabbc", {2, 3}),  # a host as a whole
        ("aab", {2}),  # one host is left
        ("aab", {0, 1}),  # one rank is left
    ],
)
def test_the_others_go_on_without_lost_ranks(hosts: str, lost: set[int]) -> None:
    """They are lost in the middle: the first sum is over all, and of the next two nobody has any result."""
    have_the_first = threading.Barrier(len(hosts))

    def act(rank: int, group: Collectives, town: Town) -> list[float]:
        first = float(add_up(group, torch.tensor([10.0**rank])).finish())
        have_the_first.wait()
        if rank in lost:
            if rank == min(lost):
                town.lose(*lost)
            return [first]
        works = [add_up(group, torch.tensor([times * 10.0**rank] * 3)) for times in (1, 2)]
        return [first, *(float(work.finish()[-1]) for work in works), float(add_up(group, torch.ones(1)).finish())]

    left = [rank for rank in range(len(hosts)) if rank not in lost]
    everybody, rest = sum(10.0**rank for rank in range(len(hosts))), sum(10.0**rank for rank in left)
    found = together(act, hosts)
    assert [found[rank] for rank in left] == [[everybody, rest, 2 * rest, len(left)]] * len(left)
