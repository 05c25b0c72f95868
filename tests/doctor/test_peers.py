"""Peers over real sockets: measured, refused, unreachable, silent; nothing waits for ever."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline import __version__
from paceline.control.connection import Connection, Listener, connect
from paceline.control.wire import Frame
from paceline.doctor import probing
from paceline.doctor.host import OK, PROBLEM, WARNING, Device, Finding, Host
from paceline.doctor.peers import call, differences, parse_peers, unreachable
from paceline.doctor.probing import Responder
from paceline.errors import PacelineError
from paceline.simulator.network import Network

SECRET, ANOTHER = b"the peers' secret" * 2, b"another secret" * 2
OWN = Host("here", {"paceline": __version__, "torch": "2.13.0"})
THERE = Host(
    "there",
    {"paceline": __version__, "torch": "2.13.0"},
    (Device("cuda:0", "A GPU", 1, 0.02, 0.05), Device("cuda:1", "Another", 1, 0.04, 0.0)),
    Network(latency=1e-5, bandwidth=1e10),
    (Finding("gpus", OK, "2 usable"),),
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter transfers: what they measure is not the matter here."""
    monkeypatch.setattr(probing, "LONG_ENOUGH", 0.001)
    monkeypatch.setattr(probing, "ROUND_TRIPS", 5)


@pytest.fixture
def asked() -> list[tuple[str, str | None]]:
    return []


@pytest.fixture
def responder(asked: list[tuple[str, str | None]], quick: None) -> Iterator[Responder]:
    def examine(workload: str, model: str | None) -> Host:
        asked.append((workload, model))
        return THERE

    with Responder(SECRET, examine, ("127.0.0.1", 0)) as made:
        yield made


@pytest.mark.parametrize("hiccups", [{1}, {2}, {5}, {1, 4}])
def test_a_machine_that_was_busy_for_a_moment_is_not_a_slow_way(hiccups: set[int]) -> None:
    """Nor one that is too fast to be believed, because a short transfer was taken for a long one."""
    made: list[int] = []

    def transfer(nbytes: int) -> float:
        made.append(nbytes)
        return 0.002 + nbytes / 1e7 + 0.5 * (len(made) in hiccups)

    assert 1 / probing.seconds_a_byte(transfer, 0.001) == pytest.approx(1e7)


def test_a_transfer_over_a_long_way_lasts_several_round_trips() -> None:
    """A second of latency: what takes less than several would tell nothing but it."""
    lasted: list[float] = []

    def transfer(nbytes: int) -> float:
        lasted.append(2.0 + nbytes / 1e7)
        return lasted[-1]

    assert 1 / probing.seconds_a_byte(transfer, 1.0) == pytest.approx(1e7)
    assert lasted[-1] > 6.0


def test_a_peer_is_measured_and_tells_what_it_is(responder: Responder, asked: list[tuple[str, str | None]]) -> None:
    peer = call(responder.address, SECRET, OWN, "digits", "mlp")
    assert asked == [("digits", "mlp")]
    assert peer.host == THERE, "every figure came through whole"
    assert peer.link is not None and 0 < peer.link.latency < 1 and 1e5 < peer.link.bandwidth < 1e12
    assert [finding.verdict for finding in peer.findings] == [OK]


def test_an_infinite_bandwidth_travels_too(quick: None) -> None:
    endless = replace(THERE, network=Network())
    with Responder(SECRET, lambda workload, model: endless, ("127.0.0.1", 0)) as responder:
        assert call(responder.address, SECRET, OWN, "digits", None).host == endless


def test_a_wrong_secret_is_told_as_such(responder: Responder, asked: list[tuple[str, str | None]]) -> None:
    peer = call(responder.address, ANOTHER, OWN, "digits", None)
    (told,) = peer.findings
    assert peer.host is None and asked == []
    assert (told.verdict, told.said) == (PROBLEM, "it has another secret") and "--secret-file" in told.remedy


def test_what_goes_wrong_there_is_told_here(quick: None) -> None:
    def examine(workload: str, model: str | None) -> Host:
        raise PacelineError("The data is missing.", remedy="Get it.")

    with Responder(SECRET, examine, ("127.0.0.1", 0)) as responder:
        (told,) = call(responder.address, SECRET, OWN, "cifar-10", None).findings
    assert (told.verdict, told.said, told.remedy) == (PROBLEM, "it said: The data is missing.", "Get it.")


