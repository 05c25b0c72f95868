"""Reads a cluster from a TOML file, and says in which line and key it is wrong.

>>> cluster = parse_cluster(EXAMPLE)
>>> cluster.workers, cluster.devices[3].speed, cluster.network.all_reduce, len(cluster.faults)
(5, 0.25, 'auto', 5)

Every key but `micro_batch_seconds` and the devices may be left out. Times are in seconds, the bandwidth in bytes a
second. Kinds of jitter: constant, log-normal (sigma), exponential, pareto (shape), slow-downs and slow-rounds (factor,
probability), drift (correlation, spread), trace (file: a csv, found from the folder of the cluster file). Kinds of
faults: crash, leave, join, hang, slow-down, partition, late-join. Graphs: a name (ring, torus, exponential, complete,
star, erdos-renyi with probability and seed) or edges, and if need be matchings: lists of edges.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import PacelineError
from paceline.simulator import faults, jitter
from paceline.simulator.checks import WrongValueError, whole
from paceline.simulator.cluster import Cluster, Device
from paceline.simulator.network import Network, Uplink
from paceline.simulator.topology import Topology

T = TypeVar("T")

EXAMPLE = """
micro_batch_seconds = 0.02          # of a device with speed 1
seed = 0
servers = 2                         # ranks 5 and 6, for the strategies that have servers

[[devices]]                         # ranks 0 and 1
speed = 1.0
count = 2
jitter = {kind = "log-normal", sigma = 0.2}

[[devices]]                         # rank 2
speed = 0.5
jitter = {kind = "drift", correlation = 0.7, spread = 0.05}

[[devices]]                         # ranks 3 and 4
speed = 0.25
count = 2
jitter = {kind = "pareto", shape = 2.5}

[network]
latency = 50e-6                     # seconds
bandwidth = 1.25e9                  # bytes a second: 10 Gbit/s
all_reduce = "auto"                 # or "ring", "tree"
shared = false                      # true: one link for all
# Hosts with links of their own: [[network.uplinks]] with latency and bandwidth, and hosts = [0, 0, 1] for the ranks

[graph]                             # who exchanges models with whom, in decentralised training
name = "ring"                       # or edges = [[0, 1], [1, 2], …]

[[faults]]
kind = "slow-down"
rank = 2
at = 10.0
factor = 6
duration = 5.0

[[faults]]
kind = "hang"
rank = 1
at = 20.0
duration = 1.0

[[faults]]
kind = "partition"
groups = [[0, 1], [2, 3]]           # rank 4 is a group of its own
at = 30.0
duration = 2.0

[[faults]]
kind = "late-join"
rank = 3
at = 1.0

[[faults]]
kind = "crash"
rank = 4
at = 50.0
"""


@dataclass(frozen=True)
class _Count:
    """How many devices an entry stands for: a key of the file, not of a device."""

    count: int = 1

    def __post_init__(self) -> None:
        whole(self, "count", 1)


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that a file describes."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PacelineError(f"The cluster file {path} cannot be read: {error}.") from error
    return parse_cluster(text, str(path))


def parse_cluster(text: str, name: str = "cluster.toml") -> Cluster:
    """The cluster that a text in TOML describes; `name` is what errors call it."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PacelineError(
            f"The cluster file is not TOML: {error}.", where=name, remedy="Compare with the example in the docs."
        ) from error
    return _Reader(text, name).cluster(content)


