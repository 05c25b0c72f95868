"""Strategies on the simulated backend, timing only: throughput, faults, messages, and a strategy's mistakes."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest

from paceline.backends.simulated import Data, Simulation, TimingLearner, simulate
from paceline.errors import PacelineError
from paceline.node import Message, Node
from paceline.record import MemoryRecorder
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Crash, Fault, Hang, LateJoin, Partition, SlowDown
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import AbsSgd, AllReduce, Balanced, DPsgd, Strategy
from paceline.summary import account, summarise

MIXED = (1, 1, 0.5, 0.25)
EVERY = [AllReduce(), Balanced(), AbsSgd()]


def cluster(*speeds: float, faults: tuple[Fault, ...] = (), seed: int = 0, sigma: float = 0.0) -> Cluster:
    jitter = LogNormal(sigma) if sigma else None
    network = Network(latency=1e-4, bandwidth=1e9)
    return Cluster.from_speeds(
        speeds, micro_batch_seconds=0.1, jitter=jitter, network=network, faults=faults, seed=seed
    )


def settled(run: Simulation) -> bool:
    return run.samples_computed == run.samples_applied + run.samples_discarded


# ---- throughput


@pytest.mark.parametrize(
    ("strategy", "least", "most"),
    [(AllReduce(), 0.363, 0.364), (Balanced(), 0.9, 1.0), (AbsSgd(), 0.99, 1.0)],
    ids=lambda value: getattr(value, "name", None),
)
def test_share_of_ideal_on_a_mixed_cluster(strategy: Strategy, least: float, most: float) -> None:
    free = Cluster.from_speeds(MIXED, micro_batch_seconds=0.02)
    run = simulate(strategy, free, seconds=60.0)
    assert least <= run.share_of_ideal <= most + 1e-9
    assert settled(run)


def test_a_rank_four_times_slower_gets_a_quarter_and_makes_no_round_longer() -> None:
    recorder = MemoryRecorder()
    run = simulate(AbsSgd(), cluster(1, 1, 1, 0.25), seconds=40.0, recorder=recorder)
    fast, slow = run.workers[0].applied, run.workers[3].applied
    assert slow / fast == pytest.approx(0.25, rel=0.02)
    times = [event["t"] for event in recorder.events if event["kind"] == "applied" and event["rank"] == 3]
    communication = Network(1e-4, 1e9).all_reduce_seconds(4, TimingLearner().nbytes)
    longest = max(later - earlier for earlier, later in pairwise(times))
    assert longest <= 0.4 + communication + 1e-9


def test_communication_is_hidden_by_abs_sgd_and_paid_by_all_reduce() -> None:
    slow_net = Cluster.from_speeds([1, 1], micro_batch_seconds=0.1, network=Network(latency=0.05))
    assert simulate(AllReduce(), slow_net, seconds=60).share_of_ideal == pytest.approx(0.1 / 0.2, rel=0.01)
    assert simulate(AbsSgd(), slow_net, seconds=60).share_of_ideal > 0.99


def test_totals_add_up() -> None:
    recorder = MemoryRecorder()
    run = simulate(AllReduce(), cluster(*MIXED, sigma=0.2), seconds=10.0, recorder=recorder)
    for rank, totals in enumerate(run.workers):
        assert totals.computing + totals.waiting == pytest.approx(totals.ended), rank
    assert run.bytes_sent == sum(event["bytes"] for event in recorder.events if event["kind"] == "join")
    books = account(recorder.events)
    assert not books.errors
    assert books.in_flight == 0
    assert (books.computed, books.applied) == (run.samples_computed, run.samples_applied)
    summary = summarise(recorder.events, speeds=[32 * speed / 0.1 for speed in MIXED], seconds=10.0)
    assert summary.share_of_ideal == pytest.approx(run.share_of_ideal, rel=1e-9), "one ruler for both backends"
    assert summary.seconds == run.seconds
    for worker, totals in zip(summary.workers, run.workers, strict=True):
        assert worker.computing * run.seconds == pytest.approx(totals.computing)
        assert worker.communicating * run.seconds == pytest.approx(totals.communicating, abs=0.01), "but the last round"
    assert summary.rounds == run.rounds


# ---- determinism


@pytest.mark.parametrize("strategy", EVERY, ids=lambda strategy: strategy.name)
def test_the_same_seed_gives_the_same_events(strategy: Strategy) -> None:
    def events(seed: int) -> list[dict[str, object]]:
        recorder = MemoryRecorder()
        simulate(strategy, cluster(*MIXED, sigma=0.3, seed=seed), seconds=5.0, recorder=recorder)
        return recorder.events

    assert events(0) == events(0)
    assert events(0) != events(1)


def test_recording_changes_nothing() -> None:
    quiet = simulate(AbsSgd(), cluster(*MIXED, sigma=0.3), seconds=5.0)
    assert simulate(AbsSgd(), cluster(*MIXED, sigma=0.3), seconds=5.0, recorder=MemoryRecorder()) == quiet


# ---- the data's end


@pytest.mark.parametrize("strategy", EVERY, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize(("samples", "epochs"), [(1000, 3), (7, 1), (33, 2), (1, 1)])
def test_every_sample_is_used_once_an_epoch(strategy: Strategy, samples: int, epochs: int) -> None:
    run = simulate(strategy, cluster(*MIXED, sigma=0.2), data=Data(samples, epochs))
    assert run.samples_applied == run.samples_computed == samples * epochs


def test_a_time_limit_ends_an_endless_read_of_the_data() -> None:
    run = simulate(AbsSgd(), cluster(1, 1), data=Data(100), seconds=5.0)
    assert settled(run)
    assert 5.0 <= run.seconds < 5.5


def test_a_shorter_micro_batch_takes_less_time() -> None:
    assert simulate(AllReduce(), cluster(1), data=Data(48, 1)).workers[0].computing == pytest.approx(0.15)


def test_it_must_end() -> None:
    with pytest.raises(PacelineError, match="never end"):
        simulate(AbsSgd(), cluster(1), data=Data(10))
    with pytest.raises(PacelineError, match="2 learners for a cluster of 1"):
        simulate(AbsSgd(), cluster(1), seconds=1, learners=[TimingLearner()] * 2)
    with pytest.raises(PacelineError, match="micro-batch of 0"):
        simulate(AbsSgd(), cluster(1), seconds=1, micro_batch=0)


# ---- faults


def test_a_slow_down_slows_only_its_rank() -> None:
    healthy = simulate(AbsSgd(), cluster(1, 1), seconds=10.0)
    slowed = simulate(AbsSgd(), cluster(1, 1, faults=(SlowDown(rank=1, at=2, factor=5, duration=5),)), seconds=10.0)
    assert slowed.workers[1].samples == pytest.approx(healthy.workers[1].samples - 40 * 32, abs=4 * 32)
    assert slowed.workers[0].samples == pytest.approx(healthy.workers[0].samples, abs=4 * 32)


@pytest.mark.parametrize(
    "fault",
    [Hang(rank=1, at=2.0, duration=3.0), Partition(groups=((0,),), at=2.0, duration=3.0), LateJoin(rank=1, at=3.0)],
    ids=lambda fault: fault.kind,
)
def test_all_reduce_stands_still_as_long_as_the_fault_lasts(fault: Fault) -> None:
    healthy = simulate(AllReduce(), cluster(1, 1), seconds=10.0)
    broken = simulate(AllReduce(), cluster(1, 1, faults=(fault,)), seconds=10.0)
    assert settled(broken)
    assert healthy.samples_applied - broken.samples_applied == pytest.approx(3.0 / 0.1 * 64, abs=2 * 64)


def test_a_hanging_rank_does_not_wake_for_a_collective() -> None:
    recorder = MemoryRecorder()
    faults = (Hang(rank=0, at=0.2, duration=1.0),)  # waits for rank 1, which needs 0.4 s
    simulate(AllReduce(), cluster(1, 0.25, faults=faults), seconds=2.0, recorder=recorder)
    first = {event["rank"]: event["t"] for event in reversed(recorder.events) if event["kind"] == "applied"}
    assert first[0] == pytest.approx(1.2)
    assert first[1] < 0.5


@dataclass(frozen=True, kw_only=True)
class FrailAllReduce(AllReduce):
    survives: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class FrailAbsSgd(AbsSgd):
    survives: ClassVar[bool] = False


def test_a_crash_says_who_waits_for_whom() -> None:
    with pytest.raises(PacelineError) as caught:
        simulate(FrailAllReduce(), cluster(1, 1, 1, 1, faults=(Crash(rank=2, at=3.05),)), seconds=10.0)
    assert "all-reduce stands still at 3." in str(caught.value)
    assert "rank 2 crashed at 3.05 s; ranks 0, 1, 3 wait in all-reduce 28 for rank 2" in str(caught.value)


def test_abs_sgd_without_data_also_says_whom_it_waits_for() -> None:
    with pytest.raises(PacelineError, match=r"rank 1 crashed at 1 s; rank 0 waits in all-reduce \d+ for rank 1"):
        simulate(FrailAbsSgd(), cluster(1, 1, faults=(Crash(rank=1, at=1.0),)), seconds=2.0)


def test_who_survives_a_crash_goes_on_at_once() -> None:
    run = simulate(AllReduce(), cluster(1, 1, 1, 1, faults=(Crash(rank=2, at=3.05),)), seconds=10.0)
    assert [worker.ended >= 10.0 for worker in run.workers] == [True, True, False, True]


def test_other_faults_that_last_for_ever_are_named() -> None:
    with pytest.raises(PacelineError, match=r"rank 1 hangs since 1 s; rank 0 waits in all-reduce \d+ for rank 1"):
        simulate(AllReduce(), cluster(1, 1, faults=(Hang(rank=1, at=1.0),)), seconds=2.0)
    with pytest.raises(PacelineError, match=r"does not heal; ranks 0, 1 wait in all-reduce \d+ for the network"):
        simulate(AllReduce(), cluster(1, 1, faults=(Partition(groups=((0,),), at=1.0),)), seconds=2.0)


def test_a_crash_of_everybody_is_an_end() -> None:
    run = simulate(AllReduce(), cluster(1, faults=(Crash(rank=0, at=1.05),)), data=Data(32_000, 1))
    assert run.workers[0].ended == 1.05
    assert settled(run)
    late = simulate(AllReduce(), cluster(1, faults=(Crash(rank=0, at=99.0),)), seconds=1.0)
    assert late.workers[0].ended < 1.2, "a crash after the end is nothing"


def test_a_crash_discards_what_was_not_sent() -> None:
    recorder = MemoryRecorder()
    faults = (Crash(rank=0, at=0.35),)
    simulate(AllReduce(micro_batches=8), cluster(1, faults=faults), seconds=9.0, recorder=recorder)
    assert [event for event in recorder.events if event["kind"] == "discard"] == [
        {"kind": "discard", "rank": 0, "t": 0.35, "samples": 96, "reason": "crash"}
    ]


# ---- messages, signals and a strategy's mistakes


@dataclass(frozen=True, kw_only=True)
class Chain(Strategy):
    """Rank 0 sends numbered messages to rank 1, which signals when it has them."""

    name: ClassVar[str] = "chain"
    got: ClassVar[list[Message]] = []

    async def worker(self, node: Node) -> None:
        if node.rank == 0:
            for number in range(5):
                node.send(1, str(number))
                await node.gradient()
            while not node.signalled(7):
                await node.gradient()  # no data: must last until the signal comes
        else:
            self.got[:] = [await node.receive() for _ in range(5)]
            node.signal(7)
            node.signal(7)


def test_messages_arrive_in_order_and_signals_wake_a_rank_without_data() -> None:
    network = Network(latency=0.5)
    two = Cluster.from_speeds([1, 1], micro_batch_seconds=0.1, network=network)
    run = simulate(Chain(), two, seconds=0.15)
    assert [(message.sender, message.kind) for message in Chain.got] == [(0, str(number)) for number in range(5)]
    assert run.workers[0].ended == pytest.approx(0.2 + 0.5 + 0.5)
    assert run.samples_discarded == 64


@dataclass(frozen=True, kw_only=True)
class Broken(Strategy):
    """Does what it is told on one rank, and something else on the others."""

    name: ClassVar[str] = "broken"
    how: str

    async def worker(self, node: Node) -> None:
        if self.how == "order" and node.rank == 0:
            await node.all_gather(1.0)
        elif self.how == "receive":
            await node.receive()
        elif self.how == "early end" and node.rank == 0:
            return
        elif self.how == "spin":
            while True:
                await node.gradient()
        elif self.how == "endless":
            while True:
                await node.all_reduce(await node.gradient())
        await node.all_reduce(await node.gradient())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("order", "number 0 is all-gather on rank 0 and all-reduce on rank 1"),
        ("receive", "ranks 0, 1, 2 wait for a message from anybody"),
        ("early end", r"ranks 1, 2 wait in all-reduce 0 for rank 0 \(rank 0 ended already\)"),
        ("spin", "ranks 0, 1, 2 wait for anything to arrive, without data and with nothing in flight"),
        ("endless", "does not end"),
    ],
)
def test_mistakes_explain_themselves(how: str, said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        simulate(Broken(how=how), cluster(1, 1, 1), seconds=0.5)


def test_timing_only_needs_no_torch_also_where_models_travel() -> None:
    code = (
        "import sys; from paceline.backends.simulated import simulate; from paceline.strategies import create;"
        "from paceline.simulator.cluster import Cluster; cluster = Cluster.from_speeds([1, 0.5, 0.5]);"
        "texts = ['abs-sgd', 'd-psgd', 'matcha:momentum=acid', 'ad-psgd', 'non-blocking:topology=d-psgd'];"
        "runs = [simulate(create(text), cluster, seconds=1) for text in texts];"
        "assert all(run.samples_applied for run in runs); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_timing_only_models_weigh_what_real_ones_do() -> None:
    sent = [
        simulate(DPsgd(), cluster(1, 1, 1), seconds=1.0, learners=[TimingLearner(nbytes=nbytes)] * 3).bytes_sent
        for nbytes in (1000, 3000)
    ]
    assert sent[1] == 3 * sent[0] > 0


def test_thousands_of_workers() -> None:
    run = simulate(AbsSgd(), cluster(*[1] * 2000, sigma=0.2), seconds=1.0)
    assert settled(run)
    assert run.events > 20_000


def test_the_garbage_collector_is_only_paused() -> None:
    with pytest.raises(PacelineError):
        simulate(Broken(how="receive"), cluster(1), seconds=1.0)
    assert gc.isenabled()
