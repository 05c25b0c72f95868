"""Rennala SGD: enough samples at one point, and what becomes of those that come too late."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from paceline.backends.simulated import Data, simulate
from paceline.errors import PacelineError
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import Rennala, create
from paceline.summary import account

Play = Callable[..., Any]
MIXED = Cluster.from_speeds(
    [1, 0.7, 0.25], micro_batch_seconds=1.0, jitter=LogNormal(0.3), network=Network(latency=0.1), seed=4
)


def test_late_samples_are_discarded_and_all_accounted_for(play: Play) -> None:
    played = play(Rennala(target=24, unfinished="discard"), MIXED, epochs=4)
    run, books = played.run, account(played.events)
    assert run.samples_computed == 800 == run.samples_applied + run.samples_discarded
    assert 0 < run.samples_discarded == sum(event["samples"] for event in played.of_kind("discard"))
    assert not books.errors and books.in_flight == 0
    assert {event["reason"] for event in played.of_kind("discard")} == {"came after the round was complete"}


def test_late_samples_that_are_carried_are_all_used(play: Play) -> None:
    played = play(Rennala(target=24, unfinished="carry"), MIXED, epochs=4)
    run, books = played.run, account(played.events)
    assert run.samples_computed == run.samples_applied == 800 and run.samples_discarded == 0
    assert not books.errors and books.in_flight == 0


@pytest.mark.parametrize(("unfinished", "ages"), [("discard", {0}), ("carry", {0, 1})])
def test_no_gradient_is_older_than_the_rule_allows(play: Play, unfinished: str, ages: set[int]) -> None:
    assert play(Rennala(target=24, unfinished=unfinished), MIXED, epochs=4).ages() == ages


@pytest.mark.parametrize("unfinished", ["discard", "carry"])
@pytest.mark.parametrize("target", [8, 24, 60])
def test_every_round_has_its_samples_until_the_data_ends(play: Play, target: int, unfinished: str) -> None:
    played = play(Rennala(target=target, unfinished=unfinished), MIXED, epochs=8)
    ran_dry = min(event["t"] for event in _last_micro_batches(played))
    whole = [event["samples"] for event in played.of_kind("applied", rank=0) if event["t"] < ran_dry]
    assert len(whole) > 5 and min(whole) >= target


def _last_micro_batches(played: Any) -> list[dict]:
    return [played.of_kind("compute", rank)[-1] for rank in range(len(played.learners))]


def test_a_slow_worker_may_bring_nothing_to_a_round(play: Play) -> None:
    played = play(Rennala(target=16), (1, 1, 0.1))
    first = next(event for event in played.of_kind("applied", rank=2))
    assert first["samples"] >= 16 and first["own"] == 0


@pytest.mark.parametrize("unfinished", ["discard", "carry"])
def test_a_round_is_one_step_with_the_mean_of_what_it_has(play: Play, unfinished: str) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.02)
    strategy = Rennala(target=24, unfinished=unfinished, lr_rule="none")
    played = play(strategy, MIXED, optimizer=optimizer)
    if unfinished == "discard":
        _drop_discarded(played)
    for number, mean in enumerate(played.means()):
        expected = played.path[number] - 0.02 * mean
        torch.testing.assert_close(played.path[number + 1], expected, rtol=1e-12, atol=1e-14)
    for other in played.committed[1:]:
        assert all(torch.equal(*pair) for pair in zip(played.committed[0], other, strict=True))


def _drop_discarded(played: Any) -> None:
    """What is left of the micro-batches of each rank is what it brought to rounds."""
    for rank, own in enumerate(played.micro_batches):
        events = [event["kind"] for event in played.events if event["rank"] == rank]
        late = [place for place, kind in enumerate(events) if kind == "discard"]
        number_before = [events[:place].count("compute") - 1 for place in late]
        for number in reversed(number_before):
            del own[number]


def test_the_learning_rate_follows_the_batch_as_in_abs_sgd(play: Play) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.02)
    for strategy, reference, largest in (
        (Rennala(target=24), 24, 1.0),
        (Rennala(lr_rule="linear", reference_batch=30, target=24), 30, 4.0),
    ):
        played = play(strategy, MIXED, optimizer=optimizer)
        for number, mean in enumerate(played.means()):
            factor = min(played.batches[number] / reference, largest)
            expected = played.path[number] - 0.02 * factor * mean
            torch.testing.assert_close(played.path[number + 1], expected, rtol=1e-12, atol=1e-14)


def test_it_ends_when_the_target_is_more_than_all_data() -> None:
    run = simulate(Rennala(target=10**6), MIXED, data=Data(1001, 2))
    assert run.samples_applied == 2002 and run.rounds == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rennala:target=0", "target=0.*number of samples or auto"),
        ("rennala:target=-8", "target='-8'.*number of samples or auto"),
        ("rennala:target=many", "target='many'.*number of samples or auto"),
        ("rennala:target=", "target=''.*number of samples or auto.*write rennala:target=512"),
        ("rennala:unfinished=keep", "unfinished='keep'.*one of discard, carry"),
        ("rennala:lr_rule=cubic", "lr_rule='cubic'.*one of auto, linear"),
        ("rennala:lr_rule=sqrt", "lr_rule=sqrt and no reference_batch"),
        ("rennala:reference_batch=-1", "reference_batch=-1.*at least 0"),
    ],
)
def test_wrong_options_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(PacelineError, match=complaint):
        create(text)
