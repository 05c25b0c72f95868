"""Where servers stand, which part of the model each holds, and which of a launcher's ranks serve."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.launch.roles import place, serving_ranks
from paceline.rules.placement import Placement, cut

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=30)
PLACEMENTS = st.builds(
    Placement,
    workers=st.integers(1, 20),
    groups=st.integers(1, 6),
    parts=st.integers(1, 4),
    has_global=st.booleans(),
)


# ---- parts of a model


@given(sizes=SIZES, data=st.data())
def test_parts_are_whole_parameters_in_order_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    bounds = cut(sizes, parts)
    between = {sum(sizes[:number]) for number in range(len(sizes) + 1)}
    assert len(bounds) == parts and bounds[0][0] == 0 and bounds[-1][1] == sum(sizes)
    assert all(first < last and {first, last} <= between for first, last in bounds)
    assert all(end == begin for (_, end), (begin, _) in pairwise(bounds))
    assert bounds == cut(sizes, parts), "all ranks cut alike"


@given(sizes=SIZES, data=st.data())
def test_no_cut_is_off_by_more_than_a_parameter_where_there_is_room(sizes: list[int], data: st.DataObject) -> None:
    """Each is the nearest one to k/P of the model, unless a part would be empty."""
    parts = data.draw(st.integers(1, len(sizes)))
    ends = [last for _, last in cut(sizes, parts)][:-1]
    between = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    taken = 0
    for number, end in enumerate(ends, start=1):
        room = between[taken : len(sizes) - parts + number]
        wanted = sum(sizes) * number / parts
        assert abs(end - wanted) == min(abs(each - wanted) for each in room)
        taken = between.index(end) + 1


@given(count=st.integers(1, 12), size=st.integers(1, 100), times=st.integers(1, 5))
def test_equal_parameters_make_equal_parts(count: int, size: int, times: int) -> None:
    bounds = cut([size] * (count * times), count)
    assert {last - first for first, last in bounds} == {size * times}


@pytest.mark.parametrize("parts", [0, 4, -1])
def test_a_model_is_not_cut_into_more_parts_than_it_has_parameters(parts: int) -> None:
    with pytest.raises(PacelineError, match=f"A model of 3 parameters cannot be cut into {parts} parts"):
        cut([5, 5, 5], parts)


# ---- ranks


@given(placement=PLACEMENTS)
def test_every_server_has_one_place_and_the_places_are_all(placement: Placement) -> None:
    places = [placement.place(rank) for rank in placement.ranks]
    copies = placement.groups + placement.has_global
    assert sorted(places) == [(group, part) for group in range(copies) for part in range(placement.parts)]
    assert placement.ranks[0] == placement.workers and len(placement.ranks) == copies * placement.parts
    for group in range(copies):
        assert [placement.place(rank) for rank in placement.servers_of(group)] == [
            (group, part) for part in range(placement.parts)
        ]


@given(placement=PLACEMENTS)
def test_peers_hold_the_same_part_of_the_other_copies(placement: Placement) -> None:
    for rank in placement.ranks:
        group, part = placement.place(rank)
        others = [each for each in range(placement.copies) if each != group]
        assert placement.peers(rank) == [placement.servers_of(other)[part] for other in others]
        assert all(rank in placement.peers(peer) for peer in placement.peers(rank))
    if placement.has_global and placement.groups:
        last = placement.peers(placement.workers)[-1:]
        assert [placement.place(rank)[0] for rank in last] == [placement.groups], "the global server is the last peer"


@given(placement=PLACEMENTS)
def test_workers_begin_in_groups_of_equal_size_in_the_order_of_their_ranks(placement: Placement) -> None:
    groups = [placement.first_group(worker) for worker in range(placement.workers)]
    assert groups == sorted(groups) and set(groups) <= set(range(placement.groups))
    sizes = [groups.count(group) for group in range(placement.groups)]
    assert max(sizes) - min(sizes) <= 1


# ---- who serves


@given(world=st.integers(1, 40), data=st.data())
def test_workers_come_first_and_servers_behind_them_each_in_order(world: int, data: st.DataObject) -> None:
    serving = sorted(data.draw(st.sets(st.integers(0, world - 1))))
    assert serving_ranks(serving, world, world) == serving
    if len(serving) > 1:
        assert serving_ranks(",".join(map(str, reversed(serving))), world, world) == serving
    places = [place(rank, world, serving) for rank in range(world)]
    assert sorted(places) == list(range(world))
    workers = world - len(serving)
    assert [places[rank] for rank in serving] == list(range(workers, world))
    assert [places[rank] for rank in range(world) if rank not in serving] == list(range(workers))


@given(hosts=st.integers(1, 8), ranks_of_a_host=st.integers(1, 8))
def test_one_of_every_host_serves(hosts: int, ranks_of_a_host: int) -> None:
    chosen = serving_ranks("host", hosts * ranks_of_a_host, ranks_of_a_host)
    assert [rank // ranks_of_a_host for rank in chosen] == list(range(hosts))
    assert {rank % ranks_of_a_host for rank in chosen} == {ranks_of_a_host - 1}


def test_servers_are_the_last_ones_or_those_that_are_named() -> None:
    assert serving_ranks(0, 4, 4) == serving_ranks("0", 4, 4) == serving_ranks([], 4, 4) == []
    assert serving_ranks(2, 5, 5) == serving_ranks("2", 5, 5) == serving_ranks((4, 3), 5, 5) == [3, 4]
    assert serving_ranks("3, 0", 4, 4) == [0, 3]


@pytest.mark.parametrize("servers", ["many", "1,x", "1.5", "", "1,", [0, 0], "2,2", 5, -1, [4], "0,4", [-1]])
def test_servers_that_cannot_be_are_refused(servers: str | int | list[int]) -> None:
    with pytest.raises(PacelineError, match=r"^servers=.* (says neither how many|does not fit a run of 4 ranks)"):
        serving_ranks(servers, world_size=4, ranks_of_a_host=4)
