"""Ranks that do not fit together, ranks that die, and loops that cannot work: a clear error on every rank, no hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Ranks = Callable[..., Any]
APART = {
    "shape": "parameter weight has shape",
    "names": "parameter",
    "dtype": "float64",
    "strategy": "the strategy is",
    "option": "the option micro_batches is",
    "samples": "the data set's samples is",
    "seed": "the data set's seed is",
    "schedule": "the description's schedulers is ['CosineAnnealingLR(",
}
MISTAKES = {
    "short": "The dataset has 3 samples, fewer than one micro-batch of 4.",
    "iterable": "The dataset is not map-style.",
    "endless": "Neither epochs nor seconds is given.",
    "shuffle": "The loader decides shuffle itself.",
    "early": "The loader was iterated before run.optimizer(...) was called.",
    "stranger": "The optimizer holds 2 parameter(s) that are not the model's.",
    "twice": "optimizer.step() was called without a new micro-batch",
    "again": "The loader was iterated a second time.",
    "plateau": "ReduceLROnPlateau cannot be driven by samples.",
    "late": "run.scheduler(...) comes after run.loader(...) and run.optimizer(...), before the first micro-batch.",
}


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


@pytest.mark.parametrize("how", APART)
def test_ranks_that_differ_are_told_in_what(ranks: Ranks, how: str) -> None:
    outcome = ranks("train_apart", 3, fails=True, how=how)
    assert outcome.codes == [1, 1, 1]
    for output in outcome.outputs:
        assert "do not train the same thing" in last_line(output), output
        assert APART[how] in last_line(output)
        assert "rank 1" in last_line(output).lower()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_those_who_cannot_go_on(ranks: Ranks, victim: int) -> None:
    outcome = ranks("train_until_killed", 3, fails=True, servers=0, strategy="frail", victim=victim)
    assert outcome.codes == [-9 if rank == victim else 1 for rank in range(3)]
    for rank in {0, 1, 2} - {victim}:
        assert "The run cannot go on without a lost rank (" in last_line(outcome.outputs[rank])
        assert f"rank {victim}: ended with -9" in last_line(outcome.outputs[rank])


@pytest.mark.parametrize("how", MISTAKES)
def test_mistakes_in_the_loop_are_explained(ranks: Ranks, how: str) -> None:
    outcome = ranks("mistake", 1, fails=True, how=how)
    assert outcome.codes == [1]
    assert MISTAKES[how] in last_line(outcome.outputs[0])


def test_a_learning_rate_changed_in_the_loop_is_refused(ranks: Ranks) -> None:
    outcome = ranks("mistake", 2, fails=True, how="schedule")
    assert outcome.codes == [1, 1]
    assert any("The learning rate was changed from [0.05]" in output for output in outcome.outputs)
