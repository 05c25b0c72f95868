"""Clients that drain one ledger together: the stock keeps ahead, a death gives its work to the others."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.control.client import ControlClient
from paceline.control.service import ControlService
from paceline.control.stock import LeaseStock

SECRET = b"the run's secret"
RUN = {"strategy": "abs-sgd"}
SAMPLES, EPOCHS, MICRO_BATCH = 1003, 2, 8


@contextlib.contextmanager
def ready(service, rank, samples=SAMPLES, epochs=EPOCHS, micro_batch=MICRO_BATCH):
    with ControlClient(service.address, SECRET, rank) as client:
        client.hello(RUN)
        client.open_ledger(samples, epochs, micro_batch)
        yield client


def drain(client, first_round=0, died=None):
    """Compute everything that can be had, in rounds of its own; returns the positions."""
    stock, done, number = LeaseStock(client), [], first_round
    while not stock.complete:
        part = stock.next_range()
        client.contribute(number, [part] if part else [])
        client.commit(number)
        number += 1
        done += part or ()
        if part is None and died is not None:
            died.wait(60)  # the rest is in the hands of one who is about to die
        elif part is None:
            threading.Event().wait(0.001)
    return done


def test_the_stock_keeps_ahead():
    with ControlService(1, SECRET) as service, ready(service, 0, epochs=None) as client:
        stock = LeaseStock(client, ahead=8)
        for _ in range(200):
            part = stock.next_range()
            assert part is not None
            client.status()  # a computation that lasts at least one round trip
        assert stock.waits == 1, "only the very first lease is waited for"
        left_over = stock.close()
        assert left_over and stock.close() == []
        before = client.status()["ledger"]["leased"]
        client.give_back(left_over)
        assert client.status()["ledger"]["leased"] == before - sum(map(len, left_over))


def test_the_stock_says_when_nothing_is_free_and_when_all_is_done():
    with ControlService(1, SECRET) as service, ready(service, 0, samples=8, epochs=1) as client:
        stock = LeaseStock(client)
        part = stock.next_range()
        assert part == range(8) and stock.next_range() is None and not stock.complete
        client.give_back([part])
        assert stock.next_range() == part
        client.contribute(0, [part])
        client.commit(0)
        assert stock.next_range() is None and stock.complete


def test_several_clients_drain_a_ledger_exactly_once():
    with ControlService(3, SECRET) as service, ThreadPoolExecutor(3) as pool:

        def work(rank):
            with ready(service, rank) as client:
                return drain(client)

        done = [p for positions in pool.map(work, range(3)) for p in positions]
    assert sorted(done) == list(range(SAMPLES * EPOCHS))


CHILD = textwrap.dedent("""
    import sys
    from paceline.control.client import ControlClient
    port, applied = int(sys.argv[1]), sys.argv[2] == "applied"
    client = ControlClient(("127.0.0.1", port), b"the run's secret", 1)
    client.hello({"strategy": "abs-sgd"})
    client.open_ledger(1003, 2, 8)
    used, _ = client.lease(3).result()
    doubtful, _ = client.lease(2).result()
    client.lease(4).result()
    client.contribute(0, used)
    client.commit(0)
    client.contribute(1, doubtful)
    client.status()
    print(used[0].start, used[-1].stop, doubtful[0].start, doubtful[-1].stop, flush=True)
    sys.stdin.read()
""")


def started(command):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("verdict", ["applied", "repeated"])
def test_a_killed_process_gives_its_work_to_the_others(verdict):
    """What it had leased goes out again; what it had put into a round depends on whether the round was applied."""
    died = threading.Event()
    with ControlService(2, SECRET) as service:
        command = [sys.executable, "-c", CHILD, str(service.address[1]), verdict]
        with started(command) as child, ready(service, 0) as client:
            client._on_lost = lambda lost: died.set()
            used_start, used_stop, start, stop = map(int, child.stdout.readline().split())
            child.send_signal(signal.SIGKILL)
            service.report_exit(1, "killed by SIGKILL")
            assert died.wait(60)
            client.contribute(1, [])
            client.commit(1, members=[0, 1] if verdict == "applied" else [0])
            done = drain(client, first_round=2)
            counters = client.status()["ledger"]
        theirs = set(range(used_start, used_stop)) | (set(range(start, stop)) if verdict == "applied" else set())
        assert sorted([*done, *theirs]) == list(range(SAMPLES * EPOCHS))
        assert counters == {
            "leased": 0,
            "used": SAMPLES * EPOCHS,
            "discarded": 0,
            "remaining": 0,
            "complete": True,
        }


def test_one_of_three_dies_in_the_middle():
    died = threading.Event()
    with ControlService(3, SECRET) as service, ThreadPoolExecutor(2) as pool:
        command = [sys.executable, "-c", CHILD, str(service.address[1]), "repeated"]
        with started(command) as child:

            def work(rank):
                with ready(service, rank) as client:
                    return drain(client, first_round=10, died=died)

            working = [pool.submit(work, rank) for rank in (0, 2)]
            used_start, used_stop, start, stop = map(int, child.stdout.readline().split())
            child.send_signal(signal.SIGKILL)
            child.wait()
            service.report_exit(1, "killed by SIGKILL")
            died.set()
            done = [p for each in working for p in each.result()]
        assert service.status()["ledger"]["complete"]
    # The others commit while the child still lives, so its second round counts as applied in some interleavings.
    theirs = set(range(used_start, used_stop)), set(range(start, stop))
    assert sorted(done) in (
        sorted(set(range(SAMPLES * EPOCHS)) - theirs[0]),
        sorted(set(range(SAMPLES * EPOCHS)) - theirs[0] - theirs[1]),
    )
