"""The options of ABS-SGD and of the strategies on graphs: what means the same, and what is refused with a reason
before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import nan
from typing import Any

import pytest
import torch

from paceline.backends.simulated import simulate
from paceline.errors import PacelineError
from paceline.simulator.cluster import Cluster
from paceline.strategies import AbsSgd, AdPsgd, DPsgd, Matcha, NonBlocking, create


@pytest.mark.parametrize("text", ["abs-sgd --paper", "abs-sgd:paper", "abs-sgd:paper=true", "abs-sgd:paper=True"])
def test_every_way_to_ask_for_the_paper_is_the_same(text: str) -> None:
    published = {"trigger": "vote", "delay_cure": "none", "lr_rule": "none", "micro_batches": "fixed"}
    strategy = create(text)
    assert strategy == AbsSgd(paper=True)
    assert {option: getattr(strategy, option) for option in published} == published


def test_the_paper_can_be_asked_for_with_what_it_says_anyway() -> None:
    assert create("abs-sgd --paper --delay_cure=none --trigger=vote") == AbsSgd(paper=True)
    assert create("abs-sgd --paper --min_micro_batches=4").min_micro_batches == 4, "the paper's k_min is an option"
    assert create("abs-sgd:paper=false") == AbsSgd()


def test_a_target_may_be_text_or_a_number() -> None:
    assert create("abs-sgd:trigger=target:target=512") == AbsSgd(trigger="target", target=512)
    assert AbsSgd(trigger="target", target="512").target == 512
    assert create("abs-sgd:trigger=target:target=auto").target == "auto"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("abs-sgd:paper=maybe", r"option paper of the strategy abs-sgd cannot be 'maybe'.*abs-sgd:paper=False"),
        ("abs-sgd --paper --delay_cure=extrapolate", r"delay_cure='extrapolate'.*is none in the paper"),
        ("abs-sgd --paper --delay_cure=anticipate", r"delay_cure='anticipate'.*is none in the paper"),
        ("abs-sgd --paper --trigger=fastest", r"trigger='fastest'.*is vote in the paper"),
        ("abs-sgd --paper --lr_rule=sqrt --reference_batch=8", r"lr_rule='sqrt'.*is none in the paper"),
        ("abs-sgd:trigger=target", r"target=''.*number of samples or auto.*abs-sgd:trigger=target:target=512"),
        ("abs-sgd:trigger=target:target=-5", r"target='-5'.*number of samples or auto"),
        ("abs-sgd:trigger=target:target=0", r"target=0.*number of samples or auto"),
        ("abs-sgd:trigger=target:target=2.5", r"target='2.5'.*number of samples or auto"),
        ("abs-sgd:trigger=target:target=lots", r"target='lots'.*number of samples or auto"),
        ("abs-sgd:target=512", r"target=512.*of use only with trigger=target"),
        ("abs-sgd:target=auto", r"target='auto'.*of use only with trigger=target"),
        ("abs-sgd:trigger=fastest:target=512", r"target=512.*of use only with trigger=target"),
        ("abs-sgd:trigger=slowest", r"trigger='slowest'.*must be one of vote, target, fastest"),
        ("abs-sgd:delay_cure=rest", r"delay_cure='rest'.*must be one of auto, anticipate, extrapolate, acco, none"),
        ("abs-sgd:lr_rule=cubic", r"lr_rule='cubic'.*must be one of auto, linear, sqrt, adascale, none"),
        ("abs-sgd:micro_batches=large", r"micro_batches='large'.*must be one of by-speed, fixed"),
        ("abs-sgd:lr_rule=linear", r"lr_rule=linear and no reference_batch.*lr_rule=linear:reference_batch=128"),
        ("abs-sgd:lr_rule=sqrt", r"lr_rule=sqrt and no reference_batch"),
        ("abs-sgd:lr_rule=adascale", r"lr_rule=adascale and no reference_batch"),
        ("abs-sgd:reference_batch=-128", r"reference_batch=-128.*at least 0"),
        ("abs-sgd:min_micro_batches=-1", r"min_micro_batches=-1.*at least 0"),
        ("abs-sgd:min_micro_batches=1.5", r"min_micro_batches.*cannot be '1.5'"),
        ("abs-sgd:max_lr_scale=0.5", r"max_lr_scale=0.5.*at least 1"),
        ("abs-sgd:max_lr_scale=-4", r"max_lr_scale=-4.*at least 1"),
        ("abs-sgd:delay_cure=acco:trigger=target:target=64", r"trigger='target'.*no meaning with delay_cure=acco"),
        ("abs-sgd:delay_cure=acco:min_micro_batches=3", r"min_micro_batches=3.*no meaning with delay_cure=acco"),
        ("abs-sgd:delay=none", r"no option of the strategy abs-sgd called 'delay'.*Did you mean 'delay_cure'"),
        ("abs-sgb", r"no strategy 'abs-sgb'.*Did you mean 'abs-sgd'"),
    ],
)
def test_what_makes_no_sense_is_refused_when_it_is_written(text: str, complaint: str) -> None:
    with pytest.raises(PacelineError, match=complaint):
        create(text)


@pytest.mark.parametrize(
    "options",
    [
        {"trigger": "target", "target": True},
        {"trigger": "target", "target": 2.5},
        {"trigger": "target", "target": None},
        {"min_micro_batches": True},
        {"min_micro_batches": "2"},
        {"max_lr_scale": nan},
        {"reference_batch": nan},
        {"trigger": None},
    ],
    ids=str,
)
def test_a_program_is_told_as_clearly_as_the_command_line(options: dict[str, Any]) -> None:
    [option] = [name for name in options if name != "trigger"] or ["trigger"]
    with pytest.raises(PacelineError, match=f"The option {option}=.* of the strategy abs-sgd is not possible"):
        AbsSgd(**options)


# ---- on a graph


def test_the_command_line_and_a_program_mean_the_same_graph() -> None:
    assert create("d-psgd:graph=0-1+1-2:mixing=best-constant") == DPsgd(graph="0-1+1-2", mixing="best-constant")
    assert create("matcha --graph=erdos-renyi --probability=0.5 --seed=3 --budget=1") == Matcha(
        graph="erdos-renyi", probability=0.5, seed=3, budget=1
    )
    assert create("ad-psgd:momentum=quasi-global") == AdPsgd(momentum="quasi-global")
    assert create("non-blocking:topology=matcha:budget=0.3") == NonBlocking(topology="matcha", budget=0.3)


def test_a_topology_may_be_named_with_what_is_the_default_anyway() -> None:
    assert create("non-blocking:topology=ring-all-reduce:graph=ring:budget=0.5:mixing=metropolis") == NonBlocking()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("d-psgd:mixing=foo", r"mixing='foo'.*d-psgd.*must be one of metropolis, best-constant, uniform"),
        ("d-psgd:momentum=foo", r"momentum='foo'.*must be one of local, quasi-global, acid"),
        ("d-psgd:micro_batches=0", r"micro_batches=0.*at least 1"),
        ("d-psgd:micro_batches=2.5", r"micro_batches.*cannot be '2.5'"),
        ("d-psgd:probability=-0.5", r"probability=-0.5.*at least 0"),
        ("d-psgd:probability=nan", r"probability=nan.*at least 0"),
        ("d-psgd:seed=-1", r"seed=-1.*at least 0"),
        ("d-psgd:seed=first", r"seed.*cannot be 'first'.*d-psgd:seed=0"),
        ("d-psgd:budget=0.5", r"no option of the strategy d-psgd called 'budget'"),
        ("matcha:budget=0", r"budget=0.0.*matcha.*above 0 and at most 1"),
        ("matcha:budget=-0.5", r"budget=-0.5.*above 0 and at most 1"),
        ("matcha:budget=1.01", r"budget=1.01.*above 0 and at most 1"),
        ("matcha:budget=nan", r"budget=nan.*above 0 and at most 1"),
        ("matcha:budget=half", r"budget.*cannot be 'half'.*matcha:budget=0.5"),
        ("matcha:mixing=uniform", r"no option of the strategy matcha called 'mixing'"),
        ("matcha:momentum=", r"momentum=''.*must be one of local, quasi-global, acid"),
        ("ad-psgd:momentum=heavy-ball", r"momentum='heavy-ball'.*ad-psgd.*must be one of local, quasi-global, acid"),
        ("ad-psgd:micro_batches=2", r"no option of the strategy ad-psgd called 'micro_batches'"),
        ("ad-psgd:seed=-3", r"seed=-3.*at least 0"),
        ("ad_psgd", r"no strategy 'ad_psgd'.*Did you mean 'ad-psgd'"),
        ("non-blocking:topology=foo", r"topology='foo'.*must be one of ring-all-reduce, d-psgd, matcha"),
        ("non-blocking:topology=d-psgd:budget=0.3", r"budget=0.3.*no meaning with topology=d-psgd"),
        ("non-blocking:topology=matcha:mixing=uniform", r"mixing='uniform'.*no meaning with topology=matcha"),
        ("non-blocking:graph=star", r"graph='star'.*no meaning with topology=ring-all-reduce"),
        ("non-blocking:momentum=acid", r"momentum='acid'.*no meaning with topology=ring-all-reduce"),
        ("non-blocking:budget=0.3", r"budget=0.3.*no meaning with topology=ring-all-reduce"),
        ("non-blocking:topology=d-psgd:mixing=foo", r"mixing='foo'.*must be one of metropolis"),
        ("non-blocking:topology=matcha:budget=0", r"budget=0.0.*above 0 and at most 1"),
        ("non-blocking:topology=d-psgd:momentum=foo", r"momentum='foo'.*must be one of local"),
        ("non-blocking:topology=d-psgd:mini_batches=0", r"mini_batches=0.*at least 1"),
    ],
)
def test_what_makes_no_sense_on_a_graph_is_refused_when_it_is_written(text: str, complaint: str) -> None:
    with pytest.raises(PacelineError, match=complaint):
        create(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("d-psgd:graph=rnig", "no graph 'rnig'.*Did you mean 'ring'"),
        ("ad-psgd:graph=", "no graph ''.*ring"),
        ("matcha:graph=0-1+2-3", r"not connected: its parts are \{0, 1\} and \{2, 3\} and \{4\}"),
        ("d-psgd:graph=0-1+1-2+2-3+3-5", "edge 3-5 leads to rank 5.*only ranks 0 to 4"),
        ("ad-psgd:graph=0-1,1-2", "'0-1,1-2' is neither the name of a graph nor a list of edges"),
        ("d-psgd:graph=torus", "5 workers do not make a torus"),
        ("ad-psgd:graph=erdos-renyi:probability=1.5", "cannot have the probability 1.5"),
        ("d-psgd:graph=erdos-renyi:probability=0.0001", "None of 100 random graphs of 5 workers was connected"),
        ("d-psgd:mixing=uniform", "Uniform mixing needs a complete graph"),
        ("matcha:budget=0.0000001", "budget of 1e-07 is too small"),
        ("matcha:graph=0-1+1-2/2-3+3-4", "Matching 1 has two edges at rank 1: 0-1 and 1-2"),
        ("non-blocking:topology=d-psgd:mixing=uniform", "Uniform mixing needs a complete graph"),
        ("non-blocking:topology=matcha:graph=rnig", "no graph 'rnig'"),
    ],
)
def test_what_does_not_fit_the_workers_is_refused_before_the_first_micro_batch(text: str, complaint: str) -> None:
    strategy = create(text)  # how many workers there are is not known yet
    with pytest.raises(PacelineError, match=complaint):
        simulate(strategy, Cluster.from_speeds([1.0] * 5), seconds=10.0)


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.01)],
    ids=["adaptive", "without momentum"],
)
@pytest.mark.parametrize("text", ["d-psgd", "matcha", "ad-psgd", "non-blocking:topology=d-psgd"])
def test_quasi_global_momentum_needs_one_to_take_the_place_of(
    play: Callable[..., Any], text: str, optimizer: Any
) -> None:
    with pytest.raises(PacelineError, match=r"needs SGD with a momentum.*torch\.optim\.SGD\(\.\.\., momentum=0\.9\)"):
        play(create(f"{text}:momentum=quasi-global"), (1.0, 1.0), optimizer=optimizer)
