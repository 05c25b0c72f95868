"""The limit against brute force, its edges by hand, and the split against what it promises: a product."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import count, takewhile
from math import inf, nan
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.rules import limit as rule
from paceline.rules.limit import Fit, fit, least_steps, limit, split, time_for

# Odd ones, whose quotients round, beside round ones, which finish samples at the very same moment.
SPEEDS = st.lists(st.floats(0.05, 20.0) | st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=5)
NOISE = st.floats(0.0, 300.0) | st.sampled_from([0.0, 1e-9, 1.0])
COMMUNICATION = st.floats(0.0, 3.0) | st.sampled_from([0.0, 0.5, 1.0])


# ---- the time for a batch


def finished(speeds: list[float], batch: int) -> list[float]:
    """When each of the first `batch` samples is finished, by brute force."""
    return sorted(k / speed for speed in speeds for k in range(1, batch + 1))[:batch]


@given(SPEEDS, st.integers(1, 120))
def test_a_batch_is_ready_when_its_last_sample_is_finished(speeds: list[float], batch: int) -> None:
    assert time_for(batch, speeds) == finished(speeds, batch)[-1]


@given(SPEEDS, st.integers(1, 10**6))
def test_the_time_for_a_large_batch_lies_between_its_bounds(speeds: list[float], batch: int) -> None:
    total, least = sum(speeds), time_for(batch, speeds)
    assert batch / total * (1 - 1e-12) <= least <= (batch + len(speeds)) / total * (1 + 1e-12)


@pytest.mark.parametrize("speed", [0.1, 0.3, 7.0, 49.0, 1e6 / 3])
def test_one_worker_finishes_the_kth_sample_at_k_over_its_speed(speed: float) -> None:
    for batch in [*range(1, 200), 10**6, 10**6 + 1]:
        assert time_for(batch, [speed]) == batch / speed
    assert time_for(0, [speed]) == 0.0


def test_the_search_looks_at_about_one_moment_a_worker() -> None:
    random, batch = Random(7), 10**6
    speeds = [random.uniform(1.0, 100.0) for _ in range(500)]
    looked = rule._moments(speeds, batch / sum(speeds) * rule.BELOW)
    assert len(list(takewhile(lambda moment: moment[1] < batch, looked))) <= len(speeds) + 1


# ---- the limit


def ends(speed: float) -> Iterator[float]:
    """When one worker finishes its first, second, … sample."""
    return (k / speed for k in count(1))


def least_cost(speeds: list[float], noise_scale: float, comm_seconds: float, overlap: bool) -> tuple[float, int]:
    """The least cost and its batch, one batch after the other, until no larger one can be better."""
    best, best_batch, total = inf, 0, sum(speeds)
    for batch, computed in enumerate(merge(*map(ends, speeds)), start=1):
        cost = (1 + noise_scale / batch) * (max(computed, comm_seconds) if overlap else computed + comm_seconds)
        if cost <= best:
            best, best_batch = cost, batch
        if (batch + noise_scale) / total > best * (1 + 1e-9):
            return best, best_batch
    raise AssertionError("the samples came to an end")


@settings(max_examples=300, deadline=None)
@given(SPEEDS, NOISE, COMMUNICATION, st.booleans())
def test_no_batch_costs_less_than_the_limit(
    speeds: list[float], noise_scale: float, comm_seconds: float, overlap: bool
) -> None:
    found = limit(speeds, noise_scale, comm_seconds, overlap)
    cost, batch = least_cost(speeds, noise_scale, comm_seconds, overlap)
    assert found.seconds_per_step_min == pytest.approx(cost, rel=1e-12)
    step = max(time_for(batch, speeds), comm_seconds) if overlap else time_for(batch, speeds) + comm_seconds
    assert found.batch == batch or found.share(batch, step) == pytest.approx(1.0, rel=1e-12), "two are equally good"
    assert found.compute_seconds == time_for(int(found.batch), speeds)


def test_the_best_batch_by_hand() -> None:
    speeds = [2.0, 2.0, 1.0]
    during = limit(speeds, noise_scale=10, comm_seconds=2.0)
    assert (during.batch, during.step_seconds, during.binds) == (10, 2.0, "communication")
    assert during.seconds_per_step_min == 4.0
    # With a free network: 2 samples after ½ s cost 3 s, 5 after 1 s the same, and a larger batch more.
    free = limit(speeds, noise_scale=10, comm_seconds=0.0)
    assert free.seconds_per_step_min == 3.0 and free.batch in (2, 5) and free.binds == "noise"
    blocking = limit(speeds, noise_scale=10, comm_seconds=2.0, overlap=False)
    assert blocking.batch == 10 and blocking.seconds_per_step_min == 8.0


def test_without_noise_the_quickest_update_is_the_best_and_takes_all_that_is_ready() -> None:
    assert limit([4.0, 4.0, 1.0], 0, 0.0).batch == 2, "a sample of each of the fastest"
    assert limit([4.0, 4.0, 1.0], 0, 0.0).step_seconds == 0.25
    busy = limit([4.0, 4.0, 1.0], 0, 1.0)
    assert (busy.batch, busy.step_seconds, busy.seconds_per_step_min) == (9, 1.0, 1.0)
    assert busy.binds == "communication" and limit([4.0], 0, 0.0).binds == "devices"
    assert limit([4.0, 4.0, 1.0], 0, 1.0, overlap=False).step_seconds == 1.25


def test_with_endless_noise_only_samples_count() -> None:
    endless = limit([4.0, 4.0, 1.0], inf, 0.5)
    assert (endless.batch, endless.seconds_per_step_min, endless.binds) == (inf, inf, "noise")
    assert endless.share(batch=18, step_seconds=4.0) == 0.5, "half of the samples that the devices could compute"
    nearly = limit([4.0, 4.0, 1.0], 1e7, 0.5)
    assert nearly.share(18, 4.0) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("noise_scale", [1e9, 1e12, 1e15, 1e300, 1.7e308])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_vast_noise_scale_is_answered_soon_and_closely(noise_scale: float, overlap: bool) -> None:
    speeds = [199.83, 200.17, 99.71, 50.03]
    found = limit(speeds, noise_scale, 0.01, overlap)
    least = noise_scale / sum(speeds)
    assert least <= found.seconds_per_step_min <= least * 1.001


def test_a_large_cluster_is_answered_soon() -> None:
    random = Random(3)
    speeds = [random.uniform(1.0, 100.0) for _ in range(1000)]
    found = limit(speeds, 1e4, 0.001)
    assert found.share(found.batch, found.step_seconds) == 1.0
    assert (1e4 + found.batch) / sum(speeds) <= found.seconds_per_step_min


@settings(deadline=None)
@given(SPEEDS, NOISE, COMMUNICATION)
def test_the_limit_falls_with_speed_and_rises_with_noise_and_communication(
    speeds: list[float], noise_scale: float, comm_seconds: float
) -> None:
    cost = limit(speeds, noise_scale, comm_seconds).seconds_per_step_min
    near = 1 + 1e-12
    assert limit([*speeds, 1.0], noise_scale, comm_seconds).seconds_per_step_min <= cost * near
    assert limit(speeds, noise_scale + 5, comm_seconds).seconds_per_step_min >= cost / near
    assert limit(speeds, noise_scale, comm_seconds + 0.5).seconds_per_step_min >= cost / near
    assert limit(speeds, noise_scale, comm_seconds, overlap=False).seconds_per_step_min >= cost / near


@pytest.mark.parametrize(
    ("speeds", "noise_scale", "comm_seconds", "said"),
    [
        ([], 1.0, 0.0, "without workers"),
        ([1.0, 0.0], 1.0, 0.0, "cannot do 0 samples"),
        ([nan], 1.0, 0.0, "cannot do nan samples"),
        ([inf], 1.0, 0.0, "cannot do inf samples"),
        ([1.0], -1.0, 0.0, "noise scale of -1"),
        ([1.0], nan, 0.0, "noise scale of nan"),
        ([1.0], 1.0, -0.5, "all-reduce of -0.5"),
        ([1.0], 1.0, nan, "all-reduce of nan"),
        ([1.0], 1.0, inf, "all-reduce of inf"),
        ([1e6], 1.0, 1e6, "a unit is wrong"),
    ],
)
def test_what_cannot_be(speeds: list[float], noise_scale: float, comm_seconds: float, said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        limit(speeds, noise_scale, comm_seconds)


# ---- the split


@given(SPEEDS, st.floats(0.0, 300.0), COMMUNICATION, st.floats(1.0, 500.0), st.floats(0.01, 1.0), st.floats(100.0, 1e6))
@settings(deadline=None)
def test_the_shares_multiply_to_the_limits_time_over_the_runs(
    speeds: list[float], noise_scale: float, comm_seconds: float, batch: float, hardware: float, samples: float
) -> None:
    bound, steps = limit(speeds, noise_scale, comm_seconds), 40.0
    shares = split(bound, hardware=hardware, batch=batch, samples=samples, least_steps=steps)
    run = samples / (sum(speeds) * hardware)
    assert shares.share == pytest.approx(steps * bound.seconds_per_step_min / run)
    assert shares.hardware == hardware


def test_the_best_run_is_at_the_limit() -> None:
    bound = limit([2.0, 2.0, 1.0], noise_scale=10, comm_seconds=2.0)
    shares = split(bound, hardware=1.0, batch=bound.batch, samples=20 * 4, least_steps=4)
    assert (shares.batch, shares.statistics, shares.share) == (1.0, 1.0, 1.0)


def test_what_is_not_known_is_not_made_up() -> None:
    bound = limit([2.0], noise_scale=10, comm_seconds=0.0)
    for known in ({"samples": 100.0}, {"least_steps": 2.0}, {"samples": 0, "least_steps": 2.0}, {}):
        shares = split(bound, hardware=0.5, batch=4, **known)
        assert shares.statistics is None and shares.share is None and shares.batch > 0


# ---- the fit

POINTS = st.lists(st.tuples(st.floats(1.0, 1e3), st.floats(1.0, 1e4)), min_size=2, max_size=6)


@given(st.floats(0.1, 1e4), st.floats(0.0, 1e5), st.lists(st.integers(1, 4096), min_size=2, max_size=8, unique=True))
def test_a_fit_finds_what_the_points_were_made_of(steps: float, noise_scale: float, batches: list[int]) -> None:
    found = fit([(batch, steps * (batch + noise_scale)) for batch in batches])
    for batch in batches:
        samples = found.least_samples + found.least_steps * batch
        assert samples == pytest.approx(steps * (batch + noise_scale), rel=1e-6)
        assert least_steps(samples, batch, noise_scale) == pytest.approx(steps, rel=1e-6)


@given(POINTS.filter(lambda points: max(points)[0] - min(points)[0] > 1.0), st.data())
def test_no_other_line_with_both_numbers_above_zero_is_nearer(
    points: list[tuple[float, float]], data: st.DataObject
) -> None:
    def error(line: Fit) -> float:
        return sum((line.least_samples + line.least_steps * batch - samples) ** 2 for batch, samples in points)

    found = fit(points)
    assert found.least_steps >= 0 and found.least_samples >= 0 and found.noise_scale >= 0
    other = Fit(data.draw(st.floats(0.0, 100.0)), data.draw(st.floats(0.0, 1e4)))
    near = Fit(found.least_steps * data.draw(st.floats(0.9, 1.1)), found.least_samples)
    assert error(found) <= min(error(other), error(near)) * (1 + 1e-6) + 1e-3


def test_samples_that_do_not_grow_with_the_batch_are_all_noise() -> None:
    assert fit([(10, 300), (20, 200)]) == Fit(0.0, 250.0)
    assert fit([(10, 300), (20, 200)]).noise_scale == inf
    assert fit([(10, 100), (20, 300)]).noise_scale == 0.0


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "one batch size"),
        ([(32, 100)], "one batch size"),
        ([(32, 100), (32, 120)], "one batch size"),
        ([(32, 100), (64, inf)], "inf samples"),
        ([(0, 100), (64, 100)], "batch 0"),
        ([(nan, 100), (64, 100)], "batch nan"),
    ],
)
def test_what_cannot_be_fitted(points: list[tuple[float, float]], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        fit(points)
