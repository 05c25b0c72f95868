"""Launchers of several hosts meet: who fits gets a seat, who does not is told why, and the others wait on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from paceline.control.connection import HandshakeError, connect
from paceline.control.wire import Frame
from paceline.errors import PacelineError
from paceline.launch import rendezvous
from paceline.launch.rendezvous import Arrival, Rendezvous, Seat, join, seating, secret_of_run

SECRET = bytes(range(32))
FIRST = Arrival(node_rank=0, nnodes=3, nproc=2, servers=0, name="first", version="1")


def host(node_rank: int, **changes: Any) -> Arrival:
    return replace(FIRST, node_rank=node_rank, name=f"host-{node_rank}", **changes)


@pytest.fixture
def meeting() -> Iterator[Rendezvous]:
    with Rendezvous(("127.0.0.1", 0), SECRET, FIRST) as made:
        yield made


@pytest.fixture
def comes(meeting: Rendezvous) -> Iterator[Callable[[Arrival], Future[tuple[Seat, float]]]]:
    with ThreadPoolExecutor() as pool:
        yield lambda arrival: pool.submit(join, meeting.address, SECRET, arrival, 30.0)


def seated(meeting: Rendezvous, seconds: float = 30.0) -> Seat:
    arrivals = meeting.gather(seconds)
    return meeting.seat(arrivals, ("10.0.0.1", 7), "2026-01-01", nonce="once", origin=time.time() - 100)[0]


def test_hosts_of_unequal_size_get_their_ranks_workers_first(
    meeting: Rendezvous, comes: Callable[[Arrival], Future[tuple[Seat, float]]]
) -> None:
    others = [comes(host(2, nproc=1, servers=1)), comes(host(1, nproc=3))]
    seats = [seated(meeting), others[1].result()[0], others[0].result()[0]]
    assert [seat.ranks for seat in seats] == [[0, 1], [2, 3, 4], [5, 6]]
    assert {seat.world_size for seat in seats} == {7} and {seat.servers for seat in seats} == {1}
    assert seats[2].where == ["first"] * 2 + ["host-1"] * 3 + ["host-2"] * 2
    assert seats[1].control == ["10.0.0.1", 7] and seats[1].run == "2026-01-01"


def test_servers_are_the_last_ranks_of_the_run() -> None:
    ranks = seating([host(0, nproc=1, servers=2), host(1, nproc=2, servers=0), host(2, nproc=1, servers=1)])
    assert ranks == [[0, 4, 5], [1, 2], [3, 6]]


def test_every_host_has_the_same_beginning_by_its_own_clock(
    meeting: Rendezvous, comes: Callable[[Arrival], Future[tuple[Seat, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [comes(host(1)), comes(host(2))]
    arrivals = meeting.gather(30.0)
    _, origin = meeting.seat(arrivals, ("10.0.0.1", 7), "run", nonce="once", origin=time.time() - 1000)
    for other in others:
        seat, began = other.result()
        assert seat.elapsed >= 1000 and began >= origin and began - origin < 500, "its clock, less what has elapsed"


@pytest.mark.parametrize(
    ("arrival", "told"),
    [
        (host(1, nnodes=4), ["host-1 (127.0.0.1) was started with --nnodes 4, the first host first with 3"]),
        (host(0), ["Node rank 0 of host-0 (127.0.0.1) is taken by first", "same --node-rank"]),
        (host(2), ["Node rank 2 of host-2 (127.0.0.1) is taken by host-2", "from 0 to 2"]),
        (host(3), ["Node rank 3 of host-3 (127.0.0.1) does not exist among 3 hosts"]),
        (host(1, version="2"), ["Paceline is 2 on host-1 (127.0.0.1) and 1 on the first host"]),
    ],
)
def test_a_host_that_does_not_fit_is_told_why_and_the_others_wait_on(
    arrival: Arrival, told: list[str], meeting: Rendezvous, comes: Callable[[Arrival], Future[tuple[Seat, float]]]
) -> None:
    second = comes(host(2))
    wait_for_guests(meeting, {2})
    with pytest.raises(PacelineError) as refused:
        comes(arrival).result()
    assert all(words in str(refused.value) for words in told), str(refused.value)
    third = comes(host(1))  # the mistake was mended there, and nowhere else
    seated(meeting)
    assert second.result()[0].ranks == [4, 5] and third.result()[0].ranks == [2, 3]


def wait_for_guests(meeting: Rendezvous, wanted: set[int]) -> None:
    deadline = time.monotonic() + 30
    while set(meeting._guests) != wanted:
        assert time.monotonic() < deadline, meeting._guests
        time.sleep(0.005)


def test_a_wrong_secret_is_told_at_once(meeting: Rendezvous) -> None:
    with pytest.raises(HandshakeError, match=r"The secret of this process is not that of the run at 127\.0\.0\.1"):
        join(meeting.address, bytes(32), host(1), 30.0)


def test_hosts_that_do_not_come_are_named_to_all(
    meeting: Rendezvous, comes: Callable[[Arrival], Future[tuple[Seat, float]]]
) -> None:
    second = comes(host(1))
    wait_for_guests(meeting, {1})
    with pytest.raises(
        PacelineError, match=r"Only 2 of 3 hosts came to 127\.0\.0\.1:\d+ within 0 s; missing: node rank 2"
    ):
        meeting.gather(0.0)
    with pytest.raises(PacelineError, match="missing: node rank 2"):
        second.result()


def test_a_host_that_goes_away_before_all_are_there_may_come_again(
    meeting: Rendezvous, comes: Callable[[Arrival], Future[tuple[Seat, float]]]
) -> None:
    with connect(meeting.address, SECRET) as connection:
        connection.send(Frame("arrive", {**vars(host(1))}))
        wait_for_guests(meeting, {1})
    wait_for_guests(meeting, set())
    others = [comes(host(1)), comes(host(2))]
    seated(meeting)
    assert [other.result()[0].ranks for other in others] == [[2, 3], [4, 5]]


def test_all_meet_once_more_after_a_failed_attempt(
    meeting: Rendezvous, comes: Callable[[Arrival], Future[tuple[Seat, float]]]
) -> None:
    for _ in range(2):
        others = [comes(host(1)), comes(host(2))]
        assert seated(meeting).ranks == [0, 1]
        assert [other.result()[0].ranks for other in others] == [[2, 3], [4, 5]]


def test_a_first_host_that_ends_is_told(
    comes: Callable[[Arrival], Future[tuple[Seat, float]]], meeting: Rendezvous
) -> None:
    waiting = comes(host(1))
    wait_for_guests(meeting, {1})
    meeting.close()
    with pytest.raises(PacelineError, match="went away before all hosts had come"):
        waiting.result()


def test_a_first_host_may_come_later_but_not_never(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[:2]
    with pytest.raises(PacelineError, match=r"The first host did not answer at 127\.0\.0\.1:\d+ within 0 s"):
        join(address, SECRET, host(1), 0.0)
    tried = threading.Event()
    attempt = rendezvous.connect
    monkeypatch.setattr(rendezvous, "connect", lambda *place: (tried.set(), attempt(*place))[1])
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(join, address, SECRET, host(1), 30.0)
        tried.wait()
        with Rendezvous(address, SECRET, replace(FIRST, nnodes=2)) as late:
            with pytest.raises(PacelineError, match="nnodes 3"):
                waiting.result()
            assert late.address == address


def test_a_run_has_a_secret_of_its_own() -> None:
    assert secret_of_run(SECRET, "a") != secret_of_run(SECRET, "b") != SECRET
    assert secret_of_run(SECRET, "a") == secret_of_run(SECRET, "a") and len(secret_of_run(SECRET, "a")) == 32


def test_the_name_of_a_run_leads_nowhere_else(
    meeting: Rendezvous, comes: Callable[[Arrival], Future[tuple[Seat, float]]]
) -> None:
    others = [comes(host(1)), comes(host(2))]
    arrivals = meeting.gather(30.0)
    meeting.seat(arrivals, ("10.0.0.1", 7), "../elsewhere", nonce="once", origin=time.time())
    for other in others:
        with pytest.raises(PacelineError, match="no name of a run"):
            other.result()
