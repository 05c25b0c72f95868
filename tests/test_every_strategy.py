"""One table lists every strategy; a new one joins by one line and gets the whole contract."""

from __future__ import annotations

import pytest

from paceline.strategies import STRATEGIES, NonBlocking, create
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
    "non-blocking:topology=d-psgd": 0,
    "non-blocking:topology=d-psgd:mini_batches=3:carry:graph=complete": 0,
    "non-blocking:topology=matcha:mini_batches=3:unfinished=finish": 0,
    "d-psgd": 0,
    "d-psgd:graph=complete:mixing=uniform": 0,
    "d-psgd:graph=star:mixing=best-constant:micro_batches=2": 0,
    "d-psgd:momentum=acid": 0,
    "matcha": 0,
    "matcha:graph=complete:budget=0.3:seed=3": 0,
    "ad-psgd": 0,
    "ad-psgd:graph=star:seed=7": 0,
    "ad-psgd:graph=ring:momentum=acid": 0,
    "bsp": 0,
    "bsp:overlap=always:compress=top-k:ratio=1": 0,
    "ssp:overlap=never": 0,
    "ssp:overlap=always": 1,  # the parameters asked for ahead lack the worker's own last gradient
    "ssp:staleness=0": 0,
    "dssp:overlap=never": 0,
    "asp:overlap=never": 0,
    "asp:overlap=always:adapt_lr": 1,
    "asp:compress=top-k:ratio=0.5": None,  # what is not sent comes late
    "gssp:overlap=never": 0,
    "gssp:overlap=always:staleness=1": 1,
    "gssp:grouping=equal:exchange=gradient:overlap=never": 0,
    "gssp:exchange=global:overlap=never": None,  # steps of the group and of the global server
    "gssp:parts=2:overlap=never": 0,
    "gssp --paper": None,
    "adaptive-sgd:mega_batch=8": 0,
    "adaptive-sgd": None,  # several steps between two merges
    "adaptive-sgd:overlap": None,
    "adaptive-sgd:mega_batch=96:momentum=0.5": None,
    "adaptive-sgd:mega_batch=96:momentum=0.5:overlap": None,
    "adaptive-sgd:mega_batch=96:rule=release": None,
    "adaptive-sgd:mega_batch=96:momentum=0.5:paper": None,
    "elastic-averaging": None,  # the model of the run is a centre that follows the replicas
    "elastic-averaging:steps=1:elasticity=0.5": None,
    "crossbow": None,
    "crossbow:momentum=0": None,
}


@pytest.mark.parametrize("text", DELAYS)
def test_the_contract(text: str) -> None:
    name, _, options = text.partition(":")
    follows_the_batch = name in ("abs-sgd", "rennala", "adaptive-sgd") and "lr_rule=none" not in options
    strategy = create(text)

    def linear(batch: int) -> float:
        if isinstance(strategy, NonBlocking) and strategy.steps_alone:
            return batch / (strategy.mini_batches * MICRO_BATCH)  # what is not finished counts as zero
        if strategy.servers_for(1) and strategy.bound.high:
            return batch / MICRO_BATCH  # a worker's part of a step goes by its samples
        largest = 4.0 if "reference_batch" in options else 1.0
        return min(batch / MICRO_BATCH, largest) if follows_the_batch else 1.0

    check_strategy(strategy, delay=DELAYS[text], lr_scale=linear)


def test_no_strategy_is_missing() -> None:
    assert {create(text).name for text in DELAYS} == set(STRATEGIES)
