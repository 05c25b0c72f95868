"""What `paceline limit` says of a cluster: each kind of method at its best, and what binds."""

from __future__ import annotations

import json
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.race.limit_of_cluster import Method, methods, show_limit
from paceline.rules.limit import limit

SPEEDS = [1.0, 1.0, 0.5, 0.25]


def shown(noise_scale: float, comm_seconds: float) -> dict[str, object]:
    return show_limit(
        SPEEDS, noise_scale=noise_scale, comm_seconds=comm_seconds, micro_batch_seconds=0.02, micro_batch=32
    )


def test_methods_by_hand() -> None:
    all_reduce, balanced, abs_sgd = methods([1600.0, 1600.0, 800.0, 400.0], comm_seconds=0.01, micro_batch=32)
    assert all_reduce == Method("all-reduce", 128, pytest.approx(0.09)), "the slowest needs 80 ms, then all wait"
    # After 29.375 ms: 47 + 47 + 23 + 11 samples.
    assert balanced == Method("balanced", 128, pytest.approx(0.039375))
    assert abs_sgd == Method("abs-sgd", 88, 0.02), "as long as the fastest needs for a micro-batch"
    assert methods([1600.0, 400.0], comm_seconds=0.5, micro_batch=32)[2] == Method("abs-sgd", 1000, 0.5)


@settings(deadline=None)
@given(
    st.lists(st.floats(1.0, 2000.0), min_size=1, max_size=5),
    st.floats(0.0, 1e4),
    st.floats(0.0, 0.5),
    st.integers(1, 64),
)
def test_no_method_beats_the_limit_and_its_share_is_the_product(
    speeds: list[float], noise_scale: float, comm_seconds: float, micro_batch: int
) -> None:
    bound = limit(speeds, noise_scale, comm_seconds)
    for method in methods(speeds, comm_seconds, micro_batch):
        line = method.as_dict(bound)
        assert 0 < line["share"] <= 1 + 1e-9 and 0 < line["hardware"] <= 1 + 1e-9
        assert line["hardware"] * line["batch_share"] == pytest.approx(line["share"])


@pytest.mark.parametrize(
    ("noise_scale", "comm_seconds", "binds", "said"),
    [
        (500.0, 0.01, "noise", "The noise of the gradients binds: averaging it away takes 91.9 %"),
        (5.0, 0.01, "communication", "Communication binds"),
        (0.0, 0.0, "devices", "The devices bind: the best update waits 0.6 ms for its 2 samples"),
        (inf, 0.01, "noise", "takes 100.0 % of the limit's time"),
    ],
)
def test_one_sentence_says_what_binds(
    capsys: pytest.CaptureFixture[str], noise_scale: float, comm_seconds: float, binds: str, said: str
) -> None:
    result = shown(noise_scale, comm_seconds)
    assert result["binds"] == binds and said in capsys.readouterr().out.splitlines()[-1]
    json.dumps(result, allow_nan=False)


def test_endless_noise_leaves_the_samples(capsys: pytest.CaptureFixture[str]) -> None:
    result = shown(inf, 0.0)
    assert (result["noise_scale"], result["best_batch"], result["step_seconds"]) == (None, None, None)
    assert "∞" in capsys.readouterr().out


def test_one_worker_is_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    show_limit([1.0], noise_scale=10, comm_seconds=0.0, micro_batch_seconds=0.02, micro_batch=32)
    assert capsys.readouterr().out.startswith("1 worker, 1,600 samples a second together;")
