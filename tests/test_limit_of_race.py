"""How far from the limit a race's strategies stayed, from records small enough to be worked out by hand."""

from __future__ import annotations

import json
from math import inf, nan
from typing import Any

import pytest

from paceline.race.limit_of_race import (
    contribution_bytes,
    measured_comm_seconds,
    noise_scale,
    samples_to_target,
    shares_of_limit,
)
from paceline.record import Event
from paceline.summary import summarise

SPEEDS = [20.0, 20.0, 10.0]
TARGET = 0.9


def event(kind: str, rank: int = 0, t: float = 0.0, **fields: Any) -> Event:
    return {"kind": kind, "rank": rank, "t": t, **fields}


def noise(squared_norm: float, variance: float) -> Event:
    return event("noise", round=0, squared_norm=squared_norm, variance=variance)


def run(batch: int, step_seconds: float, to_target: int, rounds: int = 100) -> list[Event]:
    """A run of equal rounds that reaches the target after so many samples."""
    events = [event("start", rank) for rank in range(len(SPEEDS))]
    for number in range(rounds):
        now, samples = (number + 1) * step_seconds, (number + 1) * batch
        events.append(event("join", 0, now - 0.1, round=number, samples=batch, bytes=4000))
        events.append(event("wait", 0, now - 0.1, end=now, round=number))
        events.append(event("applied", 0, now, round=number, samples=batch, own=batch))
        events.append(event("metric", 0, now, samples=samples, metric=0.95 if samples >= to_target else 0.5, loss=1.0))
    return events


def blocks(runs: dict[str, list[Event]], comm_seconds: float | None = 0.1) -> dict[str, dict[str, Any]]:
    results = [
        {"strategy": name, **summarise(events, speeds=SPEEDS, target=TARGET).as_dict()} for name, events in runs.items()
    ]
    found = shares_of_limit(results, runs, speeds=SPEEDS, comm_seconds=comm_seconds, target=TARGET)
    return dict(zip(runs, found, strict=True))


def test_a_race_by_hand() -> None:
    # The best batch is the 5 samples that are computed in the 0.1 s of an all-reduce, at a cost of 0.5 s a step.
    runs = {
        "all-reduce": [*run(batch=20, step_seconds=1.0, to_target=400), noise(1.0, 20.0)],
        "balanced": run(batch=10, step_seconds=0.4, to_target=360),
        "abs-sgd": [*run(batch=10, step_seconds=0.2, to_target=400), noise(1.0, 1e6)],
    }
    found = blocks(runs)
    assert list(found["all-reduce"]) == [
        *("share", "hardware", "batch", "statistics", "noise_scale", "comm_seconds", "best_batch", "seconds")
    ]
    for block in found.values():
        assert (block["noise_scale"], block["comm_seconds"], block["best_batch"]) == (20.0, 0.1, 5)
        assert block["seconds"] == pytest.approx(5.0), "the least number of steps is all-reduce's, 400/(20 + 20)"
    all_reduce, balanced, abs_sgd = found["all-reduce"], found["balanced"], found["abs-sgd"]
    assert (all_reduce["hardware"], all_reduce["batch"], all_reduce["statistics"]) == pytest.approx((0.4, 0.625, 1.0))
    assert (balanced["hardware"], balanced["batch"], balanced["statistics"]) == pytest.approx((0.5, 5 / 6, 300 / 360))
    assert (abs_sgd["hardware"], abs_sgd["batch"], abs_sgd["statistics"]) == pytest.approx((1.0, 5 / 6, 0.75))
    # The product is the limit's time over the run's own.
    assert [block["share"] for block in found.values()] == pytest.approx([5 / 20, 5 / 14.4, 5 / 8])
    json.dumps(found, allow_nan=False)


def test_without_a_measured_noise_nothing_is_made_up() -> None:
    for block in blocks({"all-reduce": run(20, 1.0, 400), "abs-sgd": run(10, 0.2, 400)}).values():
        assert block["hardware"] > 0 and block["comm_seconds"] == 0.1
        rest = ("share", "batch", "statistics", "noise_scale", "best_batch", "seconds")
        assert [block[key] for key in rest] == [None] * 6


def test_without_a_measured_network_there_is_no_limit() -> None:
    block = blocks({"all-reduce": [*run(20, 1.0, 400), noise(1.0, 20.0)]}, comm_seconds=None)["all-reduce"]
    assert (block["noise_scale"], block["comm_seconds"], block["best_batch"], block["share"]) == (
        20.0,
        None,
        None,
        None,
    )


def test_a_network_that_takes_for_ever_costs_no_race_its_result() -> None:
    block = blocks({"all-reduce": [*run(20, 1.0, 400), noise(1.0, 20.0)]}, comm_seconds=1e12)["all-reduce"]
    assert (block["comm_seconds"], block["best_batch"], block["seconds"]) == (1e12, None, None)


