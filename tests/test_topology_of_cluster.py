"""`paceline topology`: its numbers, what it sends, what it writes and what it draws."""

from __future__ import annotations

import json
import subprocess
import sys
from math import log
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline import cli
from paceline.errors import PacelineError
from paceline.race.topology_of_cluster import methods
from paceline.report.graph_picture import COLOURS, NEVER, draw, save
from paceline.rules.graphs import NAMES, Graph, complete, named, ring, star
from paceline.rules.matcha import Matcha, matcha
from paceline.rules.matchings import Matchings, matchings

FIELDS = [
    *["graph", "workers", "edges", "degree", "degrees", "budget", "matchings", "probabilities", "alpha", "rho"],
    *["parameters", "methods", "acid"],
]
METHOD = [
    "method",
    "alpha",
    "rho",
    "bytes_per_round",
    "busiest_bytes_per_round",
    "of_all_reduce",
    "rounds_to_1_percent",
]
OWN = """
micro_batch_seconds = 0.02
[[devices]]
count = 8
[graph]
edges = [[1, 5], [6, 7], [0, 4], [2, 3], [1, 7], [3, 6], [1, 0], [3, 7], [5, 6], [1, 2], [7, 0], [3, 1]]
matchings = [[[1, 5], [6, 7], [0, 4], [2, 3]], [[1, 7], [3, 6]], [[1, 0], [3, 7], [5, 6]], [[1, 2], [7, 0]], [[3, 1]]]
"""


