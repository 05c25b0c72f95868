"""The gradient of the waist: sums, counts and samples, with empty contributions on either side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.node import Gradient


class Numbers:
    """A sum of gradients that is one number."""

    def __init__(self, number):
        self.number = number

    def plus(self, other):
        return Numbers(self.number + other.number)


def test_sums_counts_and_samples_add_up_in_order():
    batch = Gradient(Numbers(1.0), 4, [range(4)])
    batch += Gradient(Numbers(2.0), 3, [range(20, 22), range(8, 9)])
    assert (batch.values.number, batch.count) == (3.0, 7)
    assert batch.samples == [range(4), range(20, 22), range(8, 9)]


def test_empty_on_the_right_changes_nothing():
    values = Numbers(1.0)
    batch = Gradient(values, 4, [range(4)])
    batch += Gradient(None, 0)
    assert batch.values is values and (batch.count, batch.samples) == (4, [range(4)])


def test_empty_on_the_left_takes_over_the_right():
    values = Numbers(1.0)
    batch = Gradient(None, 0)
    batch += Gradient(values, 4, [range(4)])
    assert batch.values is values and (batch.count, batch.samples) == (4, [range(4)])


def test_an_empty_gradient_may_settle_discarded_samples():
    batch = Gradient(None, 0, [range(8, 12)])
    batch += Gradient(None, 0, [range(4)])
    assert batch.values is None and (batch.count, batch.samples) == (0, [range(8, 12), range(4)])


def test_the_same_object_goes_on():
    batch = first = Gradient(None, 2, [range(2)])
    batch += Gradient(None, 1, [range(5, 6)])
    assert batch is first


def test_empty_gradients_share_no_list():
    one, other = Gradient(None, 0), Gradient(None, 0)
    one += Gradient(None, 1, [range(1)])
    assert other.samples == []


@given(st.lists(st.none() | st.integers(1, 9)))
def test_any_sequence_keeps_every_sample_in_its_order(counts):
    batch, position, numbers = Gradient(None, 0), 0, []
    for count in counts:
        empty = count is None
        samples = [] if empty else [range(position, position + count)]
        batch += Gradient(None if empty else Numbers(count), count or 0, samples)
        position += count or 0
        numbers += samples
    assert batch.samples == numbers and batch.count == position
    assert batch.values is None if position == 0 else batch.values.number == position
