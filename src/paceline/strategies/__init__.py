"""Every strategy, by name. A new one joins by one line in `STRATEGIES`."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.errors import no_such
from paceline.options import read_options, split_name
from paceline.strategies.abs_sgd import AbsSgd
from paceline.strategies.ad_psgd import AdPsgd
from paceline.strategies.adaptive_sgd import AdaptiveSgd
from paceline.strategies.all_reduce import AllReduce
from paceline.strategies.asp import Asp
from paceline.strategies.balanced import Balanced
from paceline.strategies.bsp import Bsp
from paceline.strategies.crossbow import Crossbow
from paceline.strategies.d_psgd import DPsgd
from paceline.strategies.dssp import Dssp
from paceline.strategies.elastic_averaging import ElasticAveraging
from paceline.strategies.gssp import Gssp
from paceline.strategies.local_sgd import LocalSgd
from paceline.strategies.matcha import Matcha
from paceline.strategies.non_blocking import NonBlocking
from paceline.strategies.rennala import Rennala
from paceline.strategies.ssp import Ssp
from paceline.strategies.strategy import Strategy

KINDS = (
    AllReduce, Balanced, LocalSgd, Rennala, AbsSgd, NonBlocking, DPsgd, Matcha, AdPsgd, Bsp, Ssp, Dssp, Asp, Gssp,
    AdaptiveSgd, ElasticAveraging, Crossbow,
)  # fmt: skip
STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in KINDS}

__all__ = [
    "STRATEGIES",
    "AbsSgd",
    "AdPsgd",
    "AdaptiveSgd",
    "AllReduce",
    "Asp",
    "Balanced",
    "Bsp",
    "Crossbow",
    "DPsgd",
    "Dssp",
    "ElasticAveraging",
    "Gssp",
    "LocalSgd",
    "Matcha",
    "NonBlocking",
    "Rennala",
    "Ssp",
    "Strategy",
    "create",
    "options",
]


def create(text: str) -> Strategy:
    """A strategy from its name and, behind colons or dashes, its options. One without a value is switched on.

    >>> create("local-sgd:steps=4:by_speed")
    LocalSgd(steps=4, by_speed=True)
    >>> create("abs-sgd --paper").delay_cure
    'none'
    """
    name, settings = split_name(text)
    if name not in STRATEGIES:
        raise no_such("strategy", name, STRATEGIES)
    kind = STRATEGIES[name]
    return kind(**read_options(settings, options(kind), "strategy", name))


def options(kind: type[Strategy]) -> dict[str, Any]:
    """A strategy's options and their defaults.

    >>> options(AllReduce)
    {'compress': 'none', 'micro_batches': 1}
    """
    return {field.name: field.default for field in dataclasses.fields(kind)}