def topology(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command in this process; what it writes."""
    file = folder / "topology.json"
    monkeypatch.setattr(sys, "argv", ["paceline", "topology", *arguments, "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    content = json.loads(file.read_text())
    assert isinstance(content, dict)
    return content


def test_the_ring_of_eight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = topology(monkeypatch, tmp_path, "--graph", "ring", "--workers", "8", "--budget", "0.5")
    assert list(content) == FIELDS and [list(line) for line in content["methods"]] == [METHOD] * 4
    assert content["probabilities"] == [0.5, 0.5]
    assert content["matchings"] == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 7], [1, 2], [3, 4], [5, 6]]]
    assert (content["alpha"], content["rho"]) == pytest.approx((0.607369, 0.783905), abs=1e-6)
    average, metropolis, steady, drawn = content["methods"]
    assert average["bytes_per_round"] == 7e6 and metropolis["alpha"] is None
    assert (steady["alpha"], steady["rho"]) == pytest.approx((0.436130, 0.554311), abs=1e-6)
    assert (steady["bytes_per_round"], drawn["bytes_per_round"]) == (8e6, 4e6)
    assert drawn["of_all_reduce"] == pytest.approx(4 / 7) and drawn["rounds_to_1_percent"] == 19
    assert content["acid"]["eta"] == pytest.approx(0.289281, abs=1e-6)
    said = capsys.readouterr().out
    assert "0-1 2-3 4-5 6-7" in said and "0.6074  0.7839" in said and "57.1 %" in said and "χ₁ = 3.414" in said
    assert max(map(len, said.splitlines()[:-2])) <= 80, "the tables fit a terminal"
    assert said in (Path(__file__).parent.parent / "docs" / "topologies.md").read_text(encoding="utf-8")


def test_a_graph_and_matchings_of_the_cluster_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "eight.toml"
    file.write_text(OWN)
    content = topology(monkeypatch, tmp_path, "--cluster", str(file), "--parameters", "250")
    assert content["graph"] == "graph" and content["degrees"] == [3, 5, 2, 4, 1, 2, 3, 4]
    assert content["probabilities"] == pytest.approx([0.984, 0, 0.758, 0.758, 0], abs=1e-3)
    assert (content["alpha"], content["rho"]) == pytest.approx((0.3964, 0.6440), abs=1e-4)
    assert (content["methods"][2]["alpha"], content["methods"][2]["rho"]) == pytest.approx(
        (0.285714, 0.653777), abs=1e-6
    )
    assert content["methods"][2]["bytes_per_round"] == 3000 and content["methods"][2]["busiest_bytes_per_round"] == 5000
    # What is given goes before what the file says.
    other = topology(monkeypatch, tmp_path, "--cluster", str(file), "--graph", "star")
    assert other["graph"] == "star" and other["workers"] == 8
    assert topology(monkeypatch, tmp_path, "--cluster", str(file), "--graph", "ring", "--workers", "5")["workers"] == 5


def test_random_graphs_follow_their_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--graph", "erdos-renyi", "--workers", "12", "--probability", "0.5", "--seed"]
    first, second = (topology(monkeypatch, tmp_path, *options, seed)["edges"] for seed in ("1", "2"))
    assert first != second and [tuple(edge) for edge in first] == list(
        named("erdos-renyi", 12, probability=0.5, seed=1).edges
    )


@pytest.mark.parametrize("workers", ["1", "2", "3"])
def test_small_clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: str) -> None:
    content = topology(monkeypatch, tmp_path, "--workers", workers, "--plot", str(tmp_path / "small.svg"))
    assert content["methods"][2]["rho"] == pytest.approx(0, abs=1e-12), "all average with all"
    assert (content["methods"][2]["of_all_reduce"] is None) == (workers == "1")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent(name: str) -> None:
    graph = named(name, 16)
    plan = matcha(graph, 0.3)
    average, _, steady, drawn = methods(graph, plan, 0.3, parameters=1000)
    assert average.bytes_per_round == pytest.approx(2 * 15 / 16 * 4000)
    assert steady.bytes_per_round == pytest.approx(2 * len(graph.edges) / 16 * 4000)
    assert steady.busiest_bytes_per_round == graph.degree * 4000
    used = sum(p * len(edges) for p, edges in zip(plan.probabilities, plan.matchings, strict=True))
    assert drawn.bytes_per_round == pytest.approx(2 * used / 16 * 4000)
    assert drawn.busiest_bytes_per_round >= drawn.bytes_per_round * (1 - 1e-12)
    for line in (steady, drawn):
        assert line.rho**line.rounds <= 0.01 * (1 + 1e-9) and line.of_all_reduce is not None
        assert line.rounds == 1 or line.rounds - 1 < log(0.01) / log(line.rho)


def picture(graph: Graph, budget: float, own: Matchings | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(draw(graph, matcha(graph, budget, own), "graphs & <matchings>"))


def test_the_picture_shows_every_edge_twice() -> None:
    drawn = picture(ring(8), 0.5)
    lines = [each for each in drawn.iter() if each.tag.endswith("path")]
    assert len(lines) == 8 + 8 + 2, "in the whole, in its matching, and two in the legend"
    assert {line.get("stroke") for line in lines} == set(COLOURS[:2])
    said = [each.text for each in drawn.iter() if each.tag.endswith("text")]
    assert (
        said[0] == "graphs & <matchings>"
        and "matching 2: p = 0.500, 4 edges" in said
        and "α = 0.6074, ρ = 0.7839" in said
    )


def test_lines_are_wider_the_more_often_they_are_used() -> None:
    drawn = picture(Graph(4, ((0, 1), (2, 3), (1, 2), (0, 2))), 0.5, (((0, 1), (2, 3)), ((1, 2),), ((0, 2),)))
    plan = matcha(Graph(4, ((0, 1), (2, 3), (1, 2), (0, 2))), 0.5, (((0, 1), (2, 3)), ((1, 2),), ((0, 2),)))
    lines = [each for each in drawn.iter() if each.tag.endswith("path")]
    widths = [
        max(float(line.get("stroke-width", "0")) for line in lines if line.get("stroke") == c) for c in COLOURS[:3]
    ]
    assert sorted(range(3), key=lambda place: widths[place]) == sorted(range(3), key=plan.probabilities.__getitem__)
    assert plan.probabilities[0] > plan.probabilities[2] > 0


def test_large_graphs_are_drawn_within_bounds() -> None:
    drawn = picture(complete(40), 0.5)
    said = [each.text or "" for each in drawn.iter() if each.tag.endswith("text")]
    assert "and 25 more" in said and sum(text.endswith(": p = 0.500") for text in said) == 12
    assert NEVER not in ElementTree.tostring(drawn, "unicode")
    many = Matcha(200, matchings(star(200)), (0.5,) * 199, alpha=0.01, rho=0.99)
    assert len(draw(star(200), many, "star")) < 300_000


def test_a_png_is_the_same_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Resvg:
        @staticmethod
        def svg_to_bytes(**options: Any) -> bytes:
            seen.update(options)
            return b"\x89PNG"

    monkeypatch.setitem(sys.modules, "resvg_py", Resvg)
    svg = draw(ring(4), matcha(ring(4), 0.5), "ring")
    save(svg, tmp_path / "ring.svg")
    save(svg, tmp_path / "ring.png")
    assert seen["svg_string"] == svg == (tmp_path / "ring.svg").read_text(encoding="utf-8")
    assert (tmp_path / "ring.png").read_bytes() == b"\x89PNG"


def test_a_real_png(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="the extra `plot` is not installed")
    save(draw(ring(4), matcha(ring(4), 0.5), "ring"), tmp_path / "ring.png")
    assert (tmp_path / "ring.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(PacelineError, match=r"resvg-py is missing.*paceline\[plot\].*\.svg"):
        save("<svg/>", tmp_path / "ring.png")


def test_topology_needs_no_torch() -> None:
    code = """
import sys
from paceline.cli import main
sys.argv = ["paceline", "topology", "--workers", "4"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
