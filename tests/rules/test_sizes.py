"""How large micro-batches and rounds are: never beyond what the user set, and as long as those of the fastest."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.rules.sizes import (
    LEAST_PART,
    NOISE_SHARE,
    OVERHEAD_FACTOR,
    least_of_a_round,
    micro_batch_size,
    round_target,
)

micro_batches = st.integers(1, 512)
clusters = st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=8)
noises = st.one_of(st.none(), st.floats(0.0, 1e7))
overheads = st.one_of(st.just(0.0), st.floats(0.0, 1e6), st.just(float("inf")))


@given(micro_batches, clusters, overheads)
def test_a_size_is_an_equal_part_of_the_users_micro_batch(whole: int, seconds: list[float], overhead: float) -> None:
    for rank in range(len(seconds)):
        size = micro_batch_size(whole, rank, seconds, overhead)
        assert 1 <= size <= whole
        assert size in {ceil(whole / parts) for parts in range(1, whole + 1)}


@given(micro_batches, clusters)
def test_nobody_takes_much_longer_than_the_fastest(whole: int, seconds: list[float]) -> None:
    """Equal parts are rounded to the nearest number of them, which may lengthen a micro-batch by a half; and a part is
    at least a sample, rounded up."""
    longest = 1.5 * whole * min(seconds) / LEAST_PART
    for rank, each in enumerate(seconds):
        assert micro_batch_size(whole, rank, seconds, 0.0) * each <= longest * (1 + 1e-9) + each


@given(micro_batches, clusters)
def test_who_is_slower_never_takes_more(whole: int, seconds: list[float]) -> None:
    ranks = sorted(range(len(seconds)), key=lambda rank: seconds[rank])
    sizes = [micro_batch_size(whole, rank, seconds, 0.0) for rank in ranks]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == ceil(whole / min(whole, LEAST_PART)), "the fastest takes a quarter of what the user set"


@given(micro_batches, clusters)
def test_only_the_ratio_of_speeds_matters(whole: int, seconds: list[float]) -> None:
    """To another power of two, because those are exact."""
    for rank in range(len(seconds)):
        size = micro_batch_size(whole, rank, seconds, 0.0)
        assert micro_batch_size(whole, rank, [1024 * each for each in seconds], 0.0) == size


@given(micro_batches, clusters)
def test_where_rounds_are_long_anyway_nothing_is_cut(whole: int, seconds: list[float]) -> None:
    """A round of four micro-batches as long as the fastest's needs no shorter ones, which only cost more."""
    for rank, each in enumerate(seconds):
        fair = whole * min(seconds) / each
        uncut = micro_batch_size(whole, rank, seconds, 0.0, in_a_round=ceil(LEAST_PART * fair))
        assert uncut == ceil(whole / round(whole / max(1.0, fair)))
        shorter = micro_batch_size(whole, rank, seconds, 0.0, in_a_round=ceil(LEAST_PART * fair) - 1)
        assert shorter == micro_batch_size(whole, rank, seconds, 0.0)


def test_who_is_alone_takes_what_the_user_set() -> None:
    assert micro_batch_size(32, 0, (1.0,), 0.0) == 32


def test_an_unknown_speed_changes_nothing() -> None:
    assert micro_batch_size(32, 0, (0.0, 1.0), 0.0) == 32
    assert micro_batch_size(32, 0, (0.0, 0.0), 0.0) == 32
    assert micro_batch_size(32, 1, (0.0, 1.0, 2.0), 0.0) == 8, "who has none is not the fastest either"
    assert micro_batch_size(32, 2, (0.0, 1.0, 2.0), 0.0) == 4


@given(micro_batches, clusters, st.floats(0.0, 200.0))
def test_the_overhead_of_a_micro_batch_stays_a_small_part_of_it(
    whole: int, seconds: list[float], overhead: float
) -> None:
    for rank in range(len(seconds)):
        size = micro_batch_size(whole, rank, seconds, overhead)
        assert size >= min(whole, OVERHEAD_FACTOR * overhead) / 1.5 - 1e-9, "up to the rounding to equal parts"


@given(micro_batches, clusters, overheads)
def test_a_round_has_two_micro_batches_of_a_rank_unless_that_takes_longer_than_a_whole_one_of_the_fastest(
    whole: int, seconds: list[float], overhead: float
) -> None:
    for rank, each in enumerate(seconds):
        size = micro_batch_size(whole, rank, seconds, overhead)
        least = least_of_a_round(whole, rank, seconds, size)
        assert least in (1, 2)
        assert least == 1 or least * size * each <= whole * min(seconds) * (1 + 1e-9)
        assert least == 2 or 2 * size * each > whole * min(seconds) * (1 - 1e-9)


@given(st.integers(1, 10_000), micro_batches, st.integers(1, 64), noises)
def test_a_target_that_is_given_is_kept(target: int, whole: int, workers: int, noise: float | None) -> None:
    assert round_target(target, whole, workers, noise) == target


@given(micro_batches, st.integers(1, 64), noises)
def test_an_automatic_target_is_at_least_a_micro_batch_and_at_most_four_rounds(
    whole: int, workers: int, noise: float | None
) -> None:
    target = round_target("auto", whole, workers, noise)
    assert isinstance(target, int) and whole <= target <= LEAST_PART * workers * whole
    if noise is None:
        assert target == workers * whole
    elif whole <= NOISE_SHARE * noise <= LEAST_PART * workers * whole:
        assert target == pytest.approx(NOISE_SHARE * noise, abs=0.5)
