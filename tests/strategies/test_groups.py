"""Groups of workers in virtual time, with speeds that are known: who ends where, who moves and who does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from paceline.backends.simulated import simulate
from paceline.errors import PacelineError
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import SlowDown
from paceline.simulator.network import Network
from paceline.strategies import STRATEGIES, create
from paceline.summary import account

Play = Callable[..., Any]
MIXED = (0.25, 1.0, 0.3, 0.95)  # 1 and 3 are fast, 0 and 2 slow


def served(speeds: Sequence[float], servers: int, slow_down: SlowDown | None = None) -> Cluster:
    network, faults = Network(latency=0.01), [slow_down] if slow_down else []
    return replace(
        Cluster.from_speeds(speeds, micro_batch_seconds=1.0, network=network, faults=faults), servers=servers
    )


def groups_of(played: Any, workers: int) -> list[list[int]]:
    """Of each worker: the servers that it has joined, in order."""
    return [[m.to - workers for m in played.sent if m.sender == rank and m.what == "join"] for rank in range(workers)]


def notes(played: Any) -> list[str]:
    return [event["text"] for event in played.of_kind("note")]


def assert_books(played: Any, samples: int) -> None:
    books = account(played.events)
    assert books.errors == () and books.in_flight == 0 and books.applied == samples and books.discarded == 0, books
    assert played.ledger.complete and played.ledger.used == samples
    ends = [learner.parameters for learner in played.learners]
    assert all(torch.equal(end, ends[0]) for end in ends)


# ---- forming


@pytest.mark.parametrize("grouping", ["equal", "natural"])
def test_workers_of_like_speed_find_each_other(play: Play, grouping: str) -> None:
    """They begin in the order of their ranks, 0+1 and 2+3; the first group is then the fast one's."""
    played = play(create(f"gssp:grouping={grouping}:warm_up=2"), served(MIXED, 2), samples=400)
    assert groups_of(played, 4) == [[0, 1], [0], [1], [1, 0]]
    [note] = notes(played)
    apart = "2 groups of equal size" if grouping == "equal" else "2 groups at least 3."
    assert note.startswith(apart) and "workers 1+3 (1.02 to 1.07 s), 0+2 (3.35 to 4.02 s). Expected: 2" in note
    assert {event["rank"] for event in played.of_kind("note")} == {4}, "the first server decides"
    assert_books(played, 800)


def test_natural_groups_are_as_many_as_the_speeds_ask_for(play: Play) -> None:
    played = play(create("gssp:warm_up=2"), served((0.25, 1.0, 0.26, 0.95), 4), samples=400)
    [note] = notes(played)
    assert note.startswith("2 groups at least 3.") and "3 would be only 1.05 times apart" in note
    assert [each[-1] for each in groups_of(played, 4)] == [1, 0, 1, 0], "two of the servers are left without workers"
    assert_books(played, 800)
    alike = play(create("gssp:warm_up=2"), served((1.0, 0.95, 0.9, 1.0), 2), samples=400)
    assert notes(alike)[0].startswith("One group: workers 0-3") and [g[-1] for g in groups_of(alike, 4)] == [0] * 4
    assert_books(alike, 800)


def test_equal_groups_are_equal_whatever_the_speeds(play: Play) -> None:
    played = play(create("gssp:grouping=equal:warm_up=1"), served((1.0, 0.99, 0.98, 0.97, 0.96), 3), samples=400)
    assert [each[-1] for each in groups_of(played, 5)] == [0, 0, 1, 1, 2]
    assert notes(played)[0].startswith("3 groups of equal size: workers 0+1 (")


def test_given_groups_are_taken_at_once(play: Play) -> None:
    played = play(create("gssp:grouping=0+3/1-2:warm_up=1"), served(MIXED, 2), samples=400)
    assert notes(played) == ["As given: workers 0+3, 1+2."] and groups_of(played, 4) == [[0], [0, 1], [1], [1, 0]]
    for rank in (1, 3):
        last = max(m.t for m in played.sent if m.sender == rank and m.what == "join")
        assert last < played.of_kind("compute", rank)[0]["t"], "before the first micro-batch"
    assert_books(played, 800)


def test_an_iteration_is_measured_without_the_wait_for_others(play: Play) -> None:
    """Before groups are formed the fast wait for the slow of their group; that does not make them slow."""
    played = play(create("gssp:staleness=0:warm_up=3:regroup=false"), served(MIXED, 2), samples=400)
    told = [float(m.words[1]) for m in played.sent if m.what == "time" and m.words[0] == "1"]
    assert told and all(seconds == pytest.approx(1.0 + 2 * 0.01, rel=1e-6) for seconds in told)
    waited = [after["t"] - before["end"] for before, after in pairwise(played.of_kind("compute", 1))]
    assert max(waited) > 2, "it has waited"


