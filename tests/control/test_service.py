"""The service and its clients over real sockets: joining, losing, signals, keys, and what strangers send."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.control.client import ControlClient
from paceline.control.connection import connect
from paceline.control.service import ControlService
from paceline.control.wire import Frame, encode
from paceline.errors import PacelineError

SECRET = b"the run's secret"
RUN = {"strategy": "abs-sgd", "parameters": [["w", [2, 3], "float32"]]}


@contextlib.contextmanager
def cluster(world_size, **options):
    """A service and as many clients that have said hello."""
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(ControlService(world_size, SECRET, **options))
        clients = [stack.enter_context(ControlClient(service.address, SECRET, r)) for r in range(world_size)]
        with ThreadPoolExecutor(world_size) as pool:
            list(pool.map(lambda client: client.hello(RUN, ("host", client.rank)), clients))
        yield service, clients


def until(condition):
    """Give other threads the processor until they have done it; the test's time-out ends what never comes."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def test_everyone_learns_where_the_others_are():
    with cluster(3) as (service, clients):
        assert clients[2].roster == [("host", 0), ("host", 1), ("host", 2)]
        assert clients[0].local_host == "127.0.0.1"
        assert service.status()["present"] == clients[0].status()["present"] == [0, 1, 2]


def test_metrics_travel_with_the_heartbeat():
    with cluster(1, heartbeat_timeout=4.0) as (service, (client,)):
        client.report({"loss": 0.5})
        until(lambda: service.status()["metrics"].get("0") == {"loss": 0.5})


def test_ranks_that_never_arrive_are_named():
    with ControlService(4, SECRET, join_timeout=0.2) as service, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(ControlClient(service.address, SECRET, rank)) for rank in (0, 2)]
        with ThreadPoolExecutor(2) as pool:
            joining = [pool.submit(client.hello, RUN) for client in clients]
            for each in joining:
                with pytest.raises(PacelineError, match=r"Only 2 of 4 ranks arrived within 0.2 s; missing: rank 1, 3"):
                    each.result()


def test_differing_models_stop_everybody_with_the_difference():
    other = RUN | {"parameters": [["w", [2, 4], "float32"]]}
    with ControlService(3, SECRET) as service, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(ControlClient(service.address, SECRET, rank)) for rank in (0, 1))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(first.hello, RUN)
            until(lambda: service.status()["present"] == [0])
            for hello in (lambda: second.hello(other), waiting.result):
                with pytest.raises(PacelineError, match=r"shape \(2, 4\) on rank 1 but \(2, 3\) on rank 0"):
                    hello()


def test_a_death_before_everyone_arrived_is_told_at_once():
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(ControlService(2, SECRET))
        client = stack.enter_context(ControlClient(service.address, SECRET, 0))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        waiting = pool.submit(client.hello, RUN)
        until(lambda: service.status()["present"] == [0])
        service.report_exit(1, "exit code 1")
        with pytest.raises(PacelineError, match="Rank 1 was lost before all ranks had arrived: exit code 1"):
            waiting.result()


def test_a_closed_connection_is_a_death_and_a_farewell_is_none():
    with cluster(3) as (service, clients):
        clients[1].leave()
        clients[1].close()
        clients[2].close()
        until(lambda: clients[0].generation == 2)
        assert clients[0].lost == {2: "its connection was closed"} and clients[0].left == {1}
        service.report_exit(1, "exit code 0")
        service.report_exit(2, "killed by SIGKILL")
        until(lambda: clients[0].lost == {2: "killed by SIGKILL"})
        assert clients[0].roster == [("host", 0), None, None]


def test_leaving_with_an_error_tells_the_others_why():
    lost = []
    with cluster(2) as (_, clients):
        clients[0]._on_lost = lost.append
        clients[1].leave("ValueError: bad data")
        until(lambda: lost)
        assert lost == [{1: "ValueError: bad data"}] and clients[0].lost == lost[0]


def test_a_rank_may_come_back():
    with cluster(2) as (service, clients):
        clients[1].close()
        until(lambda: clients[0].lost)
        with ControlClient(service.address, SECRET, 1) as again:
            again.hello(RUN, ("elsewhere", 9))
            until(lambda: not clients[0].lost)
            assert again.generation == 2 and clients[0].roster[1] == ("elsewhere", 9)


def test_silence_is_a_death():
    with cluster(2) as (service, clients):
        clients[1]._closing.set()  # its heart stops, its connection stays
        service._members.present[1].last_seen -= 60
        until(lambda: 1 in clients[0].lost)
        assert "no sign of life" in clients[0].lost[1]
        until(lambda: clients[1]._gone)
        with pytest.raises(PacelineError, match="took this rank for dead"):
            clients[1].status()


def test_signals_reach_everybody():
    with cluster(3) as (_, clients):
        clients[0].signal(7)
        assert clients[0].signalled(7) and not clients[0].signalled(8)
        until(lambda: clients[1].signalled(7) and clients[2].signalled(7))


