"""`paceline topology`: what a graph of workers is worth, and what it sends.

For each way to mix along it: how far a round draws the models together, and the bytes that it takes, beside those of a
ring all-reduce, which averages over all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, log
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.report.table import as_table, as_text, show
from paceline.report.words import NOTHING, percent, size
from paceline.rules.acid import acid
from paceline.rules.graphs import Edge, Graph
from paceline.rules.matcha import Matcha, matcha
from paceline.rules.mixing import best_alpha, contraction, mixing_weights
from paceline.simulator.cluster_file import read_cluster
from paceline.simulator.topology import Topology

BYTES_PER_PARAMETER = 4
CLOSE = 0.01
"""Of the squared distance to the mean: what counts as having come together, to compare methods by."""
SHOWN_EDGES, SHOWN_MATCHINGS = 8, 16
"""In the table: a terminal may have no more than 80 columns and 40 lines. The JSON has all."""


@dataclass(frozen=True)
class Method:
    """A way to mix.

    Args:
        method: its name.
        alpha: what an edge weighs; None where the weights differ.
        rho: what a round leaves of the squared distance to the mean.
        bytes_per_round: that a rank sends, expected, on average over all ranks.
        busiest_bytes_per_round: of the rank that sends most.
        of_all_reduce: bytes relative to a ring all-reduce; None for a worker that is alone.
    """

    method: str
    alpha: float | None
    rho: float
    bytes_per_round: float
    busiest_bytes_per_round: float
    of_all_reduce: float | None

    @property
    def rounds(self) -> int:
        """Until no more than `CLOSE` of the squared distance is left.

        >>> Method("matcha", 0.6, 0.78, 1.0, 1.0, 1.0).rounds, Method("all-reduce", None, 0.0, 1.0, 1.0, 1.0).rounds
        (19, 1)
        """
        return 1 if self.rho <= CLOSE else ceil(log(CLOSE) / log(self.rho))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rounds_to_1_percent": self.rounds}


def topology_of(
    name: str | None, workers: int | None, file: Path | None, probability: float | None, seed: int | None
) -> tuple[Topology, int]:
    """The graph and the number of workers that the options describe; what is given goes before what the file says."""
    described = None
    if file is not None:
        cluster = read_cluster(file)
        described, workers = cluster.graph, cluster.workers if workers is None else workers
        if described is None and name is None:
            raise PacelineError(
                "The cluster file describes no graph.", where=str(file), remedy="Add a [graph], or give --graph."
            )
    if workers is None:
        raise PacelineError("A graph of how many workers?", remedy="Give --workers or --cluster.")
    if described is None or name is not None:
        described = Topology(name or "ring", probability, seed or 0)
    elif probability is not None or seed is not None:
        raise PacelineError(
            "--probability and --seed are for a graph that is given by name.",
            where=str(file),
            remedy="Give --graph erdos-renyi, or change the file.",
        )
    return described, workers


def methods(graph: Graph, plan: Matcha, budget: float, parameters: int) -> list[Method]:
    """Each way to mix along a graph, and the average over all for comparison.

    Args:
        graph: connected.
        plan: MATCHA's for it.
        budget: that the plan is for.
        parameters: of the model; each is sent in 4 bytes.

    >>> from paceline.rules.graphs import ring
    >>> for each in methods(ring(4), matcha(ring(4), 0.5), 0.5, parameters=1000):
    ...     print(each.method, round(each.rho, 4), each.bytes_per_round, each.of_all_reduce)
    all-reduce 0.0 6000.0 1.0
    d-psgd metropolis 0.1111 8000.0 1.3333333333333333
    d-psgd best-constant 0.1111 8000.0 1.3333333333333333
    matcha 0.5 0.5 4000.0 0.6666666666666666
    """
    model = parameters * BYTES_PER_PARAMETER
    averaged = 2 * (graph.workers - 1) / graph.workers * model
    used = [0.0] * graph.workers
    for edges, probability in zip(plan.matchings, plan.probabilities, strict=True):
        for rank in (rank for edge in edges for rank in edge):
            used[rank] += probability

    def method(name: str, alpha: float | None, rho: float, exchanges: Sequence[float]) -> Method:
        mean = sum(exchanges) / len(exchanges) * model
        return Method(name, alpha, rho, mean, max(exchanges) * model, mean / averaged if averaged else None)

    rules = {"metropolis": None, "best-constant": best_alpha(graph)}
    return [
        Method("all-reduce", None, 0.0, averaged, averaged, 1.0 if averaged else None),
        *(
            method(f"d-psgd {rule}", alpha, contraction(mixing_weights(graph, rule)), graph.degrees)
            for rule, alpha in rules.items()
        ),
        method(f"matcha {budget:g}", plan.alpha, plan.rho, used),
    ]


def show_topology(
    described: Topology, workers: int, *, budget: float, parameters: int, plot: Path | None = None
) -> dict[str, Any]:
    """Print what a graph is worth, draw it if asked to, and return what `--json` holds.

    Args:
        described: the graph.
        workers: how many.
        budget: of MATCHA, the part of the matchings that a round uses.
        parameters: of the model.
        plot: a file to draw the graph and its matchings into, .svg or .png.
    """
    graph = described.graph_of(workers)
    plan = matcha(graph, budget, described.matchings_of(workers))
    lines = methods(graph, plan, budget, parameters)
    name = described.name or "graph"
    print(_headline(name, graph, plan, parameters))
    _table(*_matching_rows(plan))
    _table(*_method_rows(lines))
    print(_in_words(lines))
    momentum = acid(graph)
    print(
        f"A²CiD², with one averaging of each rank a gradient: χ₁ = {momentum.chi_1:.4g}, χ₂ = {momentum.chi_2:.4g}, "
        f"η = {momentum.eta:.4g}, α̃ = {momentum.alpha_tilde:.4g}."
    )
    if plot is not None:
        from paceline.report.graph_picture import draw, save

        save(draw(graph, plan, f"{name} of {_count(workers, 'worker')}, MATCHA with budget {budget:g}"), plot)
    return {
        "graph": name,
        "workers": workers,
        "edges": graph.edges,
        "degree": graph.degree,
        "degrees": graph.degrees,
        "budget": budget,
        "matchings": plan.matchings,
        "probabilities": plan.probabilities,
        "alpha": plan.alpha,
        "rho": plan.rho,
        "parameters": parameters,
        "methods": [line.as_dict() for line in lines],
        "acid": asdict(momentum) | {"eta": momentum.eta, "alpha_tilde": momentum.alpha_tilde},
    }


def _table(header: list[str], rows: list[list[str]]) -> None:
    if rows:
        show(as_table(header, rows), as_text(header, rows))


def _headline(name: str, graph: Graph, plan: Matcha, parameters: int) -> str:
    least = min(graph.degrees)
    neighbours = _count(graph.degree, "neighbour")
    if least != graph.degree:
        neighbours = f"{least} to {neighbours}"
    return (
        f"{name} of {_count(graph.workers, 'worker')}: {_count(len(graph.edges), 'edge')}, {neighbours} each, "
        f"{_count(len(plan.matchings), 'matching')}; a model of {size(parameters * BYTES_PER_PARAMETER)}."
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _matching_rows(plan: Matcha) -> tuple[list[str], list[list[str]]]:
    rows = [
        [_edges(edges), str(len(edges)), f"{probability:.4f}"]
        for edges, probability in zip(plan.matchings, plan.probabilities, strict=True)
    ]
    if len(rows) > SHOWN_MATCHINGS:
        rows[SHOWN_MATCHINGS:] = [[f"and {len(rows) - SHOWN_MATCHINGS} more", NOTHING, NOTHING]]
    return ["matching", "edges", "probability"], rows


def _edges(edges: Sequence[Edge]) -> str:
    shown = " ".join(f"{one}-{other}" for one, other in edges[:SHOWN_EDGES])
    return shown + (" …" if len(edges) > SHOWN_EDGES else "")


def _method_rows(lines: Sequence[Method]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            line.method,
            NOTHING if line.alpha is None else f"{line.alpha:.4f}",
            f"{line.rho:.4f}",
            _count(line.rounds, "round"),
            size(round(line.bytes_per_round)),
            size(round(line.busiest_bytes_per_round)),
            percent(line.of_all_reduce),
        ]
        for line in lines
    ]
    return ["method", "alpha", "rho", "to 1 %", "a round", "busiest", "relative"], rows


def _in_words(lines: Sequence[Method]) -> str:
    """One sentence: what it takes to come together, which a round alone does not tell."""
    average, _, steady, drawn = lines
    sent = [
        f"{line.method} {size(round(line.rounds * line.bytes_per_round))} in {_count(line.rounds, 'round')}"
        for line in (steady, drawn, average)
    ]
    return f"Sent by a rank until 1 % of the models' squared distance is left: {', '.join(sent)}."