# ---- moving

HALF_SLOW = (1.0, 1.0, 1.0, 0.25, 0.25, 0.25)
SLOWER = SlowDown(rank=1, at=30.0, duration=1e9, factor=4.0)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("compress", ["none", "top-k:ratio=0.3"])
def test_who_turns_slow_moves_after_two_looks(play: Play, compress: str, parts: int) -> None:
    strategy = create(f"gssp:warm_up=2:parts={parts}:compress={compress}")
    played = play(strategy, served(HALF_SLOW, 2 * parts, SLOWER), samples=400, epochs=3, micro_batch=4, pieces=2)
    joined = groups_of(played, 6)
    fast, slow = [*range(parts)], [*range(parts, 2 * parts)]
    assert joined == [fast, fast + slow, fast, slow, slow, slow], "one moves, and once"
    formed, moved = notes(played)
    assert formed.startswith("2 groups at least 3.") and "workers 0-2 (1.02 s), 3-5 (4.02 s)" in formed
    assert moved.startswith("Worker 1 takes 4.02 s an iteration, 3.9") and moved.endswith("in two looks running.")
    looks = [m.t for m in played.sent if m.what == "time" and m.words[0] == "1" and m.t > 30.0]
    decided = next(event["t"] for event in played.of_kind("note") if event["text"] == moved)
    assert len([t for t in looks if t <= decided]) >= 2
    assert_books(played, 1200)


def test_nobody_moves_without_regroup_or_as_published(play: Play) -> None:
    for text in ("gssp:warm_up=2:regroup=false", "gssp:warm_up=2:paper", "gssp:warm_up=2:grouping=0-2/3-5"):
        played = play(create(text), served(HALF_SLOW, 2, SLOWER), samples=400, epochs=3, micro_batch=4)
        assert groups_of(played, 6) == [[0]] * 3 + [[1]] * 3 and len(notes(played)) == 1
        assert_books(played, 1200)


def test_a_mover_leaves_nothing_behind_and_starts_with_the_slowest_of_its_new_group(play: Play) -> None:
    text = "gssp:warm_up=2:staleness=1:compress=top-k:ratio=0.3"
    played = play(create(text), served(HALF_SLOW, 2, SLOWER), samples=400, epochs=3, micro_batch=4)
    own = [m for m in played.sent if m.sender == 1]
    [gone] = [number for number, m in enumerate(own) if m.what == "gone" and m.to == 6 and m.t < own[-1].t]
    assert own[gone - 1].what == "rest" and own[gone - 1].to == 6, "what was kept back goes to the old group"
    assert own[gone + 1].what == "join" and own[gone + 1].to == 7
    sent, computed = torch.zeros(4).double(), torch.zeros(4).double()
    for message in own[:gone]:
        if message.what in ("push", "rest"):
            places = message.tensors[0].long() if message.what == "push" else slice(None)
            sent[places] += message.tensors[-1]
        if message.what == "push":
            indices, point = played.micro_batches[1][int(message.words[0]) - 1]
            computed += played.gradient(point, indices)
    torch.testing.assert_close(sent, computed, rtol=1e-10, atol=1e-12)
    # In its new group it may be two ahead of the others and they two ahead of it, no more, from the first push on.
    came = own[gone + 1].t + 0.01
    steps = played.of_kind("step", 7)
    since = [event for event in steps if event["t"] > came]
    done = {rank: sum(event["of"] == rank and event["t"] <= came for event in steps) for rank in (3, 4, 5)}
    done[1] = min(done.values())
    assert sum(event["of"] == 1 for event in since) > 3
    last = {rank: max(event["t"] for event in since if event["of"] == rank) for rank in done}
    for event in since:
        done[event["of"]] += 1
        going_on = [done[rank] for rank in done if last[rank] > event["t"]]
        assert not going_on or done[event["of"]] - min(going_on) <= 2
    assert_books(played, 1200)


# ---- what cannot be


