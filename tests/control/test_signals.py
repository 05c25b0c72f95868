"""Which rounds are over: said by somebody, or counted up; and nothing is kept for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.control.signals import REMEMBERED, RoundSignals


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 60))
def test_a_round_is_over_exactly_when_its_samples_reach_the_target(counts: list[int], target: int) -> None:
    signals, together, news = RoundSignals(), 0, 0
    for samples in counts:
        together += samples
        news += signals.add(3, samples, target)
        assert (3 in signals) == (together >= target)
        assert news == (together >= target), "that it is over is news once"
    assert 2 not in signals and 4 not in signals


def test_rounds_are_counted_apart() -> None:
    signals = RoundSignals()
    assert not signals.add(1, 9, 10) and not signals.add(2, 9, 10)
    assert signals.add(2, 1, 10) and 1 not in signals
    assert signals.add(1, 1, 10)


def test_a_word_ends_a_round_that_is_being_counted() -> None:
    signals = RoundSignals()
    signals.add(1, 9, 10)
    assert signals.add(1) and 1 in signals
    assert not signals.add(1, 100, 10), "no news"


def test_the_target_is_that_of_the_newest_count() -> None:
    """Ranks may work it out a round apart, from a noise scale that has moved."""
    signals = RoundSignals()
    assert not signals.add(1, 9, 20) and signals.add(1, 1, 10)


def test_it_does_not_grow_with_the_run() -> None:
    signals = RoundSignals()
    for number in range(10 * REMEMBERED):
        signals.add(number, 1, 2)
        if number % 3:
            signals.add(number, 1, 2)
        assert len(signals._rounds) <= 2 * REMEMBERED + 1
        assert len(signals._samples) <= 2 * REMEMBERED
        if number % 3:
            assert number in signals


def test_a_number_far_from_the_others_is_remembered_as_long_as_they_are() -> None:
    """Strategies and backends number what they signal each in their own way."""
    signals = RoundSignals()
    signals.add(2**60)
    for number in range(REMEMBERED - 1):
        signals.add(number)
    assert 2**60 in signals and not signals.add(2**60)
    for number in range(REMEMBERED, 4 * REMEMBERED):
        signals.add(number)
    assert 2**60 not in signals and 4 * REMEMBERED - 1 in signals