def test_without_a_blocking_run_to_the_target_the_statistics_are_not_known() -> None:
    for runs in (
        {"abs-sgd": [*run(10, 0.2, 400), noise(1.0, 20.0)]},
        {"all-reduce": [*run(20, 1.0, to_target=10**9), noise(1.0, 20.0)], "abs-sgd": run(10, 0.2, 400)},
    ):
        block = blocks(runs)["abs-sgd"]
        assert block["batch"] == pytest.approx(5 / 6) and block["best_batch"] == 5
        assert (block["share"], block["statistics"], block["seconds"]) == (None, None, None)


def test_a_run_that_missed_the_target_has_no_statistics_but_the_limit_has_its_time() -> None:
    runs = {"all-reduce": [*run(20, 1.0, 400), noise(1.0, 20.0)], "abs-sgd": run(10, 0.2, to_target=10**9)}
    block = blocks(runs)["abs-sgd"]
    assert (block["share"], block["statistics"]) == (None, None) and block["seconds"] == pytest.approx(5.0)


def test_a_run_without_a_round_has_a_block() -> None:
    block = blocks({"all-reduce": [noise(1.0, 20.0)]})["all-reduce"]
    assert (block["hardware"], block["batch"], block["share"], block["best_batch"]) == (0.0, None, None, 5)


# ---- the noise scale


def test_the_noise_scale_is_a_ratio_of_sums() -> None:
    assert noise_scale({"all-reduce": [noise(1.0, 30.0), noise(3.0, 10.0)]}) == 10.0
    assert noise_scale({"all-reduce": [noise(-1.0, 30.0), noise(3.0, -10.0)]}) == 10.0, "each may be below zero"


def test_blocking_runs_are_believed_first() -> None:
    delayed = [noise(1.0, 1000.0)]
    assert noise_scale({"abs-sgd": delayed, "balanced": [noise(1.0, 8.0)], "all-reduce": [noise(1.0, 12.0)]}) == 10.0
    assert noise_scale({"abs-sgd": delayed, "all-reduce": []}) == 1000.0
    assert noise_scale({"abs-sgd": delayed, "all-reduce": [noise(-0.5, 12.0)]}) == pytest.approx(1012.0 / 0.5)


def test_a_gradient_that_is_lost_in_the_noise_tells_no_scale() -> None:
    assert noise_scale({"all-reduce": [noise(-1.0, 30.0)]}) is None
    assert noise_scale({"all-reduce": [noise(0.0, 30.0)]}) is None
    assert noise_scale({"all-reduce": []}) is None
    assert noise_scale({"all-reduce": [noise(2.0, -1.0)]}) == 0.0


def test_estimates_of_a_diverged_run_are_left_out() -> None:
    events = [noise(1.0, 5.0), noise(nan, 1.0), noise(1.0, inf), noise(inf, nan)]
    assert noise_scale({"all-reduce": events}) == 5.0


# ---- communication and samples


def round_of(number: int, joins: list[float], ends: list[float]) -> list[Event]:
    events = [event("join", rank, t, round=number, samples=1, bytes=8) for rank, t in enumerate(joins)]
    return events + [
        event("wait", rank, joins[rank], end=end, round=number) for rank, end in enumerate(ends) if end > joins[rank]
    ]


def test_an_all_reduce_begins_when_the_last_rank_has_joined() -> None:
    rounds = [
        *round_of(0, [0.0, 1.0], [1.5, 1.5]),
        *round_of(1, [2.0, 3.0], [3.25, 3.25]),
        *round_of(2, [5.0, 4.0], [9.0, 9.0]),
    ]
    assert measured_comm_seconds([rounds]) == 0.5
    quicker = round_of(0, [0.0, 1.0], [1.125, 1.125])
    assert measured_comm_seconds([rounds, quicker, []]) == 0.125
    assert measured_comm_seconds([[], round_of(0, [0.0, 1.0], [0.0, 0.0])]) is None, "nobody waited"


def test_clocks_that_disagree_make_no_negative_time() -> None:
    assert measured_comm_seconds([round_of(0, [0.0, 2.0], [1.9, 0.0])]) == 0.0


def test_what_a_rank_brings() -> None:
    assert contribution_bytes([run(20, 1.0, 400), round_of(0, [0.0], [1.0])]) == 4000
    assert contribution_bytes([[]]) == 0


def test_the_first_metric_that_reaches_the_target_counts() -> None:
    metrics = [
        event("metric", t=t, samples=samples, metric=metric)
        for t, samples, metric in [(3.0, 300, 0.95), (1.0, 100, 0.5), (2.0, 200, 0.9), (4.0, 400, 0.5)]
    ]
    assert samples_to_target(metrics, 0.9) == 200
    assert samples_to_target(metrics, 0.99) is None