class _Reader:
    """Turns the parsed content into values; knows the text, to say where something stands."""

    def __init__(self, text: str, name: str) -> None:
        self._lines = text.splitlines()
        self._name = name

    def cluster(self, content: dict[str, Any]) -> Cluster:
        with self._located("", 0):
            _check_keys(content, [field.name for field in fields(Cluster)], ["micro_batch_seconds", "devices"])
            for key in ("network", "graph"):
                if not isinstance(content.get(key, {}), dict):
                    raise WrongValueError(key, f"{key} is not a table.", f"Write [{key}] above its keys.")
        devices: list[Device] = []
        for index, table in enumerate(self._tables(content, "devices")):
            devices += self._devices(index, table)
        servers = content.get("servers", 0)
        ranks = len(devices) + (servers if isinstance(servers, int) else 0)
        broken = [self._fault(index, table, ranks) for index, table in enumerate(self._tables(content, "faults"))]
        with self._located("network", 0):
            network = _network(content.get("network", {}))
        with self._located("graph", 0):
            graph = _build(Topology, content["graph"]) if "graph" in content else None
            if graph is not None and devices:
                graph.check(len(devices))
        with self._located("", 0):
            plain = {key: content[key] for key in ("micro_batch_seconds", "seed", "servers") if key in content}
            return Cluster(tuple(devices), network=network, faults=tuple(broken), graph=graph, **plain)

    def _tables(self, content: dict[str, Any], key: str) -> list[dict[str, Any]]:
        tables = content.get(key, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            with self._located("", 0):
                raise WrongValueError(key, f"{key} must be a list of tables.", f"Write [[{key}]] above each of them.")
        return tables

    def _devices(self, index: int, table: dict[str, Any]) -> list[Device]:
        with self._located("devices", index):
            _check_keys(table, ["speed", "count", "jitter"], [])
            plain = {key: value for key, value in table.items() if key == "speed"}
            if "jitter" in table:
                plain["jitter"] = self._jitter(table["jitter"])
            return [Device(**plain)] * _Count(table.get("count", 1)).count

    def _jitter(self, table: Any) -> jitter.Jitter:
        if isinstance(table, dict) and table.get("kind") == "trace" and isinstance(table.get("file"), str):
            table = table | {"file": str(Path(self._name).parent / table["file"])}
        try:
            return _of_kind(jitter.KINDS, table)
        except WrongValueError as wrong:
            raise WrongValueError("jitter", f"In jitter: {wrong.what}", wrong.remedy) from wrong

    def _fault(self, index: int, table: dict[str, Any], workers: int) -> faults.Fault:
        with self._located("faults", index):
            fault = _of_kind(faults.KINDS, table)
            faults.check_ranks(fault, workers)
            return fault

    @contextmanager
    def _located(self, table: str, index: int) -> Iterator[None]:
        """Add file, line and key to what goes wrong within."""
        try:
            yield
        except WrongValueError as wrong:
            place = f"{self._name}, line {self._line(table, index, wrong.key)}, key {wrong.key}"
            raise PacelineError(wrong.what, where=place, remedy=wrong.remedy) from wrong

    def _line(self, table: str, index: int, key: str) -> int:
        """The line of a key in the index-th table of that name; that of the table itself if the key is not there."""
        current, seen, found = "", {"": 0}, 1
        for line_number, line in enumerate(self._lines, 1):
            header = re.match(r"\s*\[+\s*([\w.-]+)\s*\]+", line)
            if header:
                current = header[1]
                seen[current] = seen.get(current, -1) + 1
            if current.split(".")[0] == table and seen[current] == index:
                found = line_number if header else found
                if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
                    return line_number
            if header and not table and current.split(".")[0] == key:
                return line_number
        return found


def _network(table: dict[str, Any]) -> Network:
    uplinks, hosts = table.get("uplinks", []), table.get("hosts", [])
    if not isinstance(uplinks, list) or not all(isinstance(each, dict) for each in uplinks):
        raise WrongValueError("uplinks", "uplinks must be a list of tables.", "Write [[network.uplinks]] above each.")
    if not isinstance(hosts, list) or not all(isinstance(each, int) for each in hosts):
        raise WrongValueError("hosts", "hosts must be a list of numbers.", "Write the place of each rank's uplink.")
    links = tuple(_build(Uplink, each) for each in uplinks)
    return _build(Network, table | {"uplinks": links, "hosts": tuple(hosts)})


def _of_kind(kinds: Mapping[str, type[T]], table: Any) -> T:
    kind = table.get("kind") if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        said = f"kind = {kind!r} is not known." if kind is not None else "A table with a kind is missing here."
        raise WrongValueError("kind", said, _nearest(str(kind), list(kinds)))
    return _build(kinds[kind], {key: value for key, value in table.items() if key != "kind"}, ("kind",))


def _build(cls: type[T], table: dict[str, Any], also: tuple[str, ...] = ()) -> T:
    """The dataclass with the table's values; its fields are the keys, its own checks judge the values."""
    known = fields(cls)  # type: ignore[arg-type]  # only dataclasses are passed; a TypeVar cannot say so
    _check_keys(table, [*(field.name for field in known), *also], [f.name for f in known if f.default is MISSING])
    return cls(**table)


def _check_keys(table: dict[str, Any], known: list[str], required: list[str]) -> None:
    for key in table:
        if key not in known:
            raise WrongValueError(key, f"The key {key} is not known.", _nearest(key, known))
    for key in required:
        if key not in table:
            raise WrongValueError(key, f"The key {key} is missing.")


def _nearest(word: str, known: list[str]) -> str:
    near = get_close_matches(word, known, n=1)
    return (f"Do you mean {near[0]}? " if near else "") + f"Possible are: {', '.join(known)}."
