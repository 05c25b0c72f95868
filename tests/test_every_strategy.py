"""One table lists every strategy; a new one joins by one line and gets the whole contract."""

from __future__ import annotations

import pytest

from paceline.strategies import STRATEGIES, create
from paceline.testing import MICRO_BATCH, check_strategy

DELAYS = {  # rounds between taking a gradient and stepping with it; None: with one worker it is not plain SGD
    "all-reduce": 0,
    "all-reduce:micro_batches=3": 0,
    "balanced": 0,
    "balanced:micro_batches=2:dead_band=0.5": 0,
    "local-sgd:steps=1": 0,
    "local-sgd": None,
    "local-sgd:steps=4:by_speed": None,
    "rennala": None,  # what is under way when the round closes is carried into the next
    "rennala:target=40:lr_rule=none": None,
    "abs-sgd": 0,  # the own part of the round under way is all of it
    "abs-sgd:lr_rule=none:micro_batches=fixed": 0,
    "abs-sgd:min_micro_batches=3": None,  # goes on from each micro-batch of a round
    "abs-sgd:trigger=fastest:min_micro_batches=2": None,
    "abs-sgd:trigger=target:target=32": None,
    "abs-sgd:trigger=target:target=auto": None,
    "abs-sgd:delay_cure=extrapolate": 1,  # without momentum it does nothing
    "abs-sgd:delay_cure=none": 1,
    "abs-sgd:lr_rule=adascale:reference_batch=8": 0,
    "abs-sgd --paper": 1,
    "abs-sgd:delay_cure=acco": None,
    "non-blocking": 0,
    "non-blocking:mini_batches=1": 0,
    "non-blocking:mini_batches=3:unfinished=finish": 0,
    "non-blocking:mini_batches=3:carry": 0,
}


@pytest.mark.parametrize("text", DELAYS)
def test_the_contract(text: str) -> None:
    name, _, options = text.partition(":")
    follows_the_batch = name in ("abs-sgd", "rennala") and "lr_rule=none" not in options

    def linear(batch: int) -> float:
        largest = 4.0 if "reference_batch" in options else 1.0
        return min(batch / MICRO_BATCH, largest) if follows_the_batch else 1.0

    check_strategy(create(text), delay=DELAYS[text], lr_scale=linear)


def test_no_strategy_is_missing() -> None:
    assert {create(text).name for text in DELAYS} == set(STRATEGIES)
