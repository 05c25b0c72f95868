"""The ledger: whatever happens in whatever order, each sample is settled exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.control.ledger import Ledger, order
from paceline.control.ranges import RangeSet
from paceline.errors import PacelineError

RANKS = 3


def positions(ranges):
    return [p for part in ranges for p in part]


class AnyInterleaving(RuleBasedStateMachine):
    """A model of the ledger with one entry a position, beside the real one."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(samples=17, epochs=3, micro_batch=4, workers=RANKS)
        self.leased: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
        self.rounds: dict[tuple[int, int], set[int]] = {}
        self.doubt: dict[tuple[int, int], set[int]] = {}
        self.settled: list[int] = []
        self.committed = -1

    def some_of(self, data, rank):
        """Sub-ranges of what the rank has leased, cut anywhere."""
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.leased[rank])))) if self.leased[rank] else set()
        return chosen, [range(p, p + 1) for p in sorted(chosen)]

    @rule(rank=st.integers(0, RANKS - 1), count=st.integers(1, 9))
    def lease(self, rank, count):
        got = self.ledger.lease(rank, count)
        assert len(got) <= count
        for part in got:
            assert 1 <= len(part) <= 4 and part.start // 17 == (part.stop - 1) // 17
        taken = positions(got)
        everyone = [*self.leased.values(), *self.rounds.values(), *self.doubt.values(), set(self.settled)]
        assert len(taken) == len(set(taken)) and not set(taken) & set().union(*everyone)
        self.leased[rank] |= set(taken)

    @rule(rank=st.integers(0, RANKS - 1), ahead=st.integers(-1, 2), data=st.data())
    def contribute(self, rank, ahead, data):
        number = max(0, self.committed + ahead)
        chosen, ranges = self.some_of(data, rank)
        self.ledger.contribute(rank, number, ranges)
        self.leased[rank] -= chosen
        if number <= self.committed:
            self.settled += chosen
        else:
            self.rounds.setdefault((rank, number), set()).update(chosen)

    @rule(ahead=st.integers(0, 2), members=st.none() | st.sets(st.integers(0, RANKS - 1)))
    def commit(self, ahead, members):
        number = max(0, self.committed + ahead)
        self.ledger.commit(number, members)
        if number <= self.committed:
            return
        self.committed = number
        for key in [key for key in self.rounds if key[1] <= number]:
            self.settled += self.rounds.pop(key)
        for key in [key for key in self.doubt if key[1] <= number]:
            verdict = self.doubt.pop(key)
            if members is not None and key[0] in members:
                self.settled += verdict

    @rule(rank=st.integers(0, RANKS - 1), data=st.data())
    def discard(self, rank, data):
        chosen, ranges = self.some_of(data, rank)
        self.ledger.discard(rank, ranges, "not a number")
        self.leased[rank] -= chosen
        self.settled += chosen

    @rule(rank=st.integers(0, RANKS - 1), data=st.data())
    def give_back(self, rank, data):
        chosen, ranges = self.some_of(data, rank)
        self.ledger.give_back(rank, ranges)
        self.leased[rank] -= chosen

    @rule(rank=st.integers(0, RANKS - 1))
    def release(self, rank):
        self.ledger.release(rank)
        self.leased[rank].clear()
        for key in [key for key in self.rounds if key[0] == rank]:
            self.doubt.setdefault(key, set()).update(self.rounds.pop(key))

    @precondition(lambda self: self.settled)
    @rule(rank=st.integers(0, RANKS - 1), data=st.data())
    def settling_twice_is_refused(self, rank, data):
        p = data.draw(st.sampled_from(sorted(self.settled)))
        with pytest.raises(PacelineError, match="does not hold"):
            self.ledger.contribute(rank, self.committed + 1, [range(p, p + 1)])

    @invariant()
    def counts_agree(self):
        assert len(self.settled) == len(set(self.settled)) == self.ledger.used + self.ledger.discarded
        held = [*self.leased.values(), *self.rounds.values(), *self.doubt.values()]
        assert self.ledger.leased == sum(map(len, held))
        assert self.ledger.remaining == 17 * 3 - len(self.settled)
        early = [p for (_, number), ps in self.rounds.items() if number <= self.committed + 1 for p in ps]
        assert sorted(positions(self.ledger.snapshot(self.committed + 1))) == sorted([*self.settled, *early])

    def teardown(self):
        for rank in range(RANKS):
            self.release(rank)
        self.commit(3, None)
        while not self.ledger.complete:
            self.ledger.contribute(0, self.committed + 1, self.ledger.lease(0, 9))
            self.ledger.commit(self.committed + 1)
            self.committed += 1
        assert positions(self.ledger.snapshot(0)) == list(range(17 * 3))
        assert self.ledger.used + self.ledger.discarded == 17 * 3


