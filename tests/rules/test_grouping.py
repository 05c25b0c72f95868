"""Groups of similar speed: as the times fall, every worker once, and no moving to and fro."""

from __future__ import annotations

import itertools
import json
from math import log
from statistics import median

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.rules import grouping
from paceline.rules.grouping import APART, Grouping, equal, k_means_cuts, natural, nearest, regroup

FOUR = (1.0, 1.5, 2.0, 3.0)
FOUR_BY_FOUR = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))

seconds = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0, 4.0]))
clusters = st.lists(seconds, min_size=1, max_size=16).map(lambda times: dict(enumerate(times)))


def four_classes(seed: int, noise: float = 0.05) -> dict[int, float]:
    by_class = np.repeat(FOUR, 4) * np.exp(np.random.default_rng(seed).normal(0, noise, 16))
    return dict(enumerate(by_class.tolist()))


def check(found: Grouping, times: dict[int, float]) -> None:
    """Every worker is in one group, groups are runs in order of time, and the reason names them."""
    assert sorted(worker for group in found.groups for worker in group) == sorted(times)
    assert all(list(group) == sorted(group) for group in found.groups)
    for worker in times:
        assert worker in found.groups[found.group_of(worker)]
    for faster, slower in itertools.pairwise(found.groups):
        assert max(times[worker] for worker in faster) <= min(times[worker] for worker in slower)
    assert found.throughput_over_ssp(times) >= 1 - 1e-12
    assert ("One group" in found.reason) == (len(found.groups) == 1) and found.reason.endswith(".")


@given(clusters, st.data())
def test_equal_groups_differ_by_one_worker_at_most(times: dict[int, float], data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, len(times)))
    found = equal(times, groups)
    check(found, times)
    sizes = [len(group) for group in found.groups]
    assert len(sizes) == groups and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(clusters, st.integers(1, 8))
def test_natural_groups_are_runs_that_are_apart(times: dict[int, float], most: int) -> None:
    found = natural(times, most)
    check(found, times)
    assert len(found.groups) <= most
    assert len({times[worker] for worker in times}) >= len(found.groups), "equal times are never parted"
    centres = [np.mean([log(times[worker]) for worker in group]) for group in found.groups]
    assert all(slow - fast > log(APART) - 1e-9 for fast, slow in itertools.pairwise(centres))


@given(clusters, st.integers(1, 8), st.sampled_from([2.0**-20, 0.5, 1024.0]))
def test_only_the_ratio_of_times_matters(times: dict[int, float], most: int, factor: float) -> None:
    assume(all(abs(log(one / other) - log(APART)) > 1e-6 for one in times.values() for other in times.values()))
    scaled = {worker: factor * time for worker, time in times.items()}
    assert len(natural(scaled, most).groups) == len(natural(times, most).groups)
    assert equal(scaled, 1).throughput_over_ssp(scaled) == equal(times, 1).throughput_over_ssp(times)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8, unique=True), st.data())
def test_no_other_cuts_are_closer(points: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 4), min_size=len(points), max_size=len(points)))
    values, often = np.array(sorted(points), dtype=float), np.array(weights)

    def cost(cuts: tuple[int, ...]) -> float:
        runs = [np.repeat(values[start:end], often[start:end]) for start, end in itertools.pairwise(cuts)]
        return sum(float(((run - run.mean()) ** 2).sum()) for run in runs)

    ways = k_means_cuts(values, often, most=5)
    assert len(ways) == min(5, len(points))
    for groups, cuts in enumerate(ways, 1):
        assert len(cuts) == groups + 1 and cuts == sorted(set(cuts)) and (cuts[0], cuts[-1]) == (0, len(points))
        inner = itertools.combinations(range(1, len(points)), groups - 1)
        assert cost(tuple(cuts)) == pytest.approx(min(cost((0, *each, len(points))) for each in inner), abs=1e-8)


