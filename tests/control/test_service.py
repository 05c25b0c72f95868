"""The service and its clients over real sockets: joining, losing, signals, keys, and what strangers send."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from paceline.control.client import ControlClient
from paceline.control.connection import connect
from paceline.control.service import ControlService
from paceline.control.wire import Frame, encode
from paceline.errors import PacelineError
from paceline.run.rank import Rank

SECRET = b"the run's secret"
RUN = {"strategy": "abs-sgd", "admits": True, "parameters": [["w", [2, 3], "float32", [3, 1]]]}


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
    other = RUN | {"parameters": [["w", [2, 4], "float32", [4, 1]]]}
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
            until(lambda: clients[0].joining)
            assert 1 in clients[0].lost and 1 in again.lost, "it does not take part yet"
            assert clients[0].admit(0) == ([1], 2) == clients[0].admit(0), "whoever asks for the same gets the same"
            until(lambda: not clients[0].lost and not again.lost)
            assert again.generation == again.admitted_in == 2 and clients[0].roster[1] == ("elsewhere", 9)


def test_a_further_rank_gets_a_number_and_hears_which_rounds_are_over():
    """Others may have ended a round, in which it will take part, before it came; nobody would tell it again."""
    with cluster(2) as (service, clients), ControlClient(service.address, SECRET, 2) as launcher:
        clients[0].signal(7)
        until(lambda: clients[1].signalled(7))
        (rank,) = launcher.enlist(1)
        with ControlClient(service.address, SECRET, rank) as further:
            further.hello(RUN, ("elsewhere", 9))
            assert rank == 2 and further.signalled(7) and not further.takes_part
            until(lambda: clients[0].joining)
            assert clients[0].membership == (0, frozenset(), frozenset(), 2), "to the others nothing has changed"
            assert clients[0].admit(0) == ([2], 1)
            until(lambda: further.takes_part and len(clients[1].roster) == 3)


def test_a_newcomer_that_dies_while_it_waits_disturbs_nobody():
    with cluster(3) as (service, clients):
        clients[2].open_ledger(100, 1, 4)
        clients[2].lease(2).result()
        clients[2].close()
        until(lambda: clients[0].lost)
        with ControlClient(service.address, SECRET, 2) as again:
            again.hello(RUN, ("elsewhere", 9))
        until(lambda: not service.status()["joining"])
        assert service.status()["generation"] == 1 and service.status()["ledger"]["leased"] == 8
        for client in clients[:2]:
            client.report_progress([0, 0, 0], now=True)
        until(lambda: service.status()["ledger"]["leased"] == 0)


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


def test_a_round_is_signalled_as_soon_as_the_ranks_have_its_samples():
    with cluster(3) as (_, clients):
        for client, samples in zip(clients, (40, 20, 39), strict=True):
            client.count(5, samples, target=100)
            client.status()  # its answer comes after the count has been added up, and what that set off
        assert not any(client.signalled(5) for client in clients)
        clients[1].count(5, 1, target=100)
        until(lambda: all(client.signalled(5) for client in clients))
        assert not clients[0].signalled(4) and not clients[0].signalled(6)
        clients[0].count(5, 40, target=100)  # too late, and no second news
        clients[2].count(6, 100, target=100)
        until(lambda: all(client.signalled(6) for client in clients))


def test_a_signal_ends_a_round_that_is_being_counted():
    with cluster(2) as (_, clients):
        clients[0].count(5, 40, target=100)
        clients[1].signal(5)
        until(lambda: clients[0].signalled(5))


def test_counts_add_up_whatever_rank_and_connection_they_come_by():
    with cluster(4) as (_, clients):
        for _ in range(25):
            for client in clients:
                assert not client.signalled(9)
                client.count(9, 3, target=300)
        until(lambda: all(client.signalled(9) for client in clients))


def test_a_service_that_ends_is_told():
    with cluster(1) as (service, (client,)):
        service.close()
        with pytest.raises(PacelineError, match="connection to the control service is gone"):
            client.status()


def test_who_only_waits_for_messages_notices_that_nobody_can_tell_it_of_losses_any_more():
    """A rank that was stopped, taken for dead, and went on waited for ever for peers that were through."""
    with cluster(1) as (service, (client,)):
        client.check()
        service.close()
        rank = SimpleNamespace(_control=client, _told=set(), _unexplained={})
        with pytest.raises(PacelineError, match="connection to the control service is gone"):
            while True:
                Rank.check_peers(rank, 0.01)


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
        with pytest.raises(PacelineError, match="'d' cannot hold 18446744073709551614"):
            [one.store_add("d", 2**63 - 1) for _ in range(2)]
        assert one.store_add("d", 0) == 2**63 - 1, "the asker is answered, and nothing has changed"


@contextlib.contextmanager
def with_data(world_size, samples=100, micro_batch=10, **options):
    with cluster(world_size, **options) as (service, clients):
        for client in clients:
            client.open_ledger(samples, 1, micro_batch)
        yield service, clients


def leased(client, micro_batches=1):
    """What the service has to give, after everything that this client has told it before."""
    return client.lease(micro_batches).result()[0]


def lose(client, survivors):
    """Close the client's connection; returns when all survivors know."""
    client.close()
    until(lambda: all(client.rank in survivor.lost for survivor in survivors))