@pytest.mark.parametrize(
    ("text", "workers", "servers", "what"),
    [
        ("gssp:grouping=0-1/2", 4, 2, "Not every worker is in one group; in no group: 3"),
        ("gssp:grouping=0-1/1-3", 4, 2, "named twice: 1"),
        ("gssp:grouping=0-1/2-4", 4, 2, "not in this run: 4"),
        ("gssp:grouping=0-1//2-3", 4, 3, ""),
        ("gssp:grouping=0-a/2-3", 4, 2, ""),
        ("gssp:grouping=0/1/2/3", 4, 3, "grouping=0/1/2/3 needs more than 3 servers"),
        ("gssp:grouping=0-1/2-3:parts=2", 4, 2, "needs more than 2 servers"),
        ("gssp:grouping=0-1/2-3:exchange=global", 4, 2, "needs more than 2 servers"),
        ("gssp:parts=2", 4, 3, "3 servers cannot be groups of 2"),
        ("gssp:parts=3", 4, 2, "2 servers cannot be groups of 3"),
        ("gssp:exchange=global", 4, 1, "1 servers cannot be groups of 1 with a global server behind them"),
        ("gssp", 4, 0, "The strategy gssp needs workers and servers, and has 4 and 0"),
        ("ssp", 4, 0, "The strategy ssp needs workers and servers, and has 4 and 0"),
        ("ssp", 2, 100, "A model of 64 parameters cannot be cut into 100 parts"),
        *((name, 2, 1, f"The strategy {name} has no servers, and was given 1") for name in ("abs-sgd", "d-psgd")),
    ],
)
def test_groups_and_servers_that_do_not_fit_are_refused(text: str, workers: int, servers: int, what: str) -> None:
    with pytest.raises(PacelineError) as error:
        simulate(create(text), served((1.0,) * workers, servers), seconds=3.0)
    assert what in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("gssp:grouping=fast", "must be one of natural, equal"),
        ("gssp:parts=0", "whole number of at least 1"),
        ("gssp:warm_up=0", "whole number of at least 1"),
        ("gssp:staleness=-1", "whole number of at least 0"),
        ("gssp:exchange=all", "must be one of delta, gradient, global"),
        ("gssp:paper:exchange=global", "is gradient in the paper"),
        ("gssp:paper:grouping=0/1", "is equal in the paper"),
        ("dssp:low=5:high=3", "at least 5"),
        ("ssp:ratio=0.1", "has no meaning with compress=none"),
        ("ssp:compress=gdtopk:ratio=0.1", "has no meaning with compress=gdtopk"),
        ("ssp:compress=zip", "must be one of none, top-k, gdtopk, dgc"),
    ],
)
def test_options_that_cannot_be_are_refused(text: str, what: str) -> None:
    with pytest.raises(PacelineError) as error:
        create(text)
    assert what in str(error.value)


@pytest.mark.parametrize("ratio", ["0", "1.5"])
def test_a_share_that_cannot_be_sent_is_refused(play: Play, ratio: str) -> None:
    with pytest.raises(PacelineError):
        play(create(f"ssp:compress=top-k:ratio={ratio}"), served((1.0, 1.0), 1))


def test_every_strategy_says_how_many_servers_it_takes() -> None:
    for name in STRATEGIES:
        strategy = create(name)
        for workers in (1, 2, 7):
            strategy.check_servers(workers, strategy.servers_for(workers))
    assert [create("gssp").servers_for(workers) for workers in (1, 3, 9)] == [1, 3, 4]
    assert create("gssp:grouping=0/1-2:exchange=global:parts=2").servers_for(3) == 6


def test_nobody_waits_for_others_before_speeds_are_known(play: Play) -> None:
    """Groups are not of similar speed yet: who waited then would wait for the slowest of all."""
    played = play(create("gssp:staleness=1"), served((1.0, 0.2, 1.0, 0.2), 2), samples=400, epochs=3)
    formed = min(event["t"] for event in played.of_kind("note"))
    done = []
    for rank in range(4):
        early = [event for event in played.of_kind("compute", rank) if event["end"] < formed]
        for before, after in pairwise(early):
            assert after["t"] - before["end"] == pytest.approx(2 * 0.01, abs=1e-9), "there and back, and no more"
        done.append(len(early))
    assert min(done[0], done[2]) > 3 + max(done[1], done[3]), "a bound of 1 would have held them"
    assert groups_of(played, 4)[0][-1] != groups_of(played, 4)[1][-1]


def test_the_bound_holds_from_when_groups_are_formed(play: Play) -> None:
    """The two of a group differ by less than groups do, and the faster of them is held."""
    played = play(create("gssp:staleness=1:regroup=False"), served((1.0, 0.85, 0.25, 0.21), 2), samples=400, epochs=6)
    formed = max(m.t for m in played.sent if m.what in ("groups", "join"))
    over = min(m.t for m in played.sent if m.what == "leaves")  # nobody waits for one without data
    for fast, slow in ((0, 1), (2, 3)):
        ends = sorted((e["end"], rank) for rank in (fast, slow) for e in played.of_kind("compute", rank))
        lead, most = 0, 0
        for end, rank in ends:
            if formed + 0.1 < end < over:
                lead += 1 if rank == fast else -1
                most = max(most, lead)
        assert 1 <= most <= 3, "s + 1, and one more that began before"
