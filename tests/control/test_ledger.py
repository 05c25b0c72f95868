"""The ledger: whatever happens in whatever order, each sample is settled exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.control.ledger import Ledger
from paceline.control.ranges import RangeSet
from paceline.errors import PacelineError
from paceline.rules.order import order

RANKS = 3
ranks = st.integers(0, RANKS - 1)


def positions(ranges):
    return [p for part in ranges for p in part]


class AnyInterleaving(RuleBasedStateMachine):
    """A model of the ledger with one entry a position, beside the real one."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(samples=17, epochs=3, micro_batch=4, workers=RANKS)
        self.held: list[list[int]] = [[] for _ in range(RANKS)]  # in the order of leasing, which is that of working
        self.progress = [0] * RANKS
        self.dropped: set[int] = set()
        self.used: list[int] = []
        self.discarded: list[int] = []

    @property
    def settled(self):
        return sorted(self.used + self.discarded)

    @rule(rank=ranks, count=st.integers(1, 9))
    def lease(self, rank, count):
        got = self.ledger.lease(rank, count)
        assert len(got) <= count
        for part in got:
            assert 1 <= len(part) <= 4 and part.start // 17 == (part.stop - 1) // 17
        taken = positions(got)
        assert len(taken) == len(set(taken)) and not set(taken) & {*self.settled, *positions(self.held)}
        self.held[rank] += taken

    @rule(data=st.data())
    def settle(self, data):
        """From very old news to the newest that can be; sometimes nobody says anything of the last ranks."""
        reachable = [st.integers(0, self.progress[rank] + len(self.held[rank])) for rank in range(RANKS)]
        news = data.draw(st.tuples(*reachable))[: data.draw(st.integers(0, RANKS))]
        for _ in range(2):  # the second time it is old news
            self.ledger.settle(news)
        for rank, reached in enumerate(news):
            passed = max(0, reached - self.progress[rank])
            ended, self.held[rank] = self.held[rank][:passed], self.held[rank][passed:]
            self.progress[rank] += passed
            self.discarded += [p for p in ended if p in self.dropped]
            self.used += [p for p in ended if p not in self.dropped]

    @rule(rank=ranks, more=st.integers(1, 5))
    def progress_beyond_what_a_rank_holds_is_refused(self, rank, more):
        news = [0] * RANKS
        news[rank] = self.progress[rank] + len(self.held[rank]) + more
        with pytest.raises(PacelineError, match=f"Rank {rank} has brought in {news[rank]} samples, more than it was"):
            self.ledger.settle(news)

    @rule(rank=ranks, data=st.data())
    def discard(self, rank, data):
        chosen = data.draw(st.sets(st.sampled_from(self.held[rank]))) if self.held[rank] else set()
        self.ledger.discard(rank, [range(p, p + 1) for p in sorted(chosen)], "not a number")
        self.dropped |= chosen

    @precondition(lambda self: self.used)
    @rule(rank=ranks, data=st.data())
    def a_discard_that_progress_has_overtaken_only_moves_the_numbers(self, rank, data):
        p = data.draw(st.sampled_from(self.used))
        self.ledger.discard(rank, [range(p, p + 1)], "too late")
        self.used.remove(p)
        self.discarded.append(p)

    @rule(rank=ranks, data=st.data())
    def give_back_from_the_tail(self, rank, data):
        kept = data.draw(st.integers(0, len(self.held[rank])))
        tail = self.held[rank][kept:]
        self.ledger.give_back(rank, [range(p, p + 1) for p in tail])
        del self.held[rank][kept:]
        self.dropped -= set(tail)

    @rule(rank=ranks)
    def release(self, rank):
        self.ledger.release(rank)
        self.dropped -= set(self.held[rank])
        self.held[rank] = []

    @rule(rank=ranks, data=st.data())
    def what_a_rank_does_not_hold_it_cannot_give_back(self, rank, data):
        strange = sorted(set(range(17 * 3)) - set(self.held[rank]))
        p = data.draw(st.sampled_from(strange)) if strange else 17 * 3
        with pytest.raises(PacelineError, match="does not hold"):
            self.ledger.give_back(rank, [range(p, p + 1)])

    @invariant()
    def counts_agree(self):
        assert len(self.settled) == len(set(self.settled)) and positions(self.ledger.settled) == self.settled
        assert (self.ledger.used, self.ledger.discarded) == (len(self.used), len(self.discarded))
        assert self.ledger.leased == sum(map(len, self.held))
        assert self.ledger.remaining == 17 * 3 - len(self.settled)
        assert self.ledger.complete == (self.ledger.remaining == 0)

    def teardown(self):
        for rank in range(RANKS):
            self.release(rank)
        while got := self.ledger.lease(0, 9):
            self.used += positions(got)
            self.progress[0] += len(positions(got))
            self.ledger.settle(self.progress[:1])
        self.counts_agree()
        assert self.settled == list(range(17 * 3)) and self.ledger.complete
        assert self.ledger.settled == [range(17 * 3)] and self.ledger.pieces == 1


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
    ledger, progress = Ledger(samples=10, epochs=None, micro_batch=4, workers=2), [0, 0]
    for number in range(3000):
        for rank in (0, 1):
            got = ledger.lease(rank, 2)
            progress[rank] += len(positions(got))
            if number % 7 == 0:
                ledger.discard(rank, got, "not a number")
        ledger.settle(progress)
        assert ledger.pieces <= 2  # all before is settled, all behind is free
    assert ledger.remaining is None and not ledger.complete
    assert ledger.discarded > 5_000 and ledger.used + ledger.discarded == sum(progress) > 30_000


