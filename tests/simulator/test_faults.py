"""Faults are data, checked when made, and answer a run's questions."""

from __future__ import annotations

from math import inf

import pytest

from paceline.errors import PacelineError
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import Crash, FaultPlan, Hang, LateJoin, Partition, SlowDown


def test_a_slow_down_stretches_what_starts_in_it() -> None:
    plan = FaultPlan([SlowDown(rank=1, at=10.0, factor=6, duration=5.0)])
    assert plan.end(1, 9.9, 1.0) == 10.9
    assert plan.end(1, 10.0, 1.0) == 16.0
    assert plan.end(1, 15.0, 1.0) == 16.0
    assert plan.end(0, 12.0, 1.0) == 13.0
    assert plan.touched == {1}


def test_a_hang_makes_the_micro_batch_end_later() -> None:
    plan = FaultPlan([Hang(rank=0, at=5.0, duration=3.0)])
    assert plan.end(0, 4.5, 1.0) == 8.5
    assert plan.end(0, 6.0, 1.0) == 9.0, "what starts in it starts when it is over"
    assert plan.end(0, 4.0, 1.0) == 5.0
    assert plan.end(0, 8.0, 1.0) == 9.0
    assert plan.thaw(0, 5.0) == 8.0
    assert plan.thaw(0, 8.0) == 8.0
    assert FaultPlan([Hang(rank=0, at=5.0)]).end(0, 4.5, 1.0) == inf


def test_a_partition_separates_groups_until_it_heals() -> None:
    plan = FaultPlan([Partition(groups=((0, 1), (2,)), at=1.0, duration=2.0)])
    assert plan.open((0, 1), 1.5) == 1.5
    assert plan.open((1, 2), 1.5) == 3.0
    assert plan.open((2, 3), 1.5) == 3.0, "whom no group names is apart from all groups"
    assert plan.open((3, 4), 1.5) == 1.5
    assert plan.open((1, 2), 3.0) == 3.0
    twice = FaultPlan([Partition(groups=[[0]], at=1.0, duration=2.0), Partition(groups=[[0]], at=2.0, duration=5.0)])
    assert twice.open((0, 1), 1.5) == 7.0


def test_what_is_still_broken_is_said() -> None:
    plan = FaultPlan([Crash(rank=2, at=3.0), Hang(rank=1, at=4.0), Hang(rank=0, at=1.0, duration=1.0)])
    assert plan.in_force(3.5) == ["rank 2 crashed at 3 s"]
    assert plan.in_force(9.0) == ["rank 2 crashed at 3 s", "rank 1 hangs since 4 s"]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Crash(rank=-1, at=0.0), "rank"),
        (lambda: Crash(rank=0, at=-1.0), "at"),
        (lambda: LateJoin(rank=0, at=inf), "at"),
        (lambda: Hang(rank=0, at=0.0, duration=0.0), "duration"),
        (lambda: SlowDown(rank=0, at=0.0, factor=0), "factor"),
        (lambda: Partition(groups=((0, 1), (1, 2)), at=0.0), "groups"),
        (lambda: Partition(groups=(), at=0.0), "groups"),
        (lambda: Partition(groups=3, at=0.0), "groups"),
        (lambda: Cluster.from_speeds([1, 1], faults=[Crash(rank=2, at=0.0)]), "rank 2"),
    ],
)
def test_impossible_faults_are_refused(make: object, key: str) -> None:
    with pytest.raises(PacelineError, match=key):
        make()
