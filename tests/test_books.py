"""What a rank knows of everybody's samples, where ranks step alone."""

from __future__ import annotations

from paceline.backends.books import Books
from paceline.backends.rounds import RoundTotal, extra_of
from paceline.node import Gradient


def meeting(books: Books, others: dict[int, int]) -> None:
    """A mean of models, to which others have told what they had settled since the last."""
    settled, alone, dropped = books.contribute(0, of_models=True)
    extras = [
        extra_of(0, 3, (settled, dropped, 0.0)),
        *(extra_of(rank, 3, (more, 0, 0.0)) for rank, more in others.items()),
    ]
    total = RoundTotal(Gradient(None, 0), 0, None, True, [sum(column) for column in zip(*extras, strict=True)])
    total.settled[0] -= alone
    books.round_applied(total.settled, total)


def test_what_neighbours_say_is_not_counted_again_when_all_meet() -> None:
    books = Books(rank=0, world_size=3, serves=False)
    books.settle(8)
    books.hear(1, 4)
    books.hear(2, 12)
    assert books.progress == [8, 4, 12]
    meeting(books, {1: 8, 2: 12})
    assert books.progress == [8, 8, 12] and books.applied == 28
    books.settle(4)
    meeting(books, {1: 4, 2: 0})
    assert books.progress == [12, 12, 12] and books.applied == 36


def test_what_was_heard_of_a_lost_rank_stays_known() -> None:
    """Others may have heard less of it: what all count with is what it had told when they last met."""
    books = Books(rank=0, world_size=3, serves=False)
    meeting(books, {1: 8, 2: 8})
    books.hear(2, 20)
    books.hear(2, 16)
    meeting(books, {1: 4})
    assert books.progress == [0, 12, 20] and books.applied == 20


def test_a_successor_counts_on_from_where_the_ledger_says_that_its_predecessor_has_ended() -> None:
    """This rank has heard less of it than another one; from now on all have the same."""
    books = Books(rank=0, world_size=3, serves=False)
    meeting(books, {1: 8, 2: 8})
    books.hear(2, 16)
    books.go_on_from({2: 20})
    meeting(books, {1: 4, 2: 6})
    assert books.progress == [0, 12, 26]
    books.make_room(4)
    assert books.progress == [0, 12, 26, 0]
