"""A control service that dies and is started again: everything is as it was, and nothing happens twice."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control import durable, journal
from paceline.control.client import ControlClient
from paceline.control.durable import DurableService, Nobody
from paceline.control.journal import Journal
from paceline.control.ledger import Ledger
from paceline.control.line import Line
from paceline.control.service import Peer
from paceline.control.wire import Frame
from paceline.errors import PacelineError
from paceline.launch.hosted import HostedService

SECRET = b"the run's secret"
RUN = {"strategy": "abs-sgd", "admits": True, "parameters": [["w", [2, 3], "float32", [3, 1]]]}


class Plane:
    """A service that can be killed: it stops at once, without a word to its journal, and another takes its place."""

    def __init__(self, world_size, folder, **options):
        self._arguments, self.path, self._options = (world_size, SECRET), folder / "control.journal", options
        self.service = DurableService(world_size, SECRET, self.path, **options)
        self.address = self.service.address

    def die(self):
        with self.service._lock:
            self.service._journal.close()  # what follows the death is not noted, and told to nobody
        self.service._ended = lambda peer: None
        self.service.close()

    def restart(self):
        self.service = DurableService(*self._arguments, self.path, port=self.address[1], **self._options)

    def die_and_restart(self):
        self.die()
        self.restart()


@contextlib.contextmanager
def cluster(world_size, folder, **options):
    with contextlib.ExitStack() as stack:
        plane = Plane(world_size, folder, **options)
        stack.callback(lambda: plane.service.close())
        clients = [stack.enter_context(ControlClient(plane.address, SECRET, r)) for r in range(world_size)]
        with ThreadPoolExecutor(world_size) as pool:
            list(pool.map(lambda client: client.hello(RUN, ("host", client.rank)), clients))
        yield plane, clients


def until(condition):
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def picture(service):
    """All that the service knows, but for what belongs to connections."""
    state = service._whole_state()
    return json.loads(json.dumps(state))


# ---- the state


def random_messages(dice, count):
    """What ranks may say, in any order; much of it is refused, and that must be the same too."""
    spans = [[start, start + 4] for start in range(0, 100, 4)]
    for _ in range(count):
        sequence = dice.randrange(2**20)
        kind = dice.choice(sorted(durable.JOURNALLED - {"hello", "leave"}))
        metadata = {
            "open_ledger": {"samples": 100, "epochs": 2, "micro_batch": 4, "used": [[0, 8]]},
            "lease": {"micro_batches": dice.randrange(4)},
            "progress": {"samples": [dice.randrange(30) for _ in range(3)], "generation": dice.randrange(4)},
            "discard": {"ranges": dice.sample(spans, 2), "reason": "not a number"},
            "give_back": {"ranges": dice.sample(spans, 1)},
            "admit": {"number": dice.randrange(3)},
            "enlist": {"count": dice.randrange(3)},
            "signal": {"round": dice.randrange(9), "samples": dice.randrange(9), "target": dice.randrange(20)},
            "store_set": {"key": dice.choice("abc")},
            "store_add": {"key": dice.choice("nm"), "amount": dice.randrange(9)},
            "store_delete": {"key": dice.choice("abcnm")},
        }[kind]
        buffers = [memoryview(dice.randbytes(5))] if kind == "store_set" else []
        yield Frame(kind, metadata, buffers, sequence=sequence)


@pytest.mark.parametrize("lines", [5, 10_000], ids=["state and lines", "lines alone"])
@pytest.mark.parametrize("seed", range(10))
def test_a_restarted_service_knows_what_the_dead_one_knew(seed, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "LINES", lines)
    dice = random.Random(seed)
    plane = Plane(3, tmp_path)
    peers = [Peer(Nobody()) for _ in range(3)]
    with plane.service._state():
        for rank, peer in enumerate(peers):
            hello = Frame("hello", {"rank": rank, "description": RUN, "mailbox": ["host", rank]}, sequence=1)
            plane.service._handle(peer, hello)
    for number, frame in enumerate(random_messages(dice, 150)):
        with plane.service._state():
            plane.service._handle(dice.choice(peers), frame)
            if number == 60:  # after it nobody speaks for this rank
                plane.service._end(peers.pop(), "its connection was closed")
            if number == 100:
                plane.service._handle(peers[1], Frame("leave", {"error": dice.choice(["", "ValueError"])}, sequence=9))
    before = picture(plane.service)
    plane.die_and_restart()
    assert picture(plane.service) == before
    plane.service.close()


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_a_ledger_goes_on_from_its_state(seed):
    dice = random.Random(seed)
    ledger = Ledger(100, dice.choice([None, 2]), 7, workers=2, used=[range(7)])
    held = {0: [], 1: []}
    for _ in range(20):
        rank = dice.randrange(2)
        held[rank] += ledger.lease(rank, dice.randrange(4))
        if held[rank] and dice.random() < 0.3:
            ledger.give_back(rank, [held[rank].pop()])
        if dice.random() < 0.3:
            ledger.settle(
                [ledger._holding(each).progress + dice.randrange(len(ledger._holding(each)) + 1) for each in (0, 1)]
            )
            held = {each: list(ledger._holding(each).parts) for each in (0, 1)}
    again = Ledger(100, ledger.epochs, 7, workers=2, used=[range(7)])
    again.restore(json.loads(json.dumps(ledger.state())))
    assert again.state() == ledger.state() and again.counters == ledger.counters
    for _ in range(10):
        rank = dice.randrange(2)
        assert again.lease(rank, 2) == ledger.lease(rank, 2)


def test_whoever_adds_a_message_or_a_state_must_think_of_the_journal(tmp_path):
    """A message that changes something belongs to `JOURNALLED`; a field, to `state` and `restore` of its class."""
    unnoted = {"snapshot", "heartbeat", "status", "exited", "return", "store_get", "store_wait", "store_check"}
    with DurableService(1, SECRET, tmp_path / "j") as service:
        assert set(service._handlers) == durable.JOURNALLED | unnoted
        fixed = {
            "world_size",
            "heartbeat_timeout",
            "samples",
            "epochs",
            "micro_batch",
            "workers",
            "positions",
            "_free",
            "_ranks",
        }
        kept = {
            service._members: {"generation", "begun", "present", "lost", "left", "_reference"}
            | {"joining", "admissions", "admitted", "seats", "numbers"},
            service._samples: {"_ledger", "_terms", "_doubts"},
            service._samples._doubts: {"_silent", "_since"},
            service._signals: {"_rounds", "_samples"},
            service._keys: {"values"},
            Ledger(8, 1, 4, 1): {"_settled", "_dropped", "used", "discarded", "_holdings"},
        }
        for part, fields in kept.items():
            assert vars(part).keys() - fixed == fields


# ---- the journal


def test_a_line_that_was_cut_off_is_as_if_it_had_not_been_said(tmp_path):
    path = tmp_path / "j"
    first = Journal(path)
    for number in range(3):
        first.note(number, Frame("store_set", {"key": "k"}, [memoryview(b"\0v")], sequence=number), dict)
    first.close()
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[-1]) + 1):
        path.write_bytes(whole[:-cut])
        again = Journal(path)
        assert [entry.rank for entry in again.entries] == [0, 1]
        assert bytes(again.entries[1].frame.buffers[0]) == b"\0v" and again.entries[1].frame.sequence == 1
        again.note(7, Frame("lease", {"micro_batches": 1}), dict)
        again.close()
        assert [entry.rank for entry in Journal(path).entries] == [0, 1, 7]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "j"
    first = Journal(path)
    for number in range(3):
        first.note(number, Frame("signal", {"round": number, "samples": 0, "target": 0}), dict)
    first.close()
    whole = path.read_bytes()
    dice = random.Random(0)
    for _ in range(50):
        broken = bytearray(whole)
        at = dice.randrange(len(whole) - 1)
        broken[at] ^= 1 << dice.randrange(7)
        path.write_bytes(broken)
        with contextlib.suppress(PacelineError):
            assert len(Journal(path).entries) < 3, "the last line may lose its end"
    broken = bytearray(whole)
    broken[10] ^= 1
    path.write_bytes(broken)
    with pytest.raises(PacelineError, match=r"journal is damaged.*line 1.*last checkpoint"):
        Journal(path)


def test_a_journal_that_cannot_be_written_is_told_once_and_taken_away(tmp_path, monkeypatch, caplog):
    with cluster(1, tmp_path) as (plane, (client,)):
        client.store_set("a", b"1")

        def full(file, line):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(journal, "_write", full)
        client.store_set("b", b"2")
        client.store_set("c", b"3")
        assert client.store_get("c") == b"3" and not plane.path.exists()
    assert sum("journal cannot be written: No space left on device" in r.getMessage() for r in caplog.records) == 1


def test_a_service_that_closes_lets_others_finish_their_line(tmp_path, monkeypatch):
    with cluster(1, tmp_path) as (plane, (client,)):
        writing, may_go_on = threading.Event(), threading.Event()
        really = journal._write

        def slowly(file, line):
            writing.set()
            may_go_on.wait(60)
            really(file, line)

        monkeypatch.setattr(journal, "_write", slowly)
        with ThreadPoolExecutor(1) as pool:
            client.signal(1)
            writing.wait(60)
            closing = pool.submit(plane.service.close)
            until(plane.service._closing.is_set)
            may_go_on.set()
            closing.result(60)
    assert [entry.frame.kind for entry in Journal(plane.path).entries][:2] == ["hello", "signal"]


# ---- clients who come back


def test_ranks_come_back_and_go_on(tmp_path):
    with cluster(2, tmp_path) as (plane, (one, two)):
        for client in (one, two):
            client.open_ledger(100, 1, 10)
        assert one.lease(1).result()[0] == [range(10)] and two.lease(1).result()[0] == [range(10, 20)]
        one.store_set("k", b"v")
        two.signal(3)
        plane.die_and_restart()
        assert one.lease(1).result()[0] == [range(20, 30)]
        assert one.snapshot([10, 10]) == [range(20)]
        assert two.store_get("k") == b"v" and two.status()["present"] == [0, 1]
        until(lambda: one.signalled(3))
        one.signal(4)
        until(lambda: two.signalled(4))
        assert one.lost == {} and one.generation == 0
        assert one.roster == two.roster == [("host", 0), ("host", 1)]


def test_what_is_asked_while_the_service_is_away_is_answered_by_the_next(tmp_path):
    with cluster(1, tmp_path) as (plane, (client,)), ThreadPoolExecutor(4) as pool:
        client.open_ledger(100, 1, 10)
        waiting = pool.submit(client.store_get, "later", 60.0)
        plane.die()
        asked = [pool.submit(client.store_add, "n", 1) for _ in range(3)]
        client.discard([], "nothing")
        plane.restart()
        assert sorted(each.result() for each in asked) == [1, 2, 3]
        client.store_set("later", b"now")
        assert waiting.result() == b"now"


def test_an_answer_that_was_lost_is_given_again_and_nothing_is_done_twice(tmp_path, monkeypatch):
    """The service dies after it has noted the message and before it has answered, at every such message in turn."""
    with cluster(2, tmp_path) as (plane, (one, two)), ThreadPoolExecutor(1) as pool:
        for client in (one, two):
            client.open_ledger(40, 1, 4)
        leased = []
        for number in range(6):
            service = plane.service
            monkeypatch.setattr(service, "_outgoing", service._outgoing)
            really, service._state = service._state, swallow(service)
            asking = pool.submit(lambda: (one.lease(1).result(30)[0], one.store_add("n", 1)))
            until(lambda service=service: service.swallowed)
            service._state = really
            plane.die_and_restart()
            ranges, total = asking.result(60)
            leased += ranges
            assert total == number + 1
            assert two.lease(1).result(30)[0] == [range(8 * number + 4, 8 * number + 8)][: len(ranges)] or number > 3
        assert len(set(leased)) == len(leased)
        ledger = plane.service.status()["ledger"]
        assert ledger["leased"] <= 40 and ledger["used"] == 0


def swallow(service):
    """Of this service nobody hears any more: what it decides is noted, and not sent."""
    service.swallowed = 0

    @contextlib.contextmanager
    def state():
        with service._lock:
            yield
            service.swallowed += len(service._outgoing)
            service._outgoing = []

    return state


def test_who_does_not_come_back_is_lost(tmp_path):
    with cluster(2, tmp_path, heartbeat_timeout=1.0) as (plane, (one, two)):
        one.open_ledger(20, 1, 10)
        assert two.lease(2).result()[0] == [range(10)]
        plane.die()
        two._line.return_seconds = 0.0
        two.close()
        plane.restart()
        until(lambda: 1 in one.lost)
        assert "no sign of life" in one.lost[1]
        one.report_progress([0, 0], now=True)
        assert one.lease(1).result()[0] == [range(10)]


def test_a_service_that_lives_and_has_let_a_rank_go_does_not_take_it_back(tmp_path):
    with cluster(2, tmp_path) as (plane, (one, two)):
        plane.service._peers[1].connection.close()
        until(lambda: 1 in one.lost and two._gone)
        with pytest.raises(PacelineError, match="it has let this rank go"):
            two.status()


def test_a_service_that_is_gone_for_good_is_told_in_bounded_time(tmp_path):
    with cluster(1, tmp_path) as (plane, (client,)):
        client._line.return_seconds = 0.2
        plane.die()
        with pytest.raises(PacelineError, match=r"did not come back within 0.2 s"):
            client.store_set("k", b"v")
        with pytest.raises(PacelineError, match=r"did not come back within 0.2 s"):
            client.status()


def test_a_death_while_ranks_arrive(tmp_path):
    with contextlib.ExitStack() as stack:
        plane = Plane(2, tmp_path)
        stack.callback(lambda: plane.service.close())
        one, two = (stack.enter_context(ControlClient(plane.address, SECRET, rank)) for rank in range(2))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        first = pool.submit(one.hello, RUN, ("host", 0))
        until(lambda: plane.service.status()["present"] == [0])
        plane.die_and_restart()
        second = pool.submit(two.hello, RUN, ("host", 1))
        assert first.result(60) == second.result(60) == [("host", 0), ("host", 1)]


def test_a_new_process_of_a_rank_counts_anew(tmp_path):
    with cluster(2, tmp_path) as (plane, (one, two)):
        for _ in range(5):
            two.store_add("n", 1)
        two.close()
        until(lambda: 1 in one.lost)
        plane.die_and_restart()
        with ControlClient(plane.address, SECRET, 1) as again:
            again.hello(RUN, ("elsewhere", 1))
            assert again.store_add("n", 1) == 6
            plane.die_and_restart()
            assert again.store_add("n", 1) == 7
            assert one.store_add("n", 1) == 8


def test_a_farewell_is_heard_once(tmp_path):
    with cluster(2, tmp_path) as (plane, (one, two)), ThreadPoolExecutor(1) as pool:
        service = plane.service
        really, service._state = service._state, swallow(service)
        leaving = pool.submit(two.leave)
        until(lambda: service.swallowed)
        service._state = really
        plane.die_and_restart()
        leaving.result(60)
        until(lambda: one.left == {1})
        assert plane.service.status()["left"] == [1] and one.lost == {}


def test_a_line_keeps_only_what_was_not_heard(tmp_path):
    with cluster(1, tmp_path) as (_, (client,)):
        for number in range(500):
            client.signal(number)
        client.status()
        until(lambda: client._line.unheard == 0)
        assert isinstance(client._line, Line)


# ---- a process that is really killed


def test_every_sample_goes_out_once_however_often_the_process_is_killed(tmp_path):
    samples, ranks, kills = 6_000, 3, 4
    with HostedService(ranks, SECRET, "127.0.0.1", tmp_path) as hosted, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(ControlClient(hosted.address, SECRET, rank)) for rank in range(ranks)]
        pool = stack.enter_context(ThreadPoolExecutor(ranks))
        taken, progress = [[] for _ in range(ranks)], [0] * ranks

        def work(client):
            client.hello(RUN, None)
            client.open_ledger(samples, 1, 4)
            complete = False
            while not complete:
                ranges, complete = client.lease(1).result(60)
                taken[client.rank] += ranges
                progress[client.rank] += sum(map(len, ranges))
                client.report_progress(list(progress), now=True)
                client.store_add("leases", len(ranges))
            client.leave()

        working = [pool.submit(work, client) for client in clients]
        for kill in range(kills):
            until(lambda kill=kill: sum(progress) > (kill + 1) * samples // (kills + 2))
            with hosted._lock:  # not while it is being started
                hosted._process.kill()
        for each in working:
            each.result(120)
        positions = sorted(position for ranges in taken for part in ranges for position in part)
        assert positions == list(range(samples))
        with ControlClient(hosted.address, SECRET, 7) as looker:
            state = looker.status()
            assert state["left"] == [0, 1, 2] and state["lost"] == {}
            assert state["ledger"]["used"] == samples and state["ledger"]["complete"]
            assert int(looker.store_get("leases")) == sum(map(len, taken))
    assert not (tmp_path / "control.journal").exists()
