"""Jitter has mean 1, its own stream for each rank, and the spread and correlation asked for."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import Constant, Drift, Exponential, Jitter, LogNormal, Pareto, SlowDowns, Trace

DATA = Path(os.environ.get("PACELINE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def factors(jitter: Jitter, count: int = 200_000, rank: int = 0, seed: int = 1) -> np.ndarray:
    cluster = Cluster.from_speeds([1.0] * (rank + 1), micro_batch_seconds=1.0, jitter=jitter, seed=seed)
    return np.fromiter(islice(cluster.durations(rank), count), float)


@pytest.mark.parametrize(
    "jitter",
    [
        Constant(),
        LogNormal(0.3),
        Exponential(),
        Pareto(3.0),
        Drift(0.7, 0.2),
        SlowDowns(factor=6.0, probability=0.05),
        SlowDowns(factor=6.0, probability=1.0),
        SlowDowns(factor=6.0, probability=0.0),
        SlowDowns(factor=1.0, probability=0.5),
    ],
    ids=str,
)
def test_the_mean_is_one(jitter: Jitter) -> None:
    drawn = factors(jitter)
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(1.0, abs=0.01)


def test_spread_and_correlation() -> None:
    assert factors(LogNormal(0.3)).std() == pytest.approx(np.sqrt(np.exp(0.09) - 1), rel=0.02)
    assert factors(Exponential()).std() == pytest.approx(1.0, rel=0.02)
    drift = factors(Drift(correlation=0.7, spread=0.2))
    assert drift.std() == pytest.approx(0.2, rel=0.03)
    assert np.corrcoef(drift[:-1], drift[1:])[0, 1] == pytest.approx(0.7, abs=0.01)
    independent = factors(Drift(correlation=0.0, spread=0.2))
    assert np.corrcoef(independent[:-1], independent[1:])[0, 1] == pytest.approx(0.0, abs=0.01)


def test_slow_downs_are_so_many_times_slower_and_so_often() -> None:
    drawn = factors(SlowDowns(factor=6.0, probability=0.1))
    assert set(drawn) == {1 / 1.5, 6 / 1.5}, "of mean 1 over both: 0.9 + 0.1 · 6"
    slow = drawn > 1
    assert slow.mean() == pytest.approx(0.1, abs=0.003)
    assert slow[1:][slow[:-1]].mean() == pytest.approx(0.1, abs=0.01), "each by itself"
    assert set(factors(SlowDowns(factor=6.0, probability=0.0))) == set(factors(SlowDowns(1.0, 0.5))) == {1.0}


def test_every_rank_and_seed_has_its_own_stream() -> None:
    jitter = LogNormal(0.2)
    first = factors(jitter, 100)
    assert (first == factors(jitter, 100)).all()
    assert (first != factors(jitter, 100, rank=1)).all()
    assert (first != factors(jitter, 100, seed=2)).all()


def test_a_rank_keeps_its_stream_when_the_others_change() -> None:
    pair = Cluster.from_speeds([1, 1], jitter=LogNormal(0.2))
    many = Cluster.from_speeds([9, 1, 3, 4], jitter=LogNormal(0.2))
    assert list(islice(pair.durations(1), 300)) == list(islice(many.durations(1), 300))


def write_trace(folder: Path, text: str) -> str:
    path = folder / "job.csv"
    path.write_text(text)
    return str(path)


def test_a_trace_is_replayed_in_a_loop_and_normalised_by_worker(tmp_path: Path) -> None:
    file = write_trace(tmp_path, "worker,gpu,time,batch_time_norm\n0,25,1,100\n1,25,1,10\n0,25,2,300\n1,25,2,10\n")
    zero, one = factors(Trace(file), 5), factors(Trace(file), 5, rank=1)
    assert set(zero) == {0.5, 1.5}
    assert zero[0] == zero[2] == zero[4] != zero[1]
    assert set(one) == {1.0}
    assert (factors(Trace(file), 5, rank=2) >= 0.5).all(), "more ranks than workers: they share"
    cluster = Cluster.from_trace(file)
    assert cluster.workers == 2
    assert cluster.devices[1].speed / cluster.devices[0].speed == pytest.approx(20)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker,gpu,time\n0,1,1\n", "no column batch_time_norm"),
        ("worker,batch_time_norm\n0,5\n0,fast\n", "line 3 of"),
        ("worker,batch_time_norm\n0,0\n", "line 2 of"),
        ("worker,batch_time_norm\n", "no rows"),
        ("", "no column"),
    ],
)
def test_a_malformed_trace_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        Trace(write_trace(tmp_path, text))


def test_a_missing_trace_is_named() -> None:
    with pytest.raises(PacelineError, match=r"nowhere\.csv cannot be read"):
        Trace("nowhere.csv")


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogNormal(-0.1),
        lambda: Pareto(1.0),
        lambda: Drift(1.0, 0.1),
        lambda: Drift(0.5, 0.0),
        lambda: SlowDowns(0.5, 0.1),
        lambda: SlowDowns(2.0, -0.1),
        lambda: SlowDowns(2.0, 1.1),
        lambda: SlowDowns(2.0, float("nan")),
        lambda: LogNormal("much"),
        lambda: LogNormal(float("nan")),
    ],
)
def test_impossible_jitter_is_refused(make: object) -> None:
    with pytest.raises(PacelineError):
        make()


@pytest.mark.skipif(not (DATA / "traces").is_dir(), reason="needs the Alibaba traces in PACELINE_DATA/traces")
@pytest.mark.parametrize(("job", "share"), [(1, 0.90), (2, 0.88), (3, 0.90)])
def test_blocking_training_on_real_traces_reaches_what_was_recorded(job: int, share: float) -> None:
    cluster = Cluster.from_trace(str(DATA / "traces" / f"pai_job_{job}.csv"), micro_batch_seconds=1.0)
    times = np.array([list(islice(cluster.durations(rank), 240)) for rank in range(cluster.workers)])
    ideal = cluster.micro_batches_per_second() * times.max(axis=0).sum()
    assert times.size / ideal == pytest.approx(share, abs=0.03)
