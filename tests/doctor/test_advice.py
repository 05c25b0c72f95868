"""From measured machines to a cluster file that the simulator reads, and to a strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.doctor.advice import Advice, advise, cluster_text, described, expectations
from paceline.doctor.host import Device, Host, Peer, Task, fitted
from paceline.race.timing import cluster_of, simulate_timing
from paceline.simulator.cluster_file import parse_cluster, read_cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network

TASK = Task("fashion-mnist", "lenet-5", 32, 61_706, divisible=True)
LAN = Network(latency=5e-5, bandwidth=1.25e9)


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough rounds to tell strategies apart."""
    monkeypatch.setattr("paceline.doctor.advice.MICRO_BATCHES", 1000)


def host(*seconds: float, jitter: float = 0.0, name: str = "a") -> Host:
    devices = tuple(Device(f"cuda:{place}", "A GPU", 1, each, jitter) for place, each in enumerate(seconds))
    return Host(name, {}, devices, LAN)


def advice_for(own: Host, task: Task = TASK, network: Network | None = None) -> Advice:
    found = described(Host(own.name, {}, own.devices, network or LAN), [], task)
    assert found is not None
    return advise(expectations(found[0], task), found[0], task)


def test_two_kinds_of_gpus_on_two_hosts() -> None:
    """Two A100s here; a V100 and a 3090 there, behind a slower link."""
    other = host(0.02, 0.04, jitter=0.1, name="b")
    found = described(host(0.01, 0.01), [Peer("b:1", other, Network(latency=1e-3, bandwidth=1e8))], TASK)
    assert found is not None
    cluster, text = found
    assert [device.speed for device in cluster.devices] == [1.0, 1.0, 0.5, 0.25]
    assert [device.jitter for device in cluster.devices[2:]] == [LogNormal(0.1)] * 2
    assert cluster.network == Network(latency=1e-3, bandwidth=1e8), "the slowest link counts"
    assert "# rank 3: b, cuda:1 (A GPU)" in text
    advice = advise(expectations(cluster, TASK), cluster, TASK)
    assert advice.strategy == "abs-sgd" and advice.share_of_ideal > 0.97 and "all-reduce would use 29.4 %" in advice.why


def test_the_written_file_is_what_race_and_simulate_read(tmp_path: Path) -> None:
    found = described(host(0.01, 0.03, jitter=0.2), [], TASK)
    assert found is not None
    file = tmp_path / "cluster.toml"
    file.write_text(found[1])
    assert read_cluster(file) == found[0]
    cluster = cluster_of(None, (), file, None, None)
    result = simulate_timing("abs-sgd", cluster, seconds=5.0, micro_batch=32, parameters=61_706)
    assert result["results"][0]["share_of_ideal"] > 0.9


def test_peers_that_were_not_reached_are_no_part_of_it() -> None:
    found = described(host(0.01, 0.01), [Peer("b:1")], TASK)
    assert found is not None and found[0].workers == 2 and found[0].network == LAN


def test_nothing_measured_gives_no_cluster() -> None:
    assert described(Host("a", {}), [], TASK) is None


def test_equal_steady_workers_on_a_quick_network_wait_for_each_other() -> None:
    advice = advice_for(host(0.05, 0.05, 0.05))
    assert advice.strategy == "all-reduce" and advice.share_of_ideal > 0.95 and advice.notes == ()


def test_equal_workers_that_jitter_do_not() -> None:
    assert advice_for(host(0.05, 0.05, 0.05, 0.05, jitter=0.4)).strategy == "abs-sgd"


def test_one_worker_has_nobody_to_wait_for() -> None:
    advice = advice_for(host(0.05))
    assert advice.strategy == "all-reduce" and "one worker" in advice.why


def test_a_slow_network_is_told() -> None:
    (note,) = advice_for(host(0.05, 0.05), network=Network(latency=0.05, bandwidth=1e5)).notes
    assert "An all-reduce takes as long as" in note and "local-sgd" in note


MILLION = Task("synthetic", "mlp", 32, 1_000_000, divisible=True)


def test_where_bytes_take_long_they_are_made_fewer() -> None:
    """An all-reduce of two takes four micro-batches of 0.1 s, and one of them as int8."""
    advice = advice_for(host(0.1, 0.1), MILLION, Network(bandwidth=1e7))
    assert advice.strategy == "abs-sgd:compress=int8" and advice.share_of_ideal > 0.9
    assert "4.0 micro-batches of the fastest worker, and 1.0 as int8" in advice.why


def test_where_latency_takes_long_rounding_does_not_help() -> None:
    advice = advice_for(host(0.1, 0.1), MILLION, Network(latency=0.2, bandwidth=1e9))
    assert advice.strategy == "abs-sgd"


def test_where_even_the_rounded_take_long_workers_step_alone() -> None:
    """An all-reduce takes 80 micro-batches, 20 as int8: four own steps for each of the 80, then a fifth is waiting."""
    advice = advice_for(host(0.1, 0.1), MILLION, Network(bandwidth=0.5e6))
    assert advice.strategy == "local-sgd:steps=512:by_speed" and advice.share_of_ideal > 0.75
    assert "averaged seldom" in advice.why


def test_micro_batches_that_are_too_short_are_told() -> None:
    (note,) = advice_for(host(0.002, 0.001), network=Network()).notes
    assert note.startswith("A micro-batch of 1.0 ms")


def test_what_cannot_be_cut_may_be_better_off_with_fresh_gradients() -> None:
    """With BatchNorm a round of abs-sgd has at least one whole micro-batch of the slowest."""
    whole = Task("cifar-10", "resnet-18", 32, 61_706, divisible=False)
    cluster = described(host(0.05, 0.5), [], whole)
    assert cluster is not None
    simulated = expectations(cluster[0], whole)
    expected = {each.strategy: each.share_of_ideal for each in simulated}
    advice = advise(simulated, cluster[0], whole)
    best = max(("balanced", "abs-sgd"), key=lambda name: (expected[name], name == "abs-sgd"))
    assert advice.strategy == best and advice.share_of_ideal == expected[best]


names = st.text(max_size=20)
seconds = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(names, names, st.integers(1, 9), seconds, st.floats(0, 3)), min_size=1, max_size=4))
def test_whatever_machines_are_called_their_file_can_be_read(
    devices: list[tuple[str, str, int, float, float]],
) -> None:
    hosts = [Host(name, {}, (Device("cpu", *rest),)) for name, *rest in devices]
    cluster = parse_cluster(cluster_text(hosts, Network(1e-4, 1e9), TASK))
    assert cluster.workers == sum(count for _, _, count, _, _ in devices)
    fastest = min(mean for *_, mean, _ in devices)
    assert cluster.micro_batch_seconds == pytest.approx(fastest, rel=1e-3)


@given(st.integers(2, 64), st.floats(1e-7, 1.0), st.floats(1e3, 1e12))
def test_a_network_is_found_again_from_two_all_reduces(workers: int, latency: float, bandwidth: float) -> None:
    made = Network(latency, bandwidth)
    large = 10**9
    found = fitted(workers, *((size, made.all_reduce_seconds(workers, size)) for size in (4000, large)))
    for size in (4000, large):
        again = found.all_reduce_seconds(workers, size)
        assert again == pytest.approx(made.all_reduce_seconds(workers, size), rel=1e-6)


def test_a_larger_all_reduce_that_took_no_longer() -> None:
    found = fitted(2, (4000, 0.002), (4_000_000, 0.001))
    assert found == Network(latency=0.001, bandwidth=float("inf"))