def test_a_service_that_ends_is_told():
    with cluster(1) as (service, (client,)):
        service.close()
        with pytest.raises(PacelineError, match="connection to the control service is gone"):
            client.status()


def test_nobody_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(PacelineError, match="Nobody answers at"):
        ControlClient(address, SECRET, 0, connect_seconds=0.0)


def test_keys_wait_for_their_value():
    with cluster(2) as (_, (one, two)), ThreadPoolExecutor(2) as pool:
        getting, waiting = pool.submit(one.store_get, "a", 60.0), pool.submit(one.store_wait, ["b", "a"], 60.0)
        assert not two.store_check(["a"])
        two.store_set("a", b"\x00value")
        assert getting.result() == b"\x00value" and two.store_check(["a"]) and not two.store_check(["a", "b"])
        assert [two.store_add("b", 5), two.store_add("b", -7)] == [5, -2]
        waiting.result()
        assert two.store_delete("b") and not two.store_delete("b")
        with pytest.raises(PacelineError, match=r"Nobody set the store's key 'c' within 0.01 s"):
            one.store_get("c", 0.01)
        with pytest.raises(PacelineError, match="no number"):
            one.store_add("a", 1)


def test_a_snapshot_waits_for_everybodys_report():
    with cluster(2) as (_, (one, two)), ThreadPoolExecutor(1) as pool:
        for client in (one, two):
            client.open_ledger(100, 1, 10)
        mine, _ = one.lease(1).result()
        one.contribute(0, mine)
        one.commit(0)
        snapshot = pool.submit(one.snapshot, 0)
        assert one.status()["ledger"]["used"] == 10 and not snapshot.done()
        theirs, _ = two.lease(1).result()
        two.contribute(0, theirs)
        assert snapshot.result() == [range(20)]
        with pytest.raises(PacelineError, match="Not every rank has said in time"):
            one.snapshot(1, timeout=0.01)


def test_the_ledger_must_be_the_same_everywhere():
    with cluster(2) as (_, (one, two)):
        with pytest.raises(PacelineError, match="No rank has opened"):
            one.lease(1).result()
        one.open_ledger(100, 1, 10)
        with pytest.raises(PacelineError, match="Rank 1 opens the data with samples = 99, but another rank said 100"):
            two.open_ledger(99, 1, 10)


def test_refused_news_raises_at_the_next_call():
    with cluster(1) as (_, (client,)):
        client.open_ledger(100, 1, 10)
        client.contribute(0, [range(10)])
        until(lambda: client._refusal)
        with pytest.raises(PacelineError, match="Rank 0 wants to contribute positions 0 to 10, which it does not hold"):
            client.status()
        client.status()


def test_who_is_no_rank_gets_no_samples():
    with cluster(1) as (service, (client,)), ControlClient(service.address, SECRET, 5) as stranger:
        client.open_ledger(100, 1, 10)
        with pytest.raises(PacelineError, match="Only a rank of the run"):
            stranger.lease(1).result()
        with pytest.raises(PacelineError, match="Rank 5 does not exist"):
            stranger.hello(RUN)


def test_garbage_gets_nobody_in(monkeypatch):
    """1,000 random strings and 300 damaged frames from strangers: none gets past the handshake."""
    dice = random.Random(0)
    frame = b"".join(encode(Frame("hello", {"rank": 0, "description": RUN, "mailbox": None})))

    def damaged() -> bytes:
        broken = bytearray(frame)
        broken[dice.randrange(len(broken))] ^= dice.randrange(1, 256)
        return bytes(broken)

    strings = [dice.randbytes(dice.randrange(300)) for _ in range(1000)] + [damaged() for _ in range(300)]
    with cluster(1) as (service, (client,)):
        served = []
        monkeypatch.setattr(service._listener, "_serve", served.append)
        for string in strings:
            with socket.create_connection(service.address) as stranger, contextlib.suppress(OSError):
                stranger.sendall(string)
        client.signal(1)
        assert client.status()["present"] == [0] and not served
        until(lambda: not service._listener._pending)
        assert not served


def test_damaged_frames_of_a_holder_of_the_secret_cost_only_its_connection():
    dice = random.Random(1)
    frame = b"".join(encode(Frame("store_set", {"key": "k"}, [memoryview(b"v")])))[:-1]
    with cluster(1) as (service, (client,)):
        for _ in range(50):
            broken = bytearray(frame)
            broken[dice.randrange(len(broken))] ^= dice.randrange(1, 256)
            with connect(service.address, SECRET) as peer:
                peer.receive()
                with pytest.raises(OSError):
                    peer._socket.sendall(broken)
                    peer._socket.shutdown(socket.SHUT_WR)
                    peer.receive()
        assert not client.store_check(["k"]) and client.status()["present"] == [0]


def test_nothing_is_left_behind():
    before = set(threading.enumerate())
    with cluster(3):
        pass
    assert set(threading.enumerate()) <= before
