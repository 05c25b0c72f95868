"""The loader: what it refuses, and that it hands out exactly what it has leased, in that order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.errors import PacelineError
from paceline.rules.order import order
from paceline.run.loader import LeaseSampler, Loader, SharedOrder, balanced_by

NUMBERS = TensorDataset(torch.arange(20))


def loader_of(dataset=NUMBERS, micro_batch=4, epochs=1, seconds=None, seed=0, cost=None, **options):
    return Loader(dataset, micro_batch, epochs, seconds, seed, cost, options)


def begin(loader, next_range, sizes=()):
    """Leases may be taken: in micro-batches of these sizes, then of four."""
    wanted = iter(sizes)
    loader.start(next_range, lambda: next(wanted, 4))


def leases(*parts):
    """A stock that gives these and then nothing."""
    iterator = iter(parts)
    return lambda: next(iterator, None)


def sampler_of(*parts, sizes=()):
    """A sampler of these leases, asked for micro-batches of these sizes, then for those of four."""
    sampler, wanted = LeaseSampler(SharedOrder(0, 20)), iter(sizes)
    sampler.next_range, sampler.at_most = leases(*parts), lambda: next(wanted, 4)
    return sampler


# ---- arguments


def test_a_dataset_shorter_than_a_micro_batch_is_refused():
    with pytest.raises(PacelineError, match="20 samples, fewer than one micro-batch of 21"):
        loader_of(micro_batch=21)
    assert loader_of(micro_batch=20).samples == 20


def test_an_empty_dataset_is_refused():
    with pytest.raises(PacelineError, match="0 samples"):
        loader_of(TensorDataset(torch.empty(0)), micro_batch=1)


def test_an_iterable_dataset_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(20))

    for dataset in (Stream(), iter(range(20))):
        with pytest.raises(PacelineError, match="not map-style"):
            loader_of(dataset)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 8},
        {"shuffle": True},
        {"sampler": range(20)},
        {"batch_sampler": [range(20)]},
        {"drop_last": True},
        {"generator": None},
    ],
)
def test_what_the_loader_decides_itself_is_refused(options):
    with pytest.raises(PacelineError, match=f"The loader decides {next(iter(options))} itself"):
        loader_of(**options)


def test_all_that_is_refused_is_named_at_once():
    with pytest.raises(PacelineError, match="decides batch_size, shuffle itself"):
        loader_of(shuffle=True, batch_size=8)


def test_neither_epochs_nor_seconds_is_refused():
    with pytest.raises(PacelineError, match="Neither epochs nor seconds is given"):
        loader_of(epochs=None)
    assert loader_of(epochs=None, seconds=1.0).epochs is None


@pytest.mark.parametrize(
    "arguments",
    [
        {"micro_batch": 0},
        {"micro_batch": -1},
        {"epochs": 0},
        {"epochs": -1},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments):
    with pytest.raises(PacelineError, match="must be above zero"):
        loader_of(**arguments)


def test_iterating_before_the_optimizer_exists_is_refused(tmp_path):
    with pytest.raises(PacelineError, match=r"before run.optimizer\(...\) was called"):
        iter(loader_of())
    with paceline.Run(out=tmp_path) as run:
        loader = run.loader(NUMBERS, micro_batch=4, epochs=1)
        with pytest.raises(PacelineError, match=r"before run.optimizer\(...\) was called"):
            next(iter(loader))
        with pytest.raises(PacelineError, match="A run has one loader"):
            run.loader(NUMBERS, micro_batch=4, epochs=1)


def test_options_reach_the_data_loader():
    loader = loader_of(collate_fn=lambda rows: [int(number) for (number,) in rows])
    begin(loader, leases(range(3)))
    assert loader.next_batch() == order(0, 0, 20)[:3].tolist()


# ---- the order


def test_every_epoch_has_an_order_of_its_own_that_covers_all():
    shared = SharedOrder(seed=3, samples=20)
    for epoch in (0, 1, 5, 4, 0):
        indices = [
            i for first in range(0, 20, 4) for i in shared.indices(range(epoch * 20 + first, epoch * 20 + first + 4))
        ]
        assert indices == order(3, epoch, 20).tolist()


def test_few_epochs_are_kept():
    shared = SharedOrder(seed=3, samples=4)
    for epoch in range(50):
        shared.indices(range(epoch * 4, epoch * 4 + 2))
        assert len(shared._epochs) <= 2


# ---- leases


def test_the_sampler_remembers_what_it_took_in_order():
    assert list(LeaseSampler(SharedOrder(0, 20))) == []  # before leases may be taken
    sampler = sampler_of(range(4, 8), range(2))
    assert list(sampler) == [order(0, 0, 20)[4:8].tolist(), order(0, 0, 20)[:2].tolist()]
    assert list(sampler.taken) == [range(4, 8), range(2)]


def test_looking_ahead_loses_nothing_and_takes_only_one():
    sampler = sampler_of(range(4), range(4, 8))
    assert sampler.look_ahead() and sampler.look_ahead()
    assert list(sampler) == [order(0, 0, 20)[:4].tolist(), order(0, 0, 20)[4:8].tolist()]
    assert not sampler.look_ahead()


def test_what_was_taken_and_never_handed_out_is_left_over_once():
    sampler = sampler_of(range(4), range(4, 8), range(8, 12))
    iterator = iter(sampler)
    next(iterator), next(iterator)
    sampler.look_ahead()
    assert sampler.left_over() == [range(4), range(4, 8), range(8, 12)] and sampler.left_over() == []


# ---- smaller micro-batches


def test_what_is_left_of_a_lease_is_joined_with_the_one_that_follows():
    sampler = sampler_of(range(8, 15), range(15, 18), range(4), sizes=[3, 3, 3, 2, 5, 4])
    batches, pieces = list(sampler), [range(8, 11), range(11, 14), range(14, 17), range(17, 18), range(4)]
    assert list(sampler.taken) == pieces, "another lease does not follow"
    assert batches == [order(0, 0, 20)[piece.start : piece.stop].tolist() for piece in pieces]


def test_leases_of_two_epochs_are_not_joined_nor_is_the_next_one_taken_early():
    sampler = sampler_of(range(16, 20), range(20, 24), sizes=[3, 3, 3])
    iterator = iter(sampler)
    next(iterator), next(iterator)
    assert list(sampler.taken) == [range(16, 19), range(19, 20)]
    assert sampler.next_range() == range(20, 24), "it is still free"


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
    st.lists(st.integers(1, 12), min_size=54, max_size=54),
)
def test_whatever_the_sizes_every_position_is_taken_once_and_in_order(lengths, sizes):
    """Some leases follow each other, between others positions went to another rank."""
    parts, end = list[range](), 0
    for length, follows in lengths:
        parts.append(range(end + (not follows), end + (not follows) + length))
        end = parts[-1].stop
    sampler, wanted = LeaseSampler(SharedOrder(0, end)), iter(sizes)
    sampler.next_range, sampler.at_most = leases(*parts), lambda: next(wanted)
    batches, pieces = list(sampler), list(sampler.taken)
    starts, stops = ({getattr(part, edge) for part in parts} for edge in ("start", "stop"))
    for batch, piece, size in zip(batches, pieces, sizes, strict=False):
        assert len(batch) == len(piece) <= size
        assert len(piece) == size or piece.stop in stops - starts, "shorter only where no lease follows"
    assert [position for piece in pieces for position in piece] == [each for part in parts for each in part]


def test_the_rest_of_a_cut_lease_is_left_over_too():
    loader = loader_of()
    begin(loader, leases(range(4), range(4, 8)), sizes=[3, 1, 1])
    for _ in range(3):
        loader.next_batch()
    assert loader.take_pending() == [range(3), range(3, 4), range(4, 5)]
    assert loader.left_over() == [range(5, 8)] and loader.left_over() == []


def test_pieces_come_with_their_positions_from_worker_processes_too():
    loader = loader_of(num_workers=2)
    begin(loader, leases(range(4), range(4, 8)), sizes=[3, 1, 1, 1, 2])
    batches = []
    while (batch := loader.next_batch()) is not None:
        batches.append(batch[0].tolist())
    taken = loader.take_pending()
    assert taken == [range(3), range(3, 4), range(4, 5), range(5, 6), range(6, 8)]
    assert batches == [order(0, 0, 20)[part.start : part.stop].tolist() for part in taken]


# ---- batches


def test_batches_come_with_their_positions():
    loader = loader_of(epochs=2)
    begin(loader, leases(range(4), range(24, 27)))
    assert loader.next_batch()[0].tolist() == order(0, 0, 20)[:4].tolist() and loader.epoch == 0
    assert loader.take_pending() == [range(4)] and loader.take_pending() == []
    assert loader.next_batch()[0].tolist() == order(0, 1, 20)[4:7].tolist() and loader.epoch == 1
    assert loader.take_pending() == [range(24, 27)]
    assert loader.next_batch() is None and loader.next_batch() is None and not loader.has_pending


def test_the_newest_may_stay_pending():
    loader = loader_of()
    begin(loader, leases(range(4), range(4, 8), range(8, 12)))
    assert loader.take_pending(keep_newest=True) == []
    for _ in range(3):
        loader.next_batch()
    assert loader.take_pending(keep_newest=True) == [range(4), range(4, 8)] and loader.has_pending
    assert loader.take_pending(keep_newest=True) == []
    assert loader.take_pending() == [range(8, 12)] and not loader.has_pending


def test_asking_again_finds_what_others_gave_back():
    loader, free = loader_of(), []
    begin(loader, lambda: free.pop(0) if free else None)
    assert loader.next_batch() is None
    free.append(range(8, 12))
    assert loader.next_batch()[0].tolist() == order(0, 0, 20)[8:12].tolist()
    assert loader.next_batch() is None
    free.append(range(12, 16))
    assert loader.next_batch() is not None and loader.take_pending() == [range(8, 12), range(12, 16)]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_fetched_ahead_is_left_over_in_the_order_of_leasing(workers):
    parts = [range(first, first + 4) for first in range(0, 20, 4)]
    loader = loader_of(num_workers=workers)
    begin(loader, leases(*parts))
    for number in range(2):
        assert loader.next_batch()[0].tolist() == order(0, 0, 20)[4 * number : 4 * number + 4].tolist()
    left_over = loader.left_over()
    assert loader.take_pending() == parts[:2] and left_over == parts[2 : 2 + len(left_over)]
    assert bool(left_over) == bool(workers)


def test_nothing_new_is_taken_after_the_time_is_over(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("paceline.run.loader.time.perf_counter", lambda: clock[0])
    loader = loader_of(epochs=None, seconds=5.0)
    begin(loader, leases(range(4), range(4, 8), range(8, 12)))
    clock[0] = 104.9
    assert loader.next_batch() is not None
    clock[0] = 105.0
    assert loader.next_batch() is None


def test_what_came_back_while_fetched_batches_were_used_is_found_before_none_is_said():
    loader = loader_of(TensorDataset(torch.arange(16)))
    answers = iter([range(4), None, range(4, 8), None, None])  # the first None ends the DataLoader's own asking
    begin(loader, lambda: next(answers))
    assert loader.next_batch() is not None
    assert loader.next_batch() is not None, "leases came back after the DataLoader had stopped asking"
    assert loader.next_batch() is None


# ---- samples that do not cost the same


def fair_sampler(costs, parts, most=8):
    sampler = LeaseSampler(SharedOrder(0, len(costs)), np.asarray(costs, dtype=float))
    sampler.next_range, sampler.at_most = leases(*parts), lambda: most
    return sampler


def grid(samples, micro_batch):
    return [range(first, min(first + micro_batch, samples)) for first in range(0, samples, micro_batch)]


def test_micro_batches_of_equal_cost_go_over_the_ends_of_leases():
    costs = np.ones(32)
    costs[order(0, 0, 32)[:8]] = 4.0  # those of the first lease
    sampler = fair_sampler(costs, grid(32, 8))
    batches = list(sampler)
    spent = [costs[batch].sum() for batch in batches]
    assert sum(spent) == 56 and all(8 <= each <= 12 for each in spent[:4]), spent
    assert [position for piece in sampler.taken for position in piece] == list(range(32))


@given(
    costs=st.lists(st.floats(0.0, 50.0), min_size=1, max_size=60).filter(any),
    micro_batch=st.integers(1, 9),
    most=st.integers(1, 9),
    holes=st.sets(st.integers(0, 59)),
    epoch=st.integers(0, 2),
)
def test_whatever_the_costs_every_leased_position_is_taken_once_and_in_order(costs, micro_batch, most, holes, epoch):
    begins = len(costs) * epoch
    parts = [
        range(begins + part.start, begins + part.stop)
        for number, part in enumerate(grid(len(costs), micro_batch))
        if number not in holes  # other ranks have those
    ]
    sampler = fair_sampler(costs, parts, most)
    batches, pieces = list(sampler), list(sampler.taken)
    assert [position for piece in pieces for position in piece] == [position for part in parts for position in part]
    assert all(1 <= len(batch) <= most for batch in batches)
    shuffled = order(0, epoch, len(costs))
    assert batches == [shuffled[[position - begins for position in piece]].tolist() for piece in pieces]


def test_leases_of_two_epochs_are_not_joined():
    sampler = fair_sampler(np.ones(6), [range(4, 6), range(6, 8)])
    assert [len(batch) for batch in sampler] == [2, 2]
    assert list(sampler.taken) == [range(4, 6), range(6, 8)]


def test_a_lease_that_was_taken_to_be_joined_is_left_over_too():
    sampler = fair_sampler(np.ones(40), [range(8), range(24, 32), range(32, 40)])
    iterator = iter(sampler)
    next(iterator)
    left = sampler.left_over()
    assert sorted(position for part in left for position in part) == [*range(8), *range(24, 32)]
    assert sampler.left_over() == []


@pytest.mark.parametrize(
    "cost", [[1.0] * 19, [1.0] * 19 + [-1.0], [1.0] * 19 + [float("nan")], [0] * 20, "x", [[1.0] * 20]]
)
def test_costs_that_make_no_sense_are_refused(cost):
    with pytest.raises(PacelineError, match=r"costs of the samples cannot be used.*20 samples.*one number for each"):
        loader_of(cost=cost)


def test_costs_may_be_a_tensor():
    loader = loader_of(cost=torch.arange(20))
    begin(loader, leases(range(20)))
    assert loader.next_batch() is not None


class SparseRows(TensorDataset):
    nonzeros = torch.arange(20)


def test_balance_by_nonzeros_is_a_cost_that_the_dataset_knows():
    dataset = SparseRows(torch.arange(20))
    assert balanced_by("nonzeros", None, dataset) is SparseRows.nonzeros
    assert balanced_by("samples", None, dataset) is None and balanced_by("samples", [1.0], dataset) == [1.0]


def test_what_a_row_costs_besides_its_nonzeros_counts():
    dataset = SparseRows(torch.arange(20))
    dataset.row_cost = 100.0
    found = balanced_by("nonzeros", None, dataset)
    assert torch.equal(torch.as_tensor(found), torch.arange(20) + 100.0)


@pytest.mark.parametrize(
    ("balance", "cost", "dataset", "complaint"),
    [
        ("nonzeros", None, NUMBERS, "does not say how many a sample has.*has `nonzeros`"),
        ("nonzeros", [1.0] * 20, SparseRows(torch.arange(20)), "Costs are given as well.*either one"),
        ("nonzero", None, NUMBERS, "no balance 'nonzero'. Did you mean 'nonzeros'"),
    ],
)
def test_a_balance_that_makes_no_sense_is_refused(balance, cost, dataset, complaint):
    with pytest.raises(PacelineError, match=complaint):
        balanced_by(balance, cost, dataset)