def test_a_snapshot_settles_the_progress_and_tells_all_that_is_settled():
    with with_data(2) as (_, (one, two)):
        assert leased(one) == [range(10)] and leased(two) == [range(10, 20)] and leased(one) == [range(20, 30)]
        assert one.snapshot([10, 0]) == [range(10)]
        assert one.snapshot([10, 10]) == [range(20)]
        assert two.snapshot([0, 0]) == [range(20)]  # what is settled stays settled
        with pytest.raises(PacelineError, match="Rank 1 has brought in 20 samples, more than it was given"):
            two.snapshot([10, 20])


def test_progress_travels_with_the_heartbeat():
    with with_data(1, heartbeat_timeout=4.0) as (service, (client,)):
        leased(client)
        client.report_progress([10])
        until(lambda: service.status()["ledger"]["used"] == 10)


def test_a_heartbeat_never_tells_old_progress_with_a_newer_generation():
    """That would free the samples of a lost rank that the newer progress calls used."""
    seen = []

    class Watched(ControlClient):
        """Notes, on the thread of the heart, whether both numbers are read as of one moment."""

        @property
        def _adopted(self):
            if threading.current_thread().name.endswith("_keep_alive"):
                seen.append(self._lock.locked())
            return 0

        @_adopted.setter
        def _adopted(self, generation):
            pass

    with ControlService(1, SECRET, heartbeat_timeout=1.0) as service, Watched(service.address, SECRET, 0) as client:
        client.report_progress([0])
        until(lambda: seen)
        assert all(seen) and client.generation == 0


def test_progress_told_by_a_heart_that_beats_after_the_farewell_is_no_matter():
    with with_data(1) as (service, (client,)):
        leased(client)
        client.leave()
        client.report_progress([10], now=True)
        assert client.status()["ledger"]["used"] == 0  # nor does it settle anything
        client.status()
        assert client._refusal is None and service.status()["left"] == [0]


def test_a_lost_ranks_leases_go_out_again_after_every_survivor_has_spoken():
    with with_data(3, samples=20) as (_, (one, two, three)):
        assert leased(three) == [range(10)] and leased(three) == [range(10, 20)]
        lose(three, [one, two])
        assert leased(one) == []
        one.report_progress([0, 0, 10], now=True)  # one round with the lost rank was applied
        assert leased(one) == []
        two._tell("progress", {"samples": [0, 0, 0], "generation": 0})  # on its way before the loss was known
        assert leased(two) == []
        two.report_progress([0, 0, 0])  # only the heart will tell it, without a word about the loss
        assert leased(two) == []
        two.report_progress([0, 0, 10], now=True)
        assert leased(two) == [range(10, 20)] and leased(one) == []
        counters = one.status()["ledger"]
        assert (counters["used"], counters["leased"]) == (10, 10)