def test_who_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as freed:
        address = freed.getsockname()
    (told,) = call(address, SECRET, OWN, "digits", None).findings
    assert told.verdict == PROBLEM and told.said == "nobody listens there" and "--listen" in told.remedy


def test_who_accepts_and_says_nothing_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.control.connection.HANDSHAKE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (told,) = call(server.getsockname(), SECRET, OWN, "digits", None).findings
    assert told.verdict == PROBLEM and "did not answer like Paceline" in told.said


def test_who_never_ends_measuring_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "EXAMINING_SECONDS", 0.05)
    done = threading.Event()

    def examine(workload: str, model: str | None) -> Host:
        done.wait(30)
        return THERE

    with Responder(SECRET, examine, ("127.0.0.1", 0)) as responder:
        try:
            (told,) = call(responder.address, SECRET, OWN, "digits", None).findings
        finally:
            done.set()
    assert told.verdict == PROBLEM and told.said == "no answer within 0 s"


def test_another_program_with_the_secret_is_no_doctor() -> None:
    def answer(connection: Connection) -> None:
        connection.receive()
        connection.send(Frame("done"))

    with Listener(SECRET, answer) as listener:
        (told,) = call(listener.address, SECRET, OWN, "digits", None).findings
    assert told.verdict == PROBLEM and "'done' is no answer to 'examine'" in told.said


def test_a_question_that_no_doctor_answers(responder: Responder) -> None:
    with connect(responder.address, SECRET) as connection:
        connection.send(Frame("status"))
        answer = connection.receive()
    assert answer.kind == "error" and "'status'" in answer.metadata["what"]


@pytest.mark.parametrize(("closed", "where"), [("there", "there"), ("here", "here")])
def test_a_firewall_that_lets_one_port_through(
    closed: str, where: str, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller asks for the way there first, and then the responder for the way back."""
    really, calls = probing.reaches, list[str]()

    def reaches(address: tuple[str, int], secret: bytes) -> bool:
        calls.append("there" if not calls else "here")
        return calls[-1] != closed and really(address, secret)

    monkeypatch.setattr(probing, "reaches", reaches)
    peer = call(responder.address, SECRET, OWN, "digits", None)
    assert calls == ["there", "here"] and peer.host is not None
    told = peer.findings[1]
    assert told.verdict == PROBLEM and told.said.endswith(f"not any other {where}") and "firewall" in told.cause.lower()


def test_clocks_that_are_apart(responder: Responder, monkeypatch: pytest.MonkeyPatch) -> None:
    really = probing.Caller.measure
    monkeypatch.setattr(probing.Caller, "measure", lambda self: (really(self)[0], -90.0))
    told = call(responder.address, SECRET, OWN, "digits", None).findings[1]
    assert told.verdict == WARNING and told.said == "its clock is 90.0 s behind"


def test_other_versions() -> None:
    assert differences("there", {"paceline": "1", "torch": "2"}, {"paceline": "1", "torch": "2"}) == []
    paceline, torch = differences("there", {"paceline": "1", "torch": "2"}, {"paceline": "2", "torch": "3"})
    assert (paceline.verdict, torch.verdict) == (PROBLEM, WARNING)
    assert paceline.said == "paceline is 2 there and 1 here"


@pytest.mark.parametrize(
    ("error", "telling"),
    [
        (socket.gaierror(-2, "Name or service not known"), "name is not known"),
        (TimeoutError("timed out"), "silent for 5 s"),
        (ConnectionResetError(104, "Connection reset by peer"), "reset"),
        (OSError(113, "No route to host"), "No route to host"),
    ],
)
def test_each_way_of_being_unreachable_has_its_words(error: OSError, telling: str) -> None:
    told = unreachable("there", error)
    assert told.verdict == PROBLEM and telling in told.said and told.cause and told.remedy


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:99999", "a b:1", "a:1:2", "http://a:1", ","])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(PacelineError, match="--peers"):
        parse_peers(text)


def test_no_peers_at_all() -> None:
    assert parse_peers(None) == []
