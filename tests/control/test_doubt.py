"""Doubts: a lost rank's samples wait until every witness has said how far the run has come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.control.doubt import Doubts


def test_who_is_lost_without_witnesses_is_in_no_doubt():
    assert Doubts().lost(0, generation=1, witnesses=[]) == [0]


def test_every_witness_must_have_known_of_the_loss():
    doubts = Doubts()
    assert doubts.lost(2, generation=1, witnesses=[0, 1]) == []
    assert doubts.heard(0, generation=0) == doubts.heard(1, generation=1) == []
    assert doubts.heard(1, generation=1) == []  # saying it twice does not speak for another
    assert doubts.heard(0, generation=1) == [2]
    assert doubts.heard(0, generation=1) == []  # and it is told once


def test_each_loss_has_a_generation_of_its_own():
    doubts = Doubts()
    doubts.lost(2, generation=1, witnesses=[0, 1, 3])
    doubts.lost(3, generation=2, witnesses=[0, 1])
    assert doubts.heard(0, generation=2) == []
    assert doubts.heard(1, generation=1) == [2]
    assert doubts.heard(1, generation=2) == [3]


def test_a_lost_witness_cannot_speak_and_is_not_waited_for():
    doubts = Doubts()
    doubts.lost(2, generation=1, witnesses=[0, 1])
    doubts.heard(0, generation=1)
    assert doubts.lost(1, generation=2, witnesses=[0]) == [2]
    assert doubts.heard(0, generation=2) == [1]


def test_the_last_ones_lost_together_leave_no_doubt():
    doubts = Doubts()
    doubts.lost(0, generation=1, witnesses=[1])
    assert sorted(doubts.lost(1, generation=2, witnesses=[])) == [0, 1]


def test_who_leaves_has_told_all():
    doubts = Doubts()
    doubts.lost(2, generation=1, witnesses=[0, 1])
    assert doubts.gone(0) == [] and doubts.gone(1) == [2]


def test_a_better_reason_for_the_same_loss_asks_the_witnesses_again():
    doubts = Doubts()
    doubts.lost(1, generation=1, witnesses=[0])
    assert doubts.heard(0, generation=1) == [1]
    assert doubts.lost(1, generation=1, witnesses=[0]) == []
    assert doubts.heard(0, generation=1) == [1]


@given(st.permutations([0, 1, 2, 3]), st.sets(st.integers(0, 3)))
def test_in_whatever_order_the_witnesses_speak_the_last_word_decides(order, leaving):
    doubts = Doubts()
    assert doubts.lost(4, generation=7, witnesses=order) == []
    words = [doubts.gone(each) if each in leaving else doubts.heard(each, generation=7) for each in order]
    assert words == [[], [], [], [4]]
