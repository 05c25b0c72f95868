"""The measurement on hosts with slow links: what it simulates and draws."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from parts.four_hosts import Ground  # noqa: E402  (benchmarks are no package)
from parts.many_hosts import SLOW, STRATEGIES, cluster_of, extrapolated, picture, table  # noqa: E402


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Three recorded jobs of three workers each."""
    rows = [f"{worker},{100 + 10 * worker + time % 3}" for time in range(20) for worker in range(3)]
    for number in (1, 2, 3):
        (tmp_path / f"pai_job_{number}.csv").write_text("\n".join(["worker,batch_time_norm", *rows]))
    return tmp_path


def test_hosts_have_the_links_of_the_emulation() -> None:
    network = Ground(1.0, 0.1, nproc=2).network()
    assert network.hosts == (0, 0, 1, 1, 2, 2, 3, 3)
    assert network.way(0, 2) == (pytest.approx(0.01, abs=1e-3), 125e6)
    assert network.way(0, 7) == (pytest.approx(0.05, abs=1e-3), 12.5e6)


def test_every_fourth_host_is_slow_and_recorded_workers_keep_their_speeds(traces: Path) -> None:
    cluster = cluster_of(12, SLOW, traces)
    assert [uplink.bandwidth < 1e8 for uplink in cluster.network.uplinks] == [False, False, False, True] * 3
    assert cluster.devices[0].speed > cluster.devices[1].speed > cluster.devices[2].speed
    assert cluster.devices[3] == cluster.devices[0]


def test_the_picture_and_the_table_hold_every_strategy(traces: Path) -> None:
    found = list(extrapolated(traces, sizes=(2, 4)))
    assert all(0 < each.share < 1.05 for each in found)
    drawn = ElementTree.fromstring(picture(found))
    assert {"2", "4", *STRATEGIES} <= {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert all(table(found).count(f"`{strategy}`") == 2 for strategy in STRATEGIES)
