"""Membership: who is here, and whether all mean the same run."""

from __future__ import annotations

import pytest

from paceline.control.membership import NEVER_CAME, Membership
from paceline.errors import PacelineError

RUN = {
    "version": "1.0",
    "strategy": "abs-sgd",
    "options": {"delay": 1},
    "world_size": 2,
    "parameters": [["fc.weight", [10, 32], "float32", [32, 1]], ["fc.bias", [10], "float32", [1]]],
    "data": {"samples": 1000},
}
ADMITS = {"admits": True}


def arrived(*descriptions):
    members = Membership(world_size=len(descriptions), heartbeat_timeout=5.0)
    for rank, description in enumerate(descriptions):
        members.arrive(rank, description, ("127.0.0.1", 1000 + rank), now=0.0)
    return members


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "1.1"}, "version of Paceline is 1.1 on rank 1 but 1.0 on rank 0"),
        ({"strategy": "all-reduce"}, "strategy is all-reduce on rank 1 but abs-sgd on rank 0"),
        ({"world_size": 3}, "world size is 3 on rank 1 but 2 on rank 0"),
        ({"options": {"delay": 2}}, "option delay is 2 on rank 1 but 1 on rank 0"),
        ({"options": {}}, "option delay is given on rank 0 but not on rank 1"),
        ({"data": {"samples": 999}}, "data set's samples is 999 on rank 1 but 1000 on rank 0"),
        (
            {"parameters": [["fc.weight", [10, 64], "float32", [64, 1]], ["fc.bias", [10], "float32", [1]]]},
            r"parameter fc.weight has shape \(10, 64\) on rank 1 but \(10, 32\) on rank 0",
        ),
        (
            {"parameters": [["fc.weight", [10, 32], "float32", [32, 1]], ["fc.bias", [10], "bfloat16", [1]]]},
            "parameter fc.bias is bfloat16 on rank 1 but float32 on rank 0",
        ),
        (
            {"parameters": [["fc.weight", [10, 32], "float32", [1, 10]], ["fc.bias", [10], "float32", [1]]]},
            r"parameter fc.weight lies in memory with strides \(1, 10\) on rank 1 but \(32, 1\) on rank 0",
        ),
        ({"parameters": RUN["parameters"][:1]}, "only rank 0 has a parameter fc.bias; rank 1 has none"),
        ({"parameters": [*RUN["parameters"], ["more", [1], "float32", [1]]]}, "only rank 1 has a parameter more"),
        ({"parameters": RUN["parameters"][::-1]}, "fc.bias on rank 1 stands where fc.weight stands on rank 0"),
        ({"seed": 7}, "description's seed is given on rank 1 but not on rank 0"),
    ],
)
def test_the_first_difference_is_named(change, words):
    with pytest.raises(PacelineError, match=words):
        arrived(RUN, RUN | change)


def test_the_generation_counts_changes_after_everyone_arrived():
    members = arrived(RUN | ADMITS, RUN | ADMITS)
    assert members.begun and members.generation == 0 and members.missing == []
    assert members.lose(1, "killed") and members.generation == 1
    assert members.lost == {1: "killed"} and members.roster == [("127.0.0.1", 1000), None]
    assert not members.lose(1, "killed")
    assert members.lose(1, "exit code 9") and members.generation == 1  # a better reason is news, but no change
    members.arrive(1, RUN | ADMITS, None, now=1.0)
    assert members.generation == 1 and members.lost == {1: "exit code 9"}, (
        "a newcomer that waits is still lost to others"
    )
    assert members.joining == {1} and members.taking_part == [0]
    members.admit()
    assert members.generation == 2 and members.lost == {} and members.taking_part == [0, 1]
    assert members.admitted == ([1], 2)
    members.leave(0)
    assert members.generation == 3 and members.left == {0}
    assert not members.lose(0, "exit code 0")


def test_a_newcomer_that_goes_before_it_takes_part_changes_nothing():
    members = arrived(RUN | ADMITS, RUN | ADMITS)
    members.lose(1, "killed")
    members.arrive(1, RUN | ADMITS, None, now=1.0)
    assert members.lose(1, "killed") and members.generation == 1 and not members.joining
    members.admit()
    assert members.admitted == ([], 2) and members.lost == {1: "killed"}


def test_who_cannot_join():
    members = arrived(RUN, RUN)
    members.lose(1, "killed")
    with pytest.raises(PacelineError, match="The strategy abs-sgd cannot take a newcomer into a running training yet"):
        members.arrive(1, RUN, None, now=1.0)
    over = arrived(RUN | ADMITS, RUN | ADMITS)
    over.leave(0)
    over.leave(1)
    with pytest.raises(PacelineError, match="Rank 1 cannot join the run any more"):
        over.arrive(1, RUN | ADMITS, None, now=1.0)


def test_a_server_cannot_be_replaced_and_a_worker_can():
    served = RUN | ADMITS | {"servers": 1}
    members = arrived(served, served, served)
    assert members.servers == range(2, 3)
    for rank in (1, 2):
        members.lose(rank, "killed")
    members.arrive(1, served, None, now=1.0)
    with pytest.raises(PacelineError, match="Rank 2 is a server, and a server that was lost cannot be replaced"):
        members.arrive(2, served, None, now=1.0)
    assert members.joining == {1} and members.lost[2] == "killed"


def test_silence():
    members = arrived(RUN, RUN)
    members.heard(1, 4.0)
    assert members.silent(5.0) == [] and members.silent(6.0) == [0] and members.silent(9.5) == [0, 1]


def test_ranks_that_cannot_be():
    members = arrived(RUN, RUN)
    with pytest.raises(PacelineError, match="Rank 2 does not exist"):
        members.arrive(2, RUN, None, 0.0)
    with pytest.raises(PacelineError, match="Rank 1 is already here"):
        members.arrive(1, RUN, None, 0.0)


def test_further_ranks_get_the_next_numbers_and_take_part_when_they_are_let_in():
    members = arrived(*[RUN | ADMITS] * 2)
    assert members.enlist(2) == [2, 3] and members.enlist(1) == [4]
    assert members.lost == {} and len(members.roster) == 2, "to the others nothing has changed"
    members.arrive(3, RUN | ADMITS, ("127.0.0.1", 1003), now=0.0)
    assert members.joining == {3} and members.generation == 0 and len(members.roster) == 2
    before = Membership(2, 5.0)
    before.restore(members.state(), now=0.0)
    assert before.state() == members.state()
    members.admit()
    assert members.admitted == ([3], 1) and members.roster[3] == ("127.0.0.1", 1003)
    assert members.lost == {2: NEVER_CAME} and members.taking_part == [0, 1, 3]
    members.arrive(2, RUN | ADMITS, None, now=0.0)
    assert members.joining == {2}, "who was given a number may still come"


def test_a_further_rank_that_dies_while_it_waits_was_never_there():
    members = arrived(*[RUN | ADMITS] * 2)
    (rank,) = members.enlist(1)
    members.arrive(rank, RUN | ADMITS, None, now=0.0)
    assert members.lose(rank, "killed") and members.lost == {} and members.generation == 0
    members.admit()
    assert members.admitted == ([], 1) and members.seats == 2


def test_nobody_comes_who_was_given_no_number():
    with pytest.raises(PacelineError, match="cannot take a newcomer"):
        arrived(RUN, RUN).enlist(1)
    with pytest.raises(PacelineError, match="Rank 2 does not exist"):
        arrived(*[RUN | ADMITS] * 2).arrive(2, RUN | ADMITS, None, now=0.0)