def test_a_slow_rank_costs_an_endless_run_no_memory_but_its_own_leases():
    ledger, progress = Ledger(samples=100, epochs=None, micro_batch=4, workers=2), [0, 0]
    ledger.lease(1, 3)
    for _ in range(2000):
        progress[0] += len(positions(ledger.lease(0, 2)))
        ledger.settle(progress)
        assert ledger.pieces <= 2 + 3


def test_a_checkpoint_is_taken_up():
    ledger = Ledger(samples=10, epochs=2, micro_batch=4, workers=1, used=[range(5), range(8, 9)])
    assert (ledger.used, ledger.remaining) == (6, 14)
    got = [part for _ in range(9) for part in ledger.lease(0, 1)]
    assert positions(got) == [5, 6, 7, *range(9, 20)]
    with pytest.raises(PacelineError, match="has only"):
        Ledger(samples=2, epochs=1, micro_batch=1, workers=1, used=[range(5)])


def test_what_the_peers_of_a_dead_rank_have_applied_stays_used_and_the_rest_goes_out_again():
    ledger = Ledger(samples=16, epochs=1, micro_batch=4, workers=1)
    assert ledger.lease(1, 2) == [range(4), range(4, 8)]
    ledger.settle([0, 4])
    ledger.release(1)
    assert ledger.used == 4 and positions(ledger.lease(0, 9)) == [4, 5, 6, 7, 8, 9, 10, 11]
    ledger.settle([0, 4])  # its peers still tell what it had done
    assert ledger.used == 4


def test_news_that_would_use_a_dead_ranks_samples_twice_is_refused():
    ledger = Ledger(samples=16, epochs=1, micro_batch=4, workers=1)
    ledger.lease(1, 2)
    ledger.settle([0, 4])
    ledger.release(1)
    with pytest.raises(PacelineError, match=r"Rank 1 has brought in 8 samples.*used twice"):
        ledger.settle([0, 8])
    assert ledger.used == 4


def test_progress_may_end_within_a_micro_batch():
    ledger = Ledger(samples=8, epochs=1, micro_batch=4, workers=1)
    ledger.lease(0, 1)
    ledger.settle([3])
    assert (ledger.settled, ledger.leased, ledger.used) == ([range(3)], 1, 3)
    ledger.settle([4])
    assert (ledger.settled, ledger.leased, ledger.used) == ([range(4)], 0, 4)


def test_progress_of_a_rank_that_never_leased_is_refused():
    with pytest.raises(PacelineError, match="Rank 1 has brought in 1 samples, more than it was given"):
        Ledger(samples=8, epochs=1, micro_batch=4, workers=2).settle([0, 1])


def test_discarded_samples_are_settled_when_progress_passes_them_and_never_before():
    ledger = Ledger(samples=8, epochs=1, micro_batch=4, workers=1)
    got = ledger.lease(0, 1)
    ledger.discard(0, got, "not a number")
    assert (ledger.discarded, ledger.leased) == (0, 4)
    ledger.settle([4])
    assert (ledger.discarded, ledger.used, ledger.settled) == (4, 0, [range(4)])


def test_a_discarded_sample_of_a_dead_rank_gets_a_second_chance():
    ledger = Ledger(samples=4, epochs=1, micro_batch=4, workers=1)
    ledger.discard(1, ledger.lease(1, 1), "not a number")
    ledger.release(1)
    assert ledger.lease(0, 1) == [range(4)]
    ledger.settle([4])
    assert (ledger.used, ledger.discarded, ledger.complete) == (4, 0, True)


def test_news_of_a_discard_may_be_overtaken_by_a_peers_news_of_the_progress():
    """They travel on different connections, so no order between them is certain."""
    ledger = Ledger(samples=8, epochs=1, micro_batch=4, workers=1)
    first, second = ledger.lease(0, 1) + ledger.lease(0, 1)
    ledger.settle([4])
    ledger.discard(0, [first, second], "not a number")
    assert (ledger.used, ledger.discarded, ledger.leased) == (0, 4, 4)
    ledger.settle([8])
    assert ledger.counters == {"leased": 0, "used": 0, "discarded": 8, "remaining": 0, "complete": True}


def test_giving_back_keeps_the_order_of_what_is_left():
    ledger = Ledger(samples=100, epochs=1, micro_batch=4, workers=1)
    ledger.lease(0, 4)
    ledger.give_back(0, [range(4, 8), range(14, 16)])
    assert ledger.lease(1, 1) == [range(4, 8)]
    ledger.settle([8])
    assert ledger.settled == [range(4), range(8, 12)]
    ledger.settle([10])
    assert ledger.settled == [range(4), range(8, 14)] and ledger.leased == 4


def test_the_same_range_twice_in_one_call_is_refused():
    ledger = Ledger(samples=8, epochs=1, micro_batch=4, workers=1)
    ledger.lease(0, 1)
    with pytest.raises(PacelineError, match="twice"):
        ledger.discard(0, [range(2), range(1, 3)], "test")


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