def test_the_last_witness_to_speak_knows_more_than_the_first():
    with with_data(3, samples=20) as (_, (one, two, three)):
        leased(three, 9), leased(three, 9)
        lose(three, [one, two])
        one.report_progress([0, 0, 0], now=True)
        one.status()
        two.report_progress([0, 0, 20], now=True)
        assert leased(two) == [] and two.status()["ledger"]["complete"]


def test_a_survivor_that_is_lost_itself_is_not_waited_for():
    with with_data(3, samples=30) as (_, (one, two, three)):
        assert leased(three) == [range(10)] and leased(two) == [range(10, 20)] and leased(two) == [range(20, 30)]
        lose(three, [one, two])
        one.report_progress([0, 0, 10], now=True)
        assert leased(one) == []
        lose(two, [one])
        assert leased(one) == []
        one.report_progress([0, 10, 10], now=True)
        assert leased(one) == [range(20, 30)]


def test_a_survivor_that_leaves_has_told_all():
    with with_data(3, samples=20) as (_, (one, two, three)):
        leased(three), leased(three)
        lose(three, [one, two])
        one.report_progress([0, 0, 10], now=True)
        assert leased(one) == []
        two.leave()
        assert leased(one) == [range(10, 20)]


def test_who_leaves_gives_everything_back_at_once():
    with with_data(2, samples=20) as (_, (one, two)):
        leased(two), leased(two)
        two.report_progress([0, 10], now=True)
        two.leave()
        assert leased(one) == [range(10, 20)] and one.status()["ledger"]["used"] == 10


def test_who_leaves_with_an_error_is_in_doubt_like_any_lost_rank():
    with with_data(2, samples=20) as (_, (one, two)):
        leased(two), leased(two)
        two.leave("ValueError: bad data")
        assert leased(one) == []
        until(lambda: one.lost)
        one.report_progress([0, 10], now=True)
        assert leased(one) == [range(10, 20)]


def test_a_better_reason_for_a_loss_frees_nothing_twice():
    with with_data(2, samples=20) as (service, (one, two)):
        assert leased(two) == [range(10)]
        lose(two, [one])
        one.report_progress([0, 0], now=True)
        assert leased(one) == [range(10)]
        service.report_exit(1, "killed by SIGKILL")
        one.report_progress([0, 0], now=True)
        assert leased(one) == [range(10, 20)] and leased(one) == []


def test_a_better_reason_for_a_loss_disturbs_no_group_that_is_being_formed():
    """Those who are left wait for each other's keys while the launcher tells how the lost rank has ended."""
    with cluster(3) as (service, (one, two, three)), ThreadPoolExecutor(1) as pool:
        three.close()
        until(lambda: 2 in one.lost)
        waiting = pool.submit(one.store_get, "generation-1/address", 60.0)
        until(lambda: service._waiting._topics)
        service.report_exit(2, "killed by SIGKILL")
        until(lambda: one.lost[2] == "killed by SIGKILL")
        two.store_set("generation-1/address", b"here")
        assert waiting.result() == b"here"


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
        client.discard([range(10)], "not a number")
        until(lambda: client._refusal)
        with pytest.raises(PacelineError, match=r"wants to discard \(not a number\) positions 0 to 10, which"):
            client.status()
        client.report_progress([10], now=True)
        until(lambda: client._refusal)
        with pytest.raises(PacelineError, match="Rank 0 has brought in 10 samples, more than it was given"):
            client.status()
        client.status()


def test_giving_back_is_answered_so_that_others_can_lease_it():
    with with_data(2, samples=10) as (_, (one, two)):
        got = leased(one)
        assert leased(two) == []
        one.give_back(got)
        assert leased(two) == got
        with pytest.raises(PacelineError, match="Rank 0 wants to give back positions 0 to 10, which it does not hold"):
            one.give_back(got)


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