AnyInterleaving.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyInterleaving = AnyInterleaving.TestCase


def test_leases_shrink_towards_the_end():
    ledger = Ledger(samples=64, epochs=1, micro_batch=1, workers=2)
    sizes = []
    while leases := ledger.lease(0, 99):
        sizes.append(len(leases))
    assert sizes[0] == 16 and sizes == sorted(sizes, reverse=True) and sizes[-3:] == [1, 1, 1]


def test_work_given_back_goes_out_first_and_whole():
    ledger = Ledger(samples=100, epochs=1, micro_batch=8, workers=1)
    first = ledger.lease(0, 3)
    ledger.lease(0, 1)
    ledger.give_back(0, [range(24)])  # as one piece, although it was three
    assert ledger.lease(1, 3) == first == [range(8), range(8, 16), range(16, 24)]


def test_an_endless_run_keeps_little_memory():
    ledger = Ledger(samples=10, epochs=None, micro_batch=4, workers=2)
    for number in range(3000):
        for rank in (0, 1):
            ledger.contribute(rank, number, ledger.lease(rank, 2))
        ledger.commit(number)
        assert ledger.pieces <= 4
    assert ledger.remaining is None and not ledger.complete and ledger.used > 30_000


def test_a_checkpoint_is_taken_up():
    ledger = Ledger(samples=10, epochs=2, micro_batch=4, workers=1, used=[range(5), range(8, 9)])
    assert (ledger.used, ledger.remaining) == (6, 14)
    got = [part for _ in range(9) for part in ledger.lease(0, 1)]
    assert positions(got) == [5, 6, 7, *range(9, 20)]
    with pytest.raises(PacelineError, match="has only"):
        Ledger(samples=2, epochs=1, micro_batch=1, workers=1, used=[range(5)])


def test_a_dead_ranks_round_waits_for_the_verdict():
    for members, expected in (((0, 1), 4), ((0,), 0), (None, 0)):
        ledger = Ledger(samples=8, epochs=1, micro_batch=4, workers=1)
        ledger.contribute(1, 0, ledger.lease(1, 1))
        ledger.release(1)
        assert ledger.lease(0, 1) == [range(4, 8)] and ledger.lease(0, 1) == []
        ledger.commit(0, members)
        assert ledger.used == expected


def test_a_repeated_round_may_contribute_the_same_again():
    ledger = Ledger(samples=8, epochs=1, micro_batch=4, workers=1)
    leases = ledger.lease(0, 1)
    ledger.contribute(0, 0, leases)
    ledger.contribute(0, 1, leases)
    ledger.commit(0)
    assert ledger.used == 0
    ledger.commit(1)
    assert ledger.used == 4


def test_the_same_range_twice_in_one_call_is_refused():
    ledger = Ledger(samples=8, epochs=1, micro_batch=4, workers=1)
    ledger.lease(0, 1)
    with pytest.raises(PacelineError, match="twice"):
        ledger.discard(0, [range(2), range(1, 3)], "test")


def test_reported():
    ledger = Ledger(samples=8, epochs=1, micro_batch=4, workers=2)
    ledger.contribute(0, 3, [])
    assert ledger.reported(3, [0]) and not ledger.reported(4, [0]) and not ledger.reported(3, [0, 1])


def test_the_order_is_a_permutation_that_seed_and_epoch_decide():
    assert sorted(order(1, 0, 50)) == list(range(50))
    assert np.array_equal(order(1, 0, 50), order(1, 0, 50))
    assert not np.array_equal(order(1, 0, 50), order(1, 1, 50))


def test_nonsense_is_refused():
    with pytest.raises(PacelineError, match="makes no sense"):
        Ledger(samples=0, epochs=1, micro_batch=4, workers=1)


parts = st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda p: range(p[0], p[0] + p[1]))


@given(st.lists(st.tuples(st.booleans(), parts)))
def test_a_range_set_is_a_set(steps):
    ranges, plain = RangeSet(), set()
    for adding, part in steps:
        (ranges.add if adding else ranges.remove)(part)
        plain = plain | set(part) if adding else plain - set(part)
        assert positions(ranges) == sorted(plain) and len(ranges) == len(plain)
        assert all(a.stop < b.start for a, b in zip(list(ranges), list(ranges)[1:], strict=False))
        assert not part or ranges.covers(part) == set(part).issubset(plain)
