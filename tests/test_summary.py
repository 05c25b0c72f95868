"""The numbers of a run, against runs small enough to be measured by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.record import Event, MemoryRecorder
from paceline.summary import Standing, account, intervals, summarise, waiting_for, window_of


def event(kind: str, rank: int, t: float, **fields: Any) -> Event:
    return {"kind": kind, "rank": rank, "t": t, **fields}


def blocking_run(seconds_per_batch: list[float], rounds: int, network: float, batch: int = 10) -> list[Event]:
    """Synchronous SGD: every rank one batch a round, everybody waits for the slowest, then for the network."""
    recorder, now = MemoryRecorder(), 0.0
    ranks = range(len(seconds_per_batch))
    for rank in ranks:
        recorder.write("start", rank, 0.0, pid=rank)
    for number in range(rounds):
        end = now + max(seconds_per_batch) + network
        for rank in ranks:
            joined = now + seconds_per_batch[rank]
            recorder.write("compute", rank, now, end=joined, samples=batch)
            recorder.write("join", rank, joined, round=number, samples=batch, bytes=100)
            recorder.write("wait", rank, joined, end=end, round=number)
            recorder.write("applied", rank, end, round=number, samples=batch * len(ranks), own=batch)
        now = end
    return recorder.events


def test_blocking_run_by_hand() -> None:
    events = blocking_run([1.0, 1.0, 2.0, 4.0], rounds=5, network=0.0)
    summary = summarise(events, speeds=[10.0, 10.0, 5.0, 2.5], seconds=20.0)
    assert summary.seconds == 20.0
    assert summary.share_of_ideal == pytest.approx(4 / 11)  # the physical limit: 36 %
    assert (summary.rounds, summary.bytes_sent) == (5, 2000)
    assert (summary.samples_computed, summary.samples_applied, summary.samples_discarded) == (200, 200, 0)
    assert [worker.idle for worker in summary.workers] == pytest.approx([0.75, 0.75, 0.5, 0.0])
    assert [worker.samples for worker in summary.workers] == [50] * 4


def test_waiting_for_a_worker_is_idle_and_waiting_for_the_network_is_communicating() -> None:
    summary = summarise(blocking_run([1.0, 2.0], rounds=3, network=1.0), speeds=[10.0, 5.0])
    shares = [(w.computing, w.communicating, w.idle) for w in summary.workers]
    assert shares[0] == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert shares[1] == pytest.approx((2 / 3, 1 / 3, 0.0))
    assert [i.doing for i in intervals(blocking_run([1.0, 2.0], 1, 1.0))[0]] == ["computing", "idle", "communicating"]


def test_the_last_round_counts_with_its_samples_and_with_its_time() -> None:
    events = blocking_run([3.0, 3.0], rounds=4, network=0.0)
    summary = summarise(events, speeds=[10 / 3, 10 / 3], seconds=10.0)
    assert summary.seconds == 12.0
    assert summary.share_of_ideal == pytest.approx(1.0)


def test_standing_still_until_the_limit_is_not_forgiven() -> None:
    summary = summarise(blocking_run([1.0], rounds=1, network=0.0), speeds=[10.0], seconds=10.0)
    assert summary.share_of_ideal == pytest.approx(0.1)


def test_an_empty_round_at_the_end_is_no_round_and_takes_no_time() -> None:
    events = [*blocking_run([1.0], 2, 0.0), event("applied", 0, 9.0, round=2, samples=0, own=0)]
    assert (summarise(events, speeds=[10.0]).rounds, window_of(events)) == (2, (0.0, 2.0))


def test_the_clock_begins_with_the_last_start_and_earlier_work_is_no_gift() -> None:
    events = blocking_run([1.0, 1.0], rounds=3, network=0.0)
    events = [e for e in events if not (e["kind"] == "start" and e["rank"] == 1)] + [event("start", 1, 1.0)]
    summary = summarise(events, speeds=[10.0, 10.0])
    assert summary.seconds == 2.0
    assert summary.share_of_ideal == pytest.approx(1.0)


def test_time_to_target_counts_from_the_start_of_the_window() -> None:
    metrics = [event("metric", 0, t, samples=0, metric=m, loss=1 - m) for t, m in [(4, 0.9), (2, 0.5), (6, 0.8)]]
    events = [event("start", 0, 1.0), *metrics]
    assert summarise(events, speeds=[1.0], target=0.7).time_to_target == 3.0
    assert summarise(events, speeds=[1.0], target=0.95).time_to_target is None
    assert summarise(events, speeds=[1.0]).final_metric == 0.8


def test_a_run_without_events_has_a_summary() -> None:
    summary = summarise([], speeds=[1.0, 2.0])
    assert (summary.share_of_ideal, summary.final_loss, len(summary.workers)) == (0.0, None, 2)
    assert summary.as_dict()["workers"][1]["speed"] == 2.0


@given(
    st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6), st.integers(1, 5), st.floats(0.0, 2.0), st.floats(0.0, 30)
)
def test_shares_sum_to_one_and_no_run_beats_the_limit(
    seconds_per_batch: list[float], rounds: int, network: float, limit: float
) -> None:
    events = blocking_run(seconds_per_batch, rounds, network)
    summary = summarise(events, speeds=[10 / s for s in seconds_per_batch], seconds=limit)
    assert summary.share_of_ideal <= 1.0 + 1e-9
    for worker in summary.workers:
        assert worker.computing + worker.communicating + worker.idle == pytest.approx(1.0)
        assert min(worker.computing, worker.communicating, worker.idle) >= 0.0


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_the_account_of_a_sound_run_balances_wherever_it_is_cut(
    seconds_per_batch: list[float], rounds: int, data: st.DataObject
) -> None:
    events = sorted(blocking_run(seconds_per_batch, rounds, 0.1), key=lambda e: (e["t"], e["rank"]))
    books = account(events[: data.draw(st.integers(0, len(events)))])
    assert books.errors == ()
    assert books.computed == books.applied + books.discarded + books.in_flight and books.in_flight >= 0


def test_the_account_finds_what_does_not_add_up() -> None:
    sound = blocking_run([1.0, 1.0], 1, 0.0)
    assert account(sound).in_flight == 0

    def errors(events: list[Event]) -> str:
        return "; ".join(account(events).errors)

    assert "applied round 0 twice" in errors([*sound, sound[-1]])
    assert "applied or discarded" in errors([*sound, event("discard", 0, 2.0, samples=10, reason="non-finite")])
    assert "more than it joined with" in errors([{**e, "own": 11} if e is sound[-1] else e for e in sound])
    assert "brought 20" in errors([{**e, "samples": 30} if e["kind"] == "applied" else e for e in sound])


def test_who_waits_for_whom_in_a_blocking_round() -> None:
    events = [event("start", rank, 0.0) for rank in range(3)]
    for rank in (0, 1):
        events += [
            event("compute", rank, 0.0, end=1.0, samples=10),
            event("join", rank, 1.0, round=0, samples=10, bytes=8),
        ]
    assert waiting_for(events) == {0: [2], 1: [2]}
    events.append(event("join", 2, 4.0, round=0, samples=10, bytes=8))
    assert waiting_for(events) == {0: [], 1: [], 2: []}  # all have joined: it is the network's turn
    events += [event("applied", rank, 4.1, round=0, samples=30, own=10) for rank in range(3)]
    assert waiting_for(events) == {}


def test_a_rank_that_computes_while_its_round_travels_does_not_wait() -> None:
    standing = Standing()
    overlapping = [
        event("start", 1, 0.0),
        event("join", 0, 1.0, round=0, samples=10, bytes=8),
        event("compute", 0, 1.0, end=2.0, samples=10),
    ]
    for each in overlapping:
        standing.see(each)
    assert standing.waiting_for() == {}
    standing.see(event("applied", 0, 2.0, round=0, samples=20, own=10))
    standing.see(event("join", 0, 2.0, round=1, samples=10, bytes=8))
    assert standing.waiting_for() == {}  # its micro-batch is recorded when it is done: believed until then
    standing.see(event("compute", 1, 3.0, end=9.0, samples=10))
    assert standing.waiting_for() == {0: [1]}  # but not for ever


def test_a_rank_that_is_done_neither_waits_nor_is_waited_for() -> None:
    events = [event("start", 0, 0.0), event("end", 0, 1.0), event("join", 1, 2.0, round=5, samples=0, bytes=8)]
    assert waiting_for(events) == {1: []}


def test_the_record_of_a_killed_worker_may_lack_what_its_server_has_used() -> None:
    """Events are written a few times a second: a rank that is killed takes the last ones with it."""
    events = [
        event("compute", 0, 0.0, end=1.0, samples=8),
        event("step", 1, 1.5, round=0, samples=8, bytes=0, of=0, delay=0),
        event("step", 1, 2.5, round=1, samples=8, bytes=0, of=0, delay=0),
    ]
    assert account(events).errors == ("rank 0 computed 8 samples, but 16 were applied or discarded",)
    assert account([*events, event("lost", 0, 2.6, reason="ended by SIGKILL")]).errors == ()
