"""The options of ABS-SGD: what means the same, and what is refused with a reason before anything is computed."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.strategies import AbsSgd, create


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
