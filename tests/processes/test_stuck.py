"""A rank is stuck in its own code, and its heartbeat lives: the others do without it, and what it does later changes
nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.summary import account

Ranks = Callable[..., Any]
SAMPLES = 3 * 61  # of `train_until_stuck`
TIMEOUTS = {"heartbeat_timeout": 4.0, "stuck_timeout": 1.0}
STRATEGIES = {
    "all-reduce": "loop",  # the others wait for it in their next round
    "abs-sgd": "data",  # they compute meanwhile, and their round waits
    "asp": "loop",  # nobody waits, until only the samples that it holds are left
    "d-psgd": "data",  # its neighbours wait for its model
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_others_go_on_without_a_rank_that_is_stuck(ranks: Ranks, strategy: str) -> None:
    servers = int(strategy == "asp")
    stuck = {"victim": 1, "where": STRATEGIES[strategy]}
    outcome = ranks("train_until_stuck", 3 + servers, fails=True, timeouts=TIMEOUTS, strategy=strategy, **stuck)
    assert outcome.codes == [0, 1, 0, *([0] * servers)], "\n".join(outcome.outputs)
    assert "took this rank for dead" in outcome.outputs[1]
    assert outcome.facts[0]["final"] == outcome.facts[2]["final"]
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (SAMPLES, 0)
    assert not account(outcome.events).errors
    ((lost, why),) = [(event["rank"], event["reason"]) for event in outcome.events if event["kind"] == "lost"]
    assert lost == 1 and why.startswith("it was busy with its own code for ")
