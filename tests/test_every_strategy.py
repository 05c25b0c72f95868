"""One table lists every strategy; a new one joins by one line and gets the whole contract."""

from __future__ import annotations

import pytest

from paceline.strategies import STRATEGIES, create
from paceline.testing import check_strategy

DELAYS = {  # rounds between taking a gradient and stepping with it
    "all-reduce": 0,
    "all-reduce:micro_batches=3": 0,
    "balanced": 0,
    "balanced:micro_batches=2:dead_band=0.5": 0,
    "abs-sgd": 1,
    "abs-sgd:delay_cure=none": 1,
    "abs-sgd:min_micro_batches=3": 1,
}


@pytest.mark.parametrize("text", DELAYS)
def test_the_contract(text: str) -> None:
    check_strategy(create(text), delay=DELAYS[text])


def test_no_strategy_is_missing() -> None:
    assert {text.partition(":")[0] for text in DELAYS} == set(STRATEGIES)
