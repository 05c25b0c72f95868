"""A strategy's mistakes, as the simulator finds them; above all why a run stands still: who waits where, for whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.backends.simulated_node import CollectiveWork, SimulatedNode
from paceline.backends.virtual_rounds import Collective
from paceline.errors import PacelineError
from paceline.simulator.faults import FaultPlan

SHOWN = 8


def standstill(nodes: Sequence[SimulatedNode], faults: FaultPlan, now: float, strategy: str) -> PacelineError:
    """The error for a run in which nothing can happen any more although ranks are not through."""
    broken = faults.in_force(now)
    facts = [*broken, *_waits(nodes)]
    return PacelineError(
        f"The simulated run of {strategy} stands still at {now:g} s: {'; '.join(facts)}.",
        cause="The strategy cannot go on without that rank or link."
        if broken
        else "The ranks do not start the same collectives in the same order, or a message was never sent.",
        remedy="" if broken else "Look at what the named ranks do differently from the others.",
    )


def _waits(nodes: Sequence[SimulatedNode]) -> list[str]:
    """Ranks that wait for the same thing, in one sentence."""
    groups: dict[str, list[int]] = {}
    for node in nodes:
        if node.resume is not None and node.computing is None:
            groups.setdefault(_reason(node, nodes), []).append(node.rank)
    return [
        f"{named(ranks)} {reason.format('waits' if len(ranks) == 1 else 'wait')}" for reason, ranks in groups.items()
    ]


def _reason(node: SimulatedNode, nodes: Sequence[SimulatedNode]) -> str:
    work = node.waits_for
    if isinstance(work, CollectiveWork):
        collective = work.collective
        number = collective.number if collective.round is None else collective.round
        missing = [other for other in nodes if other.rank not in collective.payloads]
        ended = [other.rank for other in missing if other.ended]
        whom = f"for {named(other.rank for other in missing)}" if missing else "for the network"
        return f"{{}} in {collective.kind} {number} {whom}" + (f" ({named(ended)} ended already)" if ended else "")
    if work is not None:
        return "{} for a message from anybody"
    return (
        f"{{}} for anything to arrive, without data and with nothing in flight, after {node.empties} empty gradients "
        "in a row (the strategy asks for gradients where it should end or communicate)"
    )


def named(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> named([2]), named([0, 1, 3]), named(range(1000))
    ('rank 2', 'ranks 0, 1, 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more')
    """
    numbers = list(ranks)
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:SHOWN]))}{more}"


def leaked(mode: str, strategy: str, where: str) -> PacelineError:
    return PacelineError(
        f"The strategy {strategy} awaits inside {mode}, which would leak into the other ranks.",
        where=where,
        remedy="Leave the `with` block before the await.",
    )


def out_of_order(collective: Collective, kind: str, rank: int, strategy: str, where: str) -> PacelineError:
    first = next(iter(collective.payloads))
    return PacelineError(
        f"The strategy {strategy} starts its collectives in different orders: number {collective.number} is "
        f"{collective.kind} on rank {first} and {kind} on rank {rank}.",
        where=where,
        remedy="A local finding may change how much is computed before a collective, never which comes next.",
    )


def never_ends(empties: int, strategy: str, where: str) -> PacelineError:
    return PacelineError(
        f"The strategy {strategy} does not end: the ranks were given {empties} empty gradients, and no rank has data.",
        where=where,
        remedy="Its worker must end when `node.finished` is true, which `node.apply` of an all-reduce sets.",
    )