def test_sixteen_workers_are_four_times_four() -> None:
    times = {worker: FOUR[worker // 4] + 0.001 * worker for worker in range(16)}
    assert equal(times, 4).groups == natural(times, 8).groups == FOUR_BY_FOUR
    shuffled = {(5 * worker) % 16: time for worker, time in times.items()}
    assert (
        equal(shuffled, 4).groups
        == natural(shuffled, 8).groups
        == tuple(tuple(sorted((5 * worker) % 16 for worker in group)) for group in FOUR_BY_FOUR)
    )


def test_four_equal_classes_are_expected_to_be_faster_by_the_known_factor() -> None:
    times = {worker: FOUR[worker // 4] for worker in range(16)}
    assert equal(times, 4).throughput_over_ssp(times) == 1.875
    assert equal(times, 2).throughput_over_ssp(times) == 1.5
    assert equal(times, 16).throughput_over_ssp(times) == pytest.approx(1.875), "alone nobody waits either"


@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_equal_workers_are_one_group(workers: int) -> None:
    assert natural(dict.fromkeys(range(workers), 0.37), 8).groups == (tuple(range(workers)),)


@pytest.mark.parametrize("workers", [4, 8, 16, 64])
def test_alike_workers_are_one_group_through_noise(workers: int) -> None:
    for seed in range(30):
        noisy = np.exp(np.random.default_rng(seed).normal(0, 0.05, workers))
        assert natural(dict(enumerate(noisy.tolist())), 8).groups == (tuple(range(workers)),)


def test_four_classes_are_four_groups_through_noise() -> None:
    assert all(natural(four_classes(seed, 0.02), 8).groups == FOUR_BY_FOUR for seed in range(40))
    # With 5 % on sixteen workers two neighbouring classes come nearer than 25 % by chance, about once in eighty times.
    found = [natural(four_classes(seed), 8).groups for seed in range(80)]
    assert sum(groups == FOUR_BY_FOUR for groups in found) >= 76 and {len(groups) for groups in found} <= {3, 4, 5}
    assert found[0] == found[1] == found[2] == FOUR_BY_FOUR
    uniform = np.random.default_rng(0).uniform(0.95, 1.05, (40, 16)) * np.repeat(FOUR, 4)
    assert all(natural(dict(enumerate(row.tolist())), 8).groups == FOUR_BY_FOUR for row in uniform)


def test_two_classes_are_two_groups_and_a_lone_straggler_is_one() -> None:
    for seed in range(40):
        noise = np.exp(np.random.default_rng(seed).normal(0, 0.05, 16))
        two, lone = (np.where(np.arange(16) < first, 1.0, 4.0) * noise for first in (8, 15))
        assert natural(dict(enumerate(two.tolist())), 8).groups == (tuple(range(8)), tuple(range(8, 16)))
        assert natural(dict(enumerate(lone.tolist())), 8).groups == (tuple(range(15)), (15,))
    assert natural({0: 1.0, 7: 4.0}, 2).groups == ((0,), (7,))
    assert natural({0: 1.0, 7: 4.0}, 1).groups == ((0, 7),)


def test_the_reason_tells_which_times_made_which_cut() -> None:
    times = {worker: FOUR[worker // 4] for worker in range(16)}
    assert natural(times, 8).reason == (
        "4 groups at least 1.33 times apart: workers 0-3 (1 s), 4-7 (1.5 s), 8-11 (2 s), 12-15 (3 s). "
        "Expected: 1.88 times the throughput of one."
    )
    assert natural(times, 2).reason.startswith("2 groups at least 2 times apart: workers 0-7 (1 to 1.5 s), 8-15 (2 ")
    assert natural({0: 1.0, 1: 1.1, 2: 1.2}, 3).reason == (
        "One group: workers 0-2 (1 to 1.2 s). 2 would be only 1.15 times apart, and a cut needs more than 1.25."
    )


def test_given_groups_are_read_and_checked() -> None:
    assert grouping.given("0-3/4-7/8-11/12-15", range(16)).groups == FOUR_BY_FOUR
    assert grouping.given([[3, 1], (0,), {2}], range(4)).groups == ((1, 3), (0,), (2,))
    assert grouping.given("10+12/11", [10, 11, 12]).reason == "As given: workers 10+12, 11."


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("0-2/2+3", r"named twice: 2\."),
        ("0+0/1-3", r"named twice: 0\."),
        ("0/3", r"in no group: 1, 2\."),
        ("0-3/4+5", r"not in this run: 4, 5\. Where: groups 0-3/4\+5"),
        ([[0, 1, 2, 3], []], "and a group is empty"),
        ("0+0/5", "named twice: 0; in no group: 1, 2, 3; not in this run: 5"),
        ("fast/slow", r"'fast/slow' is not a list of groups.*0-3/4\+6/5\+7"),
        ("0-1//2-3", "is not a list of groups"),
        ("", "is not a list of groups"),
    ],
)
def test_wrong_groups_are_told_who_is_missing_or_double(groups: str | list[list[int]], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        grouping.given(groups, range(4))


def test_what_cannot_be_grouped_is_told_why() -> None:
    for groups in (0, 3):
        with pytest.raises(PacelineError, match=rf"2 workers cannot be cut into {groups} groups.*1 to 2"):
            equal({0: 1.0, 1: 1.0}, groups)
    with pytest.raises(PacelineError, match="in 0 groups"):
        natural({0: 1.0}, 0)
    with pytest.raises(PacelineError, match="no worker to group"):
        natural({}, 2)
    for time in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PacelineError, match="Worker 1 cannot take"):
            equal({0: 1.0, 1: time}, 1)
        with pytest.raises(PacelineError, match="Worker 1 cannot take"):
            regroup(Grouping(((0, 1),), ""), {0: 1.0, 1: time})
    with pytest.raises(PacelineError, match=r"Worker 9 is in no group. The groups are 0/1-3"):
        grouping.given("0/1-3", range(4)).group_of(9)
    with pytest.raises(PacelineError, match="no group to join"):
        nearest([[], []], 1.0)


# --- regrouping -------------------------------------------------------------------------------------------------------

groupings = st.lists(st.lists(seconds, min_size=1, max_size=5), min_size=1, max_size=5)


def laid_out(times_of_groups: list[list[float]]) -> tuple[Grouping, dict[int, float]]:
    """Workers 0, 1, … in groups as listed, and their times."""
    groups, times = [], {}
    for members in times_of_groups:
        groups.append(tuple(range(len(times), len(times) + len(members))))
        times.update(zip(groups[-1], members, strict=True))
    return Grouping(tuple(groups), ""), times


def distance(found: Grouping, times: dict[int, float]) -> float:
    logs = [[log(times[worker]) for worker in group] for group in found.groups]
    return sum(abs(each - median(members)) for members in logs for each in members)


@given(groupings)
def test_with_constant_times_moves_come_to_an_end_and_none_is_undone(times_of_groups: list[list[float]]) -> None:
    found, times = laid_out(times_of_groups)
    look, left = regroup(found, times), distance(found, times)
    assert not look.moves and look.grouping is found, "one look moves nobody"
    for _ in range(100):
        suspects = [(worker, side) for worker, side in json.loads(json.dumps(look.suspects))]
        look = regroup(look.grouping, times, suspects)
        assert sorted(worker for group in look.grouping.groups for worker in group) == sorted(times)
        assert all(look.grouping.groups), "a group was emptied"
        if look.moves:
            assert distance(look.grouping, times) < left
            left = distance(look.grouping, times)
            assert look.grouping.reason == " ".join(move.why for move in look.moves)
        if not look.suspects:
            break
    assert not look.suspects, "there is no end"
    assert regroup(look.grouping, times).suspects == ()


@given(st.lists(st.tuples(seconds, st.integers(1, 6)), min_size=2, max_size=5), st.integers(0, 10_000))
def test_nobody_moves_for_noise_below_the_threshold(classes: list[tuple[float, int]], seed: int) -> None:
    """Who is off by half the threshold at most is off the median, which is so too, by less than the threshold."""
    found, times = laid_out([[time] * count for time, count in classes])
    suspects: tuple[tuple[int, str], ...] = ()
    for noise in np.random.default_rng(seed).uniform(-0.499, 0.499, (4, len(times))).tolist():
        look = regroup(found, {worker: time * APART ** noise[worker] for worker, time in times.items()}, suspects)
        suspects = look.suspects
        assert not look.moves and not suspects


@given(st.integers(3, 6), st.integers(2, 6), st.integers(0, 2))
def test_a_worker_that_becomes_three_times_slower_moves_after_two_looks(fast: int, slow: int, who: int) -> None:
    found, times = laid_out([[1.0] * fast, [2.9] * slow])
    times[who] = 3.0
    first = regroup(found, times)
    assert first.moves == () and first.suspects == ((who, "slower"),)
    second = regroup(first.grouping, times, first.suspects)
    assert [(move.worker, move.source, move.target, move.side) for move in second.moves] == [(who, 0, 1, "slower")]
    assert second.grouping.group_of(who) == 1 and second.suspects == ()
    assert f"Worker {who} takes 3 s an iteration, 3 times the median of group 0 (1 s)" in second.grouping.reason
    times[who] = 1.0
    third = regroup(second.grouping, times)
    assert third.suspects == ((who, "faster"),)
    assert regroup(third.grouping, times, third.suspects).grouping.groups == found.groups


def test_a_look_in_between_that_is_as_usual_starts_the_count_again() -> None:
    found, usual = laid_out([[1.0] * 3, [3.0] * 3])
    slow = usual | {0: 3.0}
    suspects = regroup(found, usual, regroup(found, slow).suspects).suspects
    assert suspects == () and not regroup(found, slow, suspects).moves


def test_who_is_now_slower_and_now_faster_stays() -> None:
    found, usual = laid_out([[0.3] * 3, [1.0] * 3, [3.0] * 3])
    suspects: tuple[tuple[int, str], ...] = ()
    for time, side in [(3.0, "slower"), (0.3, "faster")] * 3:
        look = regroup(found, usual | {3: time}, suspects)
        suspects = look.suspects
        assert suspects == ((3, side),) and not look.moves


def test_who_is_off_but_nearest_to_its_own_group_stays() -> None:
    found, usual = laid_out([[1.0] * 3, [3.0] * 3])
    assert regroup(found, usual | {0: 0.1}).suspects == (), "there is no faster group"
    assert regroup(found, usual | {0: 1.7}).suspects == ()
    assert regroup(found, usual | {0: 1.8}).suspects == ((0, "slower"),)


def test_of_two_workers_the_one_that_changed_moves() -> None:
    found, times = laid_out([[1.0, 1.0], [3.0, 3.0], [0.6, 0.6]])
    times[0] = 3.0
    look = regroup(found, times, regroup(found, times).suspects)
    assert look.grouping.groups == ((1,), (0, 2, 3), (4, 5)) and look.suspects == ()


def test_several_move_in_one_look() -> None:
    found, times = laid_out([[1.0] * 3, [3.0] * 3])
    times |= {0: 3.0, 3: 1.0}
    first = regroup(found, times)
    assert first.suspects == ((0, "slower"), (3, "faster"))
    assert regroup(found, times, first.suspects).grouping.groups == ((1, 2, 3), (0, 4, 5))


def test_the_last_of_a_group_stays() -> None:
    found, times = laid_out([[1.0], [3.0] * 3])
    assert regroup(found, times | {0: 3.0}, [(0, "slower")]).grouping is found


def test_a_group_that_is_slower_as_a_whole_stays() -> None:
    found, times = laid_out([[1.0] * 3, [3.0] * 3])
    assert regroup(found, times | dict.fromkeys((0, 1, 2), 3.0)).suspects == ()


def test_who_has_no_time_is_not_looked_at() -> None:
    found, times = laid_out([[1.0] * 4, [3.0] * 3, [9.0]])
    times[0] = 9.0
    del times[1], times[7]
    look = regroup(found, times, regroup(found, times).suspects)
    assert [(move.worker, move.target) for move in look.moves] == [(0, 1)], "of the group of 9 s nothing is known"
    assert look.grouping.groups == ((1, 2, 3), (0, 4, 5, 6), (7,))
    assert regroup(found, {}).suspects == ()


def test_the_nearest_group_is_that_of_the_nearest_median_in_log_time() -> None:
    assert nearest([[1.0, 1.0, 50.0], [10.0]], 3.0) == 0
    assert nearest([[1.0], [10.0]], 3.3) == 1, "3.3 times 1, but only 3 times below 10"
    assert nearest([[1.0], [9.0]], 3.0) == 1 and nearest([[9.0], [1.0]], 3.0) == 0, "of two equally near the slower"
    assert nearest([[], [5.0], []], 0.001) == 1


@given(groupings, seconds)
def test_no_median_is_nearer(times_of_groups: list[list[float]], time: float) -> None:
    found = nearest(times_of_groups, time)
    distances = [abs(median(map(log, members)) - log(time)) for members in times_of_groups]
    assert distances[found] == pytest.approx(min(distances), abs=1e-8)
