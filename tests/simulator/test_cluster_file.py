"""A cluster file means what it says, and a wrong one is told its line and key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.rules.graphs import Graph, erdos_renyi
from paceline.rules.matchings import matchings
from paceline.simulator.cluster import Cluster, Device
from paceline.simulator.cluster_file import EXAMPLE, parse_cluster, read_cluster
from paceline.simulator.faults import Partition, SlowDown
from paceline.simulator.jitter import Constant, LogNormal, SlowDowns, Trace
from paceline.simulator.network import Network, Uplink
from paceline.simulator.topology import Topology


def test_the_example_of_the_docs() -> None:
    cluster = parse_cluster(EXAMPLE)
    assert [device.speed for device in cluster.devices] == [1.0, 1.0, 0.5, 0.25, 0.25]
    assert cluster.devices[1].jitter == LogNormal(0.2)
    assert cluster.network == Network(50e-6, 1.25e9)
    assert cluster.graph == Topology("ring")
    assert cluster.faults[0] == SlowDown(rank=2, at=10.0, factor=6, duration=5.0)
    assert cluster.faults[2] == Partition(groups=((0, 1), (2, 3)), at=30.0, duration=2.0)


def test_the_least_that_must_be_said() -> None:
    cluster = parse_cluster("micro_batch_seconds = 1\n[[devices]]\n")
    assert cluster == Cluster((Device(1.0, Constant()),), 1)


HEAD = "micro_batch_seconds = 0.1\n"
FOUR = HEAD + "[[devices]]\ncount = 4\n[graph]\n"


def test_a_graph_by_its_edges_and_matchings() -> None:
    own = "edges = [[1, 0], [1, 2], [2, 3]]\nmatchings = [[[0, 1]], [[3, 2]], [[1, 2]]]\n"
    topology = parse_cluster(FOUR + own).graph
    assert topology is not None and hash(topology) == hash(Topology(edges=topology.edges, matchings=topology.matchings))
    assert topology.graph_of(4) == Graph(4, ((0, 1), (1, 2), (2, 3)))
    assert topology.matchings_of(4) == (((0, 1),), ((2, 3),), ((1, 2),))


def test_a_graph_by_its_name_fits_any_number_of_workers() -> None:
    cluster = parse_cluster(FOUR + 'name = "erdos-renyi"\nprobability = 0.8\nseed = 3\n')
    larger = replace(cluster, devices=cluster.devices * 2)
    assert larger.graph is not None and larger.graph.graph_of(8) == erdos_renyi(8, 0.8, 3)
    assert larger.graph.matchings_of(8) == matchings(erdos_renyi(8, 0.8, 3))
    with pytest.raises(PacelineError, match="not connected"):
        replace(parse_cluster(FOUR + "edges = [[0, 1], [1, 2], [2, 3]]\n"), devices=cluster.devices * 2)


def test_slow_downs_of_a_device() -> None:
    text = HEAD + '[[devices]]\njitter = {kind = "slow-downs", factor = 6, probability = 0.05}\n'
    assert parse_cluster(text).devices[0].jitter == SlowDowns(factor=6, probability=0.05)


@pytest.mark.parametrize(
    ("text", "line", "key", "said"),
    [
        (HEAD + "[[devices]]\nspeed = 1\n\n[[devices]]\nspeed = 0\n", 6, "speed", "above 0"),
        (HEAD + "[[devices]]\nspeed = -1\n", 3, "speed", "above 0"),
        (HEAD + '[[devices]]\nspeed = "fast"\n', 3, "speed", "not a number"),
        (HEAD + "[[devices]]\nspeed = true\n", 3, "speed", "not a number"),
        (HEAD + "[[devices]]\nspeeed = 1\n", 3, "speeed", "Do you mean speed"),
        (HEAD + "[[devices]]\ncount = 0\n", 3, "count", "at least 1"),
        (HEAD + "[[devices]]\ncount = 1.5\n", 3, "count", "whole number"),
        (HEAD + '[[devices]]\nspeed = 1\njitter = {kind = "lognormal"}\n', 4, "jitter", "Do you mean log-normal"),
        (HEAD + '[[devices]]\njitter = {kind = "log-normal"}\n', 3, "jitter", "sigma is missing"),
        (HEAD + '[[devices]]\njitter = {kind = "pareto", shape = 0.5}\n', 3, "jitter", "above 1"),
        (HEAD + '[[devices]]\njitter = {kind = "slow-downs", factor = 6}\n', 3, "jitter", "probability is missing"),
        (
            HEAD + '[[devices]]\njitter = {kind = "slow-downs", factor = 6, probability = 2}\n',
            3,
            "jitter",
            "at most 1",
        ),
        (HEAD + '[[devices]]\njitter = "constant"\n', 3, "jitter", "table with a kind"),
        (HEAD + '[[devices]]\njitter = {kind = "trace", file = "no.csv"}\n', 3, "jitter", "cannot be read"),
        (HEAD + "[[devices]]\n[network]\nlatency = -1\n", 4, "latency", "at least 0"),
        (HEAD + '[[devices]]\n[network]\nlatency = 0\nall_reduce = "star"\n', 5, "all_reduce", "'ring', 'tree'"),
        (HEAD + "[[devices]]\n[network]\nbandwith = 1\n", 4, "bandwith", "Do you mean bandwidth"),
        (HEAD + '[[devices]]\n[[faults]]\nkind = "crash"\nrank = 1\nat = 1\n', 5, "rank", "only ranks 0 to 0"),
        (HEAD + '[[devices]]\n[[faults]]\nkind = "explode"\n', 4, "kind", "not known"),
        (HEAD + '[[devices]]\n\n[[faults]]\nkind = "crash"\nat = 1\n', 4, "rank", "missing"),
        ("micro_batch_seconds = 0\n[[devices]]\n", 1, "micro_batch_seconds", "above 0"),
        ("[[devices]]\n", 1, "micro_batch_seconds", "missing"),
        (HEAD + "colour = 3\n[[devices]]\n", 2, "colour", "not known"),
        (HEAD, 1, "devices", "missing"),
        (HEAD + "devices = 3\n", 2, "devices", "list of tables"),
        (HEAD + "\n[device]\nspeed = 1\n", 3, "device", "Do you mean devices"),
        (HEAD + "network = 3\n[[devices]]\n", 2, "network", "not a table"),
        (HEAD + "graph = 3\n[[devices]]\n", 2, "graph", "not a table"),
        (FOUR + 'name = "rign"\n', 5, "name", "Did you mean 'ring'"),
        (FOUR + "name = 3\n", 5, "name", "no graph '3'"),
        (FOUR + "nam = 3\n", 5, "nam", "Do you mean name"),
        (FOUR, 4, "name", "either a name or edges"),
        (FOUR + 'name = "ring"\nedges = [[0, 1]]\n', 6, "edges", "either a name or edges"),
        (FOUR + 'name = "ring"\nprobability = 0.5\n', 6, "probability", "Only an erdos-renyi"),
        (FOUR + 'name = "erdos-renyi"\nprobability = 2\n', 6, "probability", "probability 2"),
        (FOUR + 'name = "erdos-renyi"\nprobability = 0\n', 6, "probability", "None of 100"),
        (FOUR + 'name = "erdos-renyi"\nprobability = "x"\n', 6, "probability", "not a number"),
        (FOUR + 'name = "erdos-renyi"\nseed = -1\n', 6, "seed", "at least 0"),
        (FOUR + "\nedges = [[0, 1], [1, 2], [2, 4]]\n", 6, "edges", "only ranks 0 to 3"),
        (FOUR + "edges = [[0, 1], [2, 3]]\n", 5, "edges", "{0, 1} and {2, 3}"),
        (FOUR + "edges = [0, 1]\n", 5, "edges", "0 is not an edge"),
        (FOUR + "edges = 3\n", 5, "edges", "not a list"),
        (FOUR + 'name = "ring"\nmatchings = [[0, 1]]\n', 6, "matchings", "0 is not an edge"),
        (FOUR + 'name = "ring"\nmatchings = [0, 1]\n', 6, "matchings", "list of lists"),
        (FOUR + 'name = "ring"\nmatchings = 1\n', 6, "matchings", "list of lists"),
        (FOUR + 'name = "ring"\nmatchings = [[[0, 1], [1, 2]]]\n', 6, "matchings", "two edges at rank 1"),
        (HEAD + '[[devices]]\ncount = 5\n[graph]\nname = "torus"\n', 5, "name", "Take ring"),
    ],
)
def test_errors_name_line_and_key(text: str, line: int, key: str, said: str) -> None:
    with pytest.raises(PacelineError) as caught:
        parse_cluster(text, "my.toml")
    assert f"my.toml, line {line}, key {key}" in str(caught.value)
    assert said in str(caught.value)


def test_broken_toml_names_the_line() -> None:
    with pytest.raises(PacelineError, match=r"line 2.*my\.toml"):
        parse_cluster("micro_batch_seconds = 1\nspeed = = 2\n", "my.toml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"none\.toml cannot be read"):
        read_cluster(tmp_path / "none.toml")


def test_a_trace_is_found_beside_the_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "job.csv").write_text("worker,batch_time_norm\n0,1\n0,3\n")
    file = tmp_path / "cluster.toml"
    file.write_text(HEAD + '[[devices]]\njitter = {kind = "trace", file = "job.csv"}\n')
    assert read_cluster(file).devices[0].jitter == Trace(str(tmp_path / "job.csv"))


HOSTS = """micro_batch_seconds = 0.02
[[devices]]
count = 3
[network]
latency = 0.001
hosts = [0, 0, 1]
[[network.uplinks]]
latency = 0.005
bandwidth = 125e6
[[network.uplinks]]
bandwidth = 12.5e6
"""


def test_hosts_with_links_of_their_own() -> None:
    network = parse_cluster(HOSTS).network
    assert network.uplinks == (Uplink(0.005, 125e6), Uplink(0.0, 12.5e6)) and network.hosts == (0, 0, 1)
    for line, wrong in (
        ("hosts = [0, 0, 1]", "hosts = [0, 0, 5]"),
        ("hosts = [0, 0, 1]", 'hosts = "0"'),
        ("bandwidth = 125e6", "rate = 125e6"),
    ):
        with pytest.raises(PacelineError, match=r"cluster\.toml, line \d+, key (hosts|rate)"):
            parse_cluster(HOSTS.replace(line, wrong))
