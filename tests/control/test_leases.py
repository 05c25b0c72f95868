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


def drain(client, progress, wait=lambda: None):
    """Compute everything that can be had, each micro-batch a round that is applied at once; returns the positions.
    `progress` is what this client knows of everybody, and grows with its own work."""
    stock, done = LeaseStock(client), []
    while not stock.complete:
        part = stock.next_range()
        if part is None:
            wait()
        done += part or ()
        progress[client.rank] += len(part or ())
        client.report_progress(progress, now=True)
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
        client.report_progress([8], now=True)
        assert stock.next_range() is None and stock.complete


def test_several_clients_drain_a_ledger_exactly_once():
    with ControlService(3, SECRET) as service, ThreadPoolExecutor(3) as pool:

        def work(rank):
            with ready(service, rank) as client:
                return drain(client, [0, 0, 0])  # of the others each knows nothing, which is old news

        done = [p for positions in pool.map(work, range(3)) for p in positions]
        assert service.status()["ledger"] == COMPLETE
    assert sorted(done) == list(range(SAMPLES * EPOCHS))


COMPLETE = {"leased": 0, "used": SAMPLES * EPOCHS, "discarded": 0, "remaining": 0, "complete": True}

CHILD = textwrap.dedent("""
    import sys
    from paceline.control.client import ControlClient
    client = ControlClient(("127.0.0.1", int(sys.argv[1])), b"the run's secret", 1)
    client.hello({"strategy": "abs-sgd"})
    client.open_ledger(1003, 2, 8)
    positions = [p for count in (3, 2, 4) for part in client.lease(count).result()[0] for p in part]
    print(*positions, flush=True)
    sys.stdin.read()
""")
HELD = (3 + 2 + 4) * MICRO_BATCH


@contextlib.contextmanager
def child_of(service):
    command = [sys.executable, "-c", CHILD, str(service.address[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def take_all(client):
    """Everything that is free now."""
    return [p for leases in iter(lambda: client.lease(8).result()[0], []) for part in leases for p in part]


@pytest.mark.parametrize("applied", [0, 3 * MICRO_BATCH, 3 * MICRO_BATCH + 5, HELD])
def test_a_killed_process_gives_to_others_what_they_had_not_applied_with_it(applied):
    died = threading.Event()
    with ControlService(2, SECRET) as service, child_of(service) as child, ready(service, 0) as client:
        client._on_lost = lambda lost: died.set()
        theirs = list(map(int, child.stdout.readline().split()))
        assert len(theirs) == HELD
        child.send_signal(signal.SIGKILL)
        child.wait()
        service.report_exit(1, "killed by SIGKILL")
        assert died.wait(60)
        mine = take_all(client)
        assert not set(mine) & set(theirs), "its samples are in doubt until the survivor has spoken"
        client.report_progress([len(mine), applied], now=True)
        rest = take_all(client)
        assert rest == sorted(theirs[applied:])
        assert sorted([*mine, *rest, *theirs[:applied]]) == list(range(SAMPLES * EPOCHS))
        client.report_progress([len(mine) + len(rest), applied], now=True)
        assert client.status()["ledger"] == COMPLETE


def test_one_of_three_dies_in_the_middle():
    applied = 5 * MICRO_BATCH  # in rounds that both survivors have applied
    started, died = threading.Event(), threading.Event()
    with ControlService(3, SECRET) as service, ThreadPoolExecutor(2) as pool, child_of(service) as child:

        def work(rank):
            with ready(service, rank) as client:
                started.wait(60)
                return drain(client, [0, applied, 0], wait=lambda: died.wait(60))

        working = [pool.submit(work, rank) for rank in (0, 2)]
        theirs = list(map(int, child.stdout.readline().split()))
        started.set()
        child.send_signal(signal.SIGKILL)
        child.wait()
        service.report_exit(1, "killed by SIGKILL")
        died.set()
        done = [p for each in working for p in each.result()]
        assert service.status()["ledger"] == COMPLETE
    assert sorted([*done, *theirs[:applied]]) == list(range(SAMPLES * EPOCHS))
