"""What each process of a run needs of the machine that Ray places it on: resources and labels, by Ray's own names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError

LABELS = "label_selector"
ONE_CORE = {"CPU": 1.0}
ARGUMENTS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # Ray's, for resources that have their own
Wanted = int | Sequence[Mapping[str, Any]]
"""How many processes, of one core each; or what each of them needs, as in
`[{"GPU": 1, "label_selector": {"ray.io/accelerator-type": "A100"}}, {"CPU": 4}]`."""


@dataclass(frozen=True)
class Need:
    """Of one process.

    Args:
        resources: how much of each.
        labels: that its node must have; see Ray's label selectors.
    """

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, wanted: Mapping[str, Any]) -> Need:
        """
        >>> Need.of({"GPU": 1, "label_selector": {"pool": "fast"}})
        Need(resources={'GPU': 1.0}, labels={'pool': 'fast'})
        """
        labels = wanted.get(LABELS, {})
        try:
            resources = {name: float(amount) for name, amount in wanted.items() if name != LABELS and amount}
        except (TypeError, ValueError):
            resources = {}
        if not isinstance(labels, Mapping) or not resources or min(resources.values()) < 0:
            raise PacelineError(
                f"{dict(wanted)} does not say what a process needs.",
                remedy=f'Give amounts of Ray\'s resources, as in {{"GPU": 1, "CPU": 4}}, and labels under "{LABELS}".',
            )
        return cls(resources, dict(labels))

    @property
    def options(self) -> dict[str, Any]:
        """For Ray's actor.

        >>> Need({"CPU": 2.0, "GPU": 1.0, "slow": 1.0}).options
        {'num_cpus': 2.0, 'num_gpus': 1.0, 'resources': {'slow': 1.0}}
        """
        own = {argument: self.resources.get(name, 0) for name, argument in ARGUMENTS.items()}
        custom = {name: amount for name, amount in self.resources.items() if name not in ARGUMENTS}
        return {key: value for key, value in {**own, "resources": custom}.items() if value or key == "num_cpus"}


def needs_of(wanted: Wanted, what: str, fewest: int) -> list[Need]:
    """Of each process.

    >>> needs_of(2, "workers", 1) == [Need({"CPU": 1.0})] * 2
    True
    """
    each = [ONE_CORE] * wanted if isinstance(wanted, int) else list(wanted)
    if len(each) < fewest or (isinstance(wanted, int) and wanted < 0):
        raise PacelineError(
            f"{what}={wanted!r} is too few.", remedy=f"Give at least {fewest}, or a list of what each needs."
        )
    return [Need.of(need) for need in each]


def needs_of_option(text: str | None, nproc: int, servers: int) -> tuple[list[Need], list[Need]]:
    """Of workers and of servers, from what `--resources` says in JSON: for each worker the same, or a list with one for
    each worker, behind which those of servers may follow.

    >>> workers, servers = needs_of_option('[{"GPU": 1}, {"CPU": 4}]', 2, 1)
    >>> [dict(need.resources) for need in [*workers, *servers]]
    [{'GPU': 1.0}, {'CPU': 4.0}, {'CPU': 1.0}]
    """
    try:
        given = ONE_CORE if text is None else json.loads(text)
    except ValueError:
        given = None
    listed = [given] * nproc if isinstance(given, dict) else given
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise PacelineError(
            f"{text} says no resources.",
            where="--resources",
            remedy="""Write JSON: '{"CPU": 4}' for every worker, '[{"GPU": 1}, {"CPU": 4}]' with one for each.""",
        )
    if len(listed) == nproc:
        listed = [*listed, *[ONE_CORE] * servers]
    if len(listed) != nproc + servers:
        raise PacelineError(
            f"There are {len(listed)} descriptions for {nproc} workers and {servers} servers.",
            where="--resources",
            remedy="Give one for each worker, or for each worker and each server.",
        )
    needs = [Need.of(each) for each in listed]
    return needs[:nproc], needs[nproc:]
