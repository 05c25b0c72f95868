"""A model on flat memory: what is taken, what travels, what is applied; number by number."""

from __future__ import annotations

import math

import pytest
import torch
from pytest import approx
from torch import nn

from paceline.backends.flat import Brought, FlatSum, FreshGradient, in_shape
from paceline.backends.replica import TRAILER, Replica
from paceline.errors import PacelineError
from paceline.node import Gradient
from paceline.rules.noise import estimate


class Two(nn.Module):
    """Two parameters whose gradients are what the test says."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.matrix = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype))
        self.vector = nn.Parameter(torch.tensor([5.0, 6.0, 7.0], dtype=dtype))


def replica_of(model, rate=1.0, **options):
    return Replica(model, torch.optim.SGD(model.parameters(), lr=rate), **options)


def leave(model, matrix=None, vector=None):
    """What a backward pass would leave."""
    for parameter, value in ((model.matrix, matrix), (model.vector, vector)):
        parameter.grad = None if value is None else torch.full_like(parameter, value)


def taken(replica, count, matrix=None, vector=None):
    leave(replica.model, matrix, vector)
    return replica.take_gradients(count, [range(count)])


def added_up(replica, *gradients):
    """What an all-reduce of these ranks' contributions brings."""
    contributions = [replica.contribution(gradient, working=True)[0] for gradient in gradients]
    for other in contributions[1:]:
        contributions[0].whole.add_(other.whole)
    return replica.total(contributions[0])


# ---- flat memory


def test_flat_parameters_share_the_memory_of_the_models():
    model = Two()
    parameters = list(model.parameters())
    replica = replica_of(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)), "they keep their identity"
    assert replica.parameters.tolist() == [1, 2, 3, 4, 5, 6, 7] and replica.size == 7
    replica.parameters[3] = 9.0
    model.vector.data[0] = -1.0
    assert model.matrix[1, 1] == 9.0 and replica.parameters[4] == -1.0


def test_only_what_the_optimizer_moves_is_flat():
    model = Two()
    replica = Replica(model, torch.optim.SGD([model.vector], lr=1.0))
    assert replica.parameters.tolist() == [5, 6, 7] and replica.describe() == [["vector", [3], "float32", [1]]]
    frozen = Two()
    frozen.matrix.requires_grad_(False)
    assert replica_of(frozen).names == ["vector"]


def test_the_description_names_shapes_and_dtypes():
    described = replica_of(Two(torch.bfloat16)).describe()
    assert described == [["matrix", [2, 2], "bfloat16", [2, 1]], ["vector", [3], "bfloat16", [1]]]


def test_a_memory_format_stays_and_changes_no_number():
    """channels_last is what makes convolutions fast: a replica must not undo it."""

    def trained(memory_format):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=memory_format)
        replica, x = replica_of(model), torch.randn(5, 3, 8, 8)
        for _ in range(3):
            model(x).square().mean().backward()
            replica.apply(replica.take_gradients(5, [range(5)]))
        return model, replica

    plain, last = trained(torch.contiguous_format), trained(torch.channels_last)
    assert all(
        model[0].weight.is_contiguous(memory_format=form)
        for (model, _), form in ((plain, torch.contiguous_format), (last, torch.channels_last))
    )
    first = last[0][0].weight
    assert first.data_ptr() == last[1].parameters.data_ptr(), "it still lies in the buffer"
    for one, other in zip(plain[0].parameters(), last[0].parameters(), strict=True):
        torch.testing.assert_close(one, other)
    views = in_shape(last[1].parameters, list(last[0].parameters()))
    assert all(torch.equal(view, p) for view, p in zip(views, last[0].parameters(), strict=True))
    assert last[1].describe()[0][3] != plain[1].describe()[0][3], "ranks that lay them out differently must not add up"


def test_tied_parameters_lie_in_the_buffer_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    replica = replica_of(model)
    assert replica.size == 4 and model[1].weight.data_ptr() == replica.parameters.data_ptr()


def test_parameters_that_are_not_the_models_are_refused():
    model = Two()
    with pytest.raises(PacelineError, match=r"2 parameter\(s\) that are not the model's"):
        Replica(model, torch.optim.SGD(Two().parameters(), lr=1.0))
    with pytest.raises(PacelineError, match=r"1 parameter\(s\) that are not the model's"):
        Replica(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=1.0))


def test_an_optimizer_with_nothing_to_train_is_refused():
    model = Two().requires_grad_(False)
    with pytest.raises(PacelineError, match="no parameter of the model that requires a gradient"):
        replica_of(model)


def test_mixed_dtypes_are_refused():
    model = Two()
    model.vector = nn.Parameter(model.vector.data.bfloat16())
    with pytest.raises(PacelineError, match=r"different kinds: torch.bfloat16 on cpu, torch.float32 on cpu"):
        replica_of(model)


# ---- a micro-batch


def test_taking_gradients_empties_them_and_copies_nothing():
    model = Two()
    replica = replica_of(model)
    leave(model, 1.0, 2.0)
    left = model.matrix.grad
    gradient = replica.take_gradients(4, [range(4)])
    assert model.matrix.grad is None and model.vector.grad is None
    assert gradient.values.parts[0] is left and (gradient.count, gradient.samples) == (4, [range(4)])


def test_a_backward_pass_since_the_mark_is_seen():
    model = Two()
    replica = replica_of(model)
    mark = replica.gradients_mark()
    assert not replica.written_since(mark)
    model.matrix.sum().backward()
    first = replica.gradients_mark()
    assert replica.written_since(mark) and not replica.written_since(first)
    model.matrix.sum().backward()  # adds to the gradient that is there
    second = replica.gradients_mark()
    assert replica.written_since(first)
    model.vector.sum().backward()
    assert replica.written_since(second)
    third = replica.gradients_mark()
    replica.drop_gradients()
    model.matrix.sum().backward()
    model.vector.sum().backward()
    assert replica.written_since(third)


def test_what_the_model_was_used_for_before_is_forgotten():
    model = Two()
    leave(model, 1.0, 1.0)
    assert replica_of(model).gradients_mark() == [] and model.matrix.grad is None


def test_a_contribution_is_the_sum_over_the_samples_and_their_count():
    replica = replica_of(Two(), extra=2)
    flat, sound = replica.contribution(taken(replica, 3, 1.5, -2.0), working=True, extra=[8.0, 0.5])
    assert sound and flat.sums.tolist() == [4.5] * 4 + [-6.0] * 3
    squared_norm = 4 * 4.5**2 + 3 * 6.0**2
    assert flat.trailer.tolist() == [3.0, 1.0, approx(squared_norm), 9.0, 3.0, 8.0, 0.5] and len(flat.whole) == 7 + 7
    together, working, extra = replica.total(flat)
    assert (together.count, working, extra) == (3, True, [8.0, 0.5])


def test_a_sum_of_micro_batches_weighs_each_by_its_count():
    replica = replica_of(Two())
    batch = taken(replica, 2, 1.0, 10.0)
    batch += taken(replica, 3, 2.0, 20.0)
    batch += taken(replica, 1, 0.5, None)
    assert isinstance(batch.values, FlatSum) and batch.count == 6
    assert batch.values.sums.tolist() == [2.0 + 6.0 + 0.5] * 4 + [20.0 + 60.0] * 3


def test_two_sums_add_up():
    replica = replica_of(Two())
    one, other = taken(replica, 1, 1.0, 1.0), taken(replica, 2, 4.0, 0.25)
    one += taken(replica, 1, 2.0, 3.0)
    other += taken(replica, 1, 1.0, 1.0)
    one += other
    assert one.values.sums.tolist() == [12.0] * 4 + [5.5] * 3 and one.count == 5


def test_unused_parameters_count_zero_even_in_used_memory():
    model = Two()
    replica = replica_of(model)
    replica.apply(added_up(replica, taken(replica, 1, 100.0, 100.0))[0])  # its memory comes again
    before = replica.parameters.clone()
    replica.apply(added_up(replica, taken(replica, 2, 1.0, None))[0])
    assert (before - replica.parameters).tolist() == [1.0] * 4 + [0.0] * 3
    replica.apply(added_up(replica, taken(replica, 1, None, 1.0), taken(replica, 3, None, None))[0])
    assert (before - replica.parameters).tolist() == [1.0] * 4 + [0.25] * 3


def test_sparse_gradients_of_an_embedding_become_dense():
    model = nn.Embedding(4, 2, sparse=True)
    replica = replica_of(model)
    model(torch.tensor([1, 3, 1])).sum().backward()
    assert model.weight.grad.is_sparse
    gradient = replica.take_gradients(3, [range(3)])
    flat, sound = replica.contribution(gradient, working=True)
    assert sound and flat.views[0].tolist() == [[0, 0], [6, 6], [0, 0], [3, 3]]
    before = model.weight.detach().clone()
    replica.apply(replica.total(flat)[0])
    assert torch.allclose(before - model.weight.detach(), torch.tensor([[0.0, 0], [2, 2], [0, 0], [1, 1]]))


def test_sparse_gradients_are_added_up_without_becoming_dense_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sparse, dense = nn.Embedding(50, 3, sparse=True), nn.Embedding(50, 3)
    dense.load_state_dict(sparse.state_dict())
    weights, totals = torch.randn(4, 6, 3), []
    for model in (sparse, dense):
        replica, sums = replica_of(model), None
        for part in range(4):
            indices = torch.tensor([1, 49, 1, part, 7, 7])  # rows that come twice, and some that no other part has
            (model(indices) * weights[part]).sum().backward()
            if part == 2:  # a second pass over the same micro-batch adds to the first
                (model(indices[:3]) * weights[part, :3]).sum().backward()
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "to_dense", None)
                fresh = replica.take_gradients(part + 1, [range(part + 1)])
                sums = fresh if sums is None else sums
                if part:
                    sums += fresh
            assert model.weight.grad is None
        flat, sound = replica.contribution(sums, working=True)
        assert sound
        totals.append(flat.sums.clone())
        replica.apply(replica.total(flat)[0])
    assert torch.allclose(*totals, rtol=1e-6, atol=1e-6) and torch.allclose(sparse.weight, dense.weight)
    assert torch.equal(totals[0].view(50, 3)[10:40], torch.zeros(30, 3))


def test_sparse_gradients_in_used_memory_leave_nothing_of_before():
    model = nn.Embedding(4, 1, sparse=True)
    replica = replica_of(model)
    for row in (0, 3):
        model(torch.tensor([row])).sum().backward()
        flat, _ = replica.contribution(replica.take_gradients(2, [range(2)]), working=True)
        assert flat.sums.tolist() == [2.0 * (each == row) for each in range(4)]
        replica.apply(replica.total(flat)[0])


def test_sparse_gradients_in_half_precision_are_added_up_in_full():
    model = nn.Embedding(4, 2, sparse=True).bfloat16()
    replica = replica_of(model)
    gradients = []
    for _ in range(2):
        model(torch.tensor([1, 3, 1])).sum().backward()
        gradients.append(replica.take_gradients(100, [range(100)]))
    gradients[0] += gradients[1]
    assert gradients[0].values.views[0].tolist() == [[0, 0], [400, 400], [0, 0], [200, 200]]
    assert gradients[0].values.sums.dtype == torch.float32


def test_a_second_backward_pass_is_noticed_with_sparse_gradients_too():
    model = nn.Embedding(4, 2, sparse=True)
    replica = replica_of(model)
    before = replica.gradients_mark()
    model(torch.tensor([1])).sum().backward()
    assert replica.written_since(before)
    mark = replica.gradients_mark()
    assert not replica.written_since(mark)
    model(torch.tensor([2])).sum().backward()
    assert replica.written_since(mark)


def test_what_sparse_gradients_cost_is_told():
    model = nn.Sequential(nn.Embedding(100, 3, sparse=True), nn.Linear(3, 2))
    replica, told = replica_of(model), []
    replica.on_sparse = lambda *sizes: told.append(sizes)
    model(torch.tensor([1])).sum().backward()
    replica.contribution(replica.take_gradients(1, [range(1)]), working=True)
    assert told == [(1200, 1232)]


def test_an_optimizer_for_sparse_gradients_alone_is_refused():
    model = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(PacelineError, match=r"SparseAdam takes sparse gradients alone.*Take SGD, Adam or AdamW"):
        Replica(model, torch.optim.SparseAdam(model.parameters()))


# ---- a round


def test_the_mean_of_two_contributions_is_exact():
    model = Two()
    replica = replica_of(model)
    total, working, extra = added_up(replica, taken(replica, 3, 1.0, 2.0), taken(replica, 1, 5.0, -2.0))
    assert (total.count, working, extra) == (4, True, [])
    before = replica.parameters.clone()
    replica.apply(total)
    assert (before - replica.parameters).tolist() == [2.0] * 4 + [1.0] * 3
    assert model.matrix.grad is None and model.vector.grad is None


def test_a_step_equals_the_one_over_the_whole_batch():
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    model, plain = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    replica = Replica(model, torch.optim.Adam(model.parameters(), lr=0.1))
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(3):
        parts = []
        for part in (slice(0, 2), slice(2, 7), slice(7, 12)):
            nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            parts.append(replica.take_gradients(part.stop - part.start, []))
        parts[0] += parts.pop()
        replica.apply(added_up(replica, *parts)[0])
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_clipping_comes_after_the_aggregation():
    """Two ranks pull in opposite directions: clipped one by one their mean would be another."""
    model = Two()
    replica = replica_of(model, clip_norm=1.0)
    before = replica.parameters.clone()
    total, _, _ = added_up(replica, taken(replica, 1, 100.0, 0.0), taken(replica, 1, -98.0, 0.0))
    replica.apply(total)  # the mean is 1 in four places: a norm of 2
    torch.testing.assert_close(before - replica.parameters, torch.tensor([0.5] * 4 + [0.0] * 3), rtol=1e-5, atol=0)


def test_a_gradient_below_the_norm_is_not_stretched():
    replica = replica_of(Two(), clip_norm=100.0)
    before = replica.parameters.clone()
    replica.apply(added_up(replica, taken(replica, 2, 1.0, 0.5))[0])
    assert (before - replica.parameters).tolist() == [1.0] * 4 + [0.5] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_contribution_is_replaced_by_an_empty_one(bad):
    model = Two()
    replica = replica_of(model, extra=1)
    gradient = taken(replica, 3, 1.0, bad)
    gradient += taken(replica, 2, 1.0, 1.0)
    flat, sound = replica.contribution(gradient, working=True, extra=[7.0])
    assert not sound and not flat.sums.any()
    assert flat.trailer.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 7.0], "the rest of the news still travels"


def test_infinities_that_cancel_are_found_too():
    model = Two()
    replica = replica_of(model)
    model.matrix.grad = torch.tensor([[math.inf, -math.inf], [0.0, 0.0]])
    assert not replica.contribution(replica.take_gradients(1, []), working=True)[1]


def test_an_unsound_contribution_changes_nobodys_mean():
    replica = replica_of(Two())
    total, _, _ = added_up(replica, taken(replica, 2, 1.0, 2.0), taken(replica, 5, math.nan, 1.0))
    before = replica.parameters.clone()
    assert total.count == 2
    replica.apply(total)
    assert (before - replica.parameters).tolist() == [1.0] * 4 + [2.0] * 3


def test_a_round_of_empty_contributions_makes_no_step():
    model = Two()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1))
    before = replica.parameters.clone()
    flat, sound = replica.contribution(Gradient(None, 0), working=False)
    total, working, _ = replica.total(flat)
    assert sound and not working and total.count == 0
    replica.apply(total)
    replica.apply(Gradient(None, 0))
    assert torch.equal(before, replica.parameters) and not replica.optimizer.state


def test_an_empty_contribution_in_used_memory_is_empty():
    replica = replica_of(Two())
    replica.apply(added_up(replica, taken(replica, 1, 100.0, 100.0))[0])
    flat, _ = replica.contribution(Gradient(None, 0), working=False)
    assert not flat.whole.any()


def test_somebody_working_is_enough():
    replica = replica_of(Two())
    done, busy = (replica.contribution(Gradient(None, 0), working=working)[0] for working in (False, True))
    done.whole.add_(busy.whole)
    assert replica.total(done)[1]


def test_a_bfloat16_model_sums_in_float32():
    model = Two(torch.bfloat16)
    replica = replica_of(model, rate=0.0)
    batch = taken(replica, 257, 1.0, 1.0)  # bfloat16 has no 257
    batch += taken(replica, 1, 1.0, 1.0)
    flat, sound = replica.contribution(batch, working=True)
    assert sound and flat.whole.dtype == torch.float32
    assert flat.sums.tolist() == [258.0] * 7
    assert flat.trailer.tolist() == [258.0, 1.0, approx(7 * 258.0**2), 258.0**2, 258.0]
    assert replica.total(flat)[0].count == 258


def test_a_bfloat16_model_gets_gradients_of_its_own_dtype():
    model = Two(torch.bfloat16)
    replica = replica_of(model)
    replica.apply(added_up(replica, taken(replica, 3, 1.0, 0.5), taken(replica, 1, 1.0, 0.5))[0])
    assert replica.parameters.dtype == torch.bfloat16
    assert replica.parameters.tolist() == [0, 1, 2, 3, 4.5, 5.5, 6.5]


def test_a_double_model_sums_in_double():
    assert replica_of(Two(torch.float64)).buffer().whole.dtype == torch.float64


def test_memory_comes_back_after_the_step():
    replica = replica_of(Two())
    seen = set()
    for _ in range(10):
        batch = taken(replica, 1, 1.0, 1.0)
        batch += taken(replica, 1, 1.0, 1.0)
        flat, _ = replica.contribution(batch, working=True)
        total, _, _ = replica.total(flat)
        seen.add(flat.whole.data_ptr())
        replica.apply(total)
        assert total.values is None
    assert len(seen) == 1


@pytest.mark.parametrize("others", [False, True])
def test_memory_comes_back_once(others):
    """After the step, or, if another rank may need the result until then, when nobody does any more."""
    replica = replica_of(Two())
    contribution, _ = replica.contribution(taken(replica, 1, 1.0, 1.0), working=True)
    brought = Brought(contribution, replica, others, works=lambda: True)
    brought.is_there()
    replica.apply(replica.total(contribution)[0])
    brought.let_go()
    assert replica.buffer() is contribution
    assert replica.buffer() is not contribution


def test_a_round_in_flight_and_one_in_the_making_have_memory_of_their_own():
    replica = replica_of(Two())
    seen, in_flight = set(), None
    for number in range(10):
        flat, _ = replica.contribution(taken(replica, 1, float(number), 0.0), working=True)
        if in_flight is not None:
            assert in_flight.sums[0] == number - 1
            replica.apply(replica.total(in_flight)[0])
        in_flight = flat
        seen.add(flat.whole.data_ptr())
    assert len(seen) == 2


def test_memory_of_a_round_without_samples_comes_back_too():
    replica = replica_of(Two())
    first, _ = replica.contribution(Gradient(None, 0), working=True)
    replica.apply(replica.total(first)[0])
    assert replica.contribution(Gradient(None, 0), working=True)[0] is first


def test_a_gradient_that_never_travelled_can_be_applied():
    replica = replica_of(Two())
    before = replica.parameters.clone()
    gradient = taken(replica, 4, 1.0, 2.0)
    assert isinstance(gradient.values, FreshGradient)
    replica.apply(gradient)
    assert (before - replica.parameters).tolist() == [1.0] * 4 + [2.0] * 3


# ---- the model itself travels


def test_the_mean_of_the_models_weighs_by_samples():
    replica = replica_of(Two())
    own = Gradient(replica.model_contribution(3), 3, [range(3)])
    flat, sound = replica.contribution(own, working=True)
    assert sound and flat.sums.tolist() == [3 * value for value in range(1, 8)] and flat.trailer[0] == 3
    flat.sums += torch.tensor([1.0] * 4 + [-7.0] * 3)  # of a rank with one sample
    flat.trailer[[0, TRAILER - 1]] += 1
    replica.adopt(replica.total(flat)[0])
    assert replica.parameters.tolist() == [1.0, 1.75, 2.5, 3.25, 2.0, 2.75, 3.5]
    assert not replica.optimizer.state, "that is no step"


def test_a_model_weighs_what_was_said_whatever_its_samples():
    replica = replica_of(Two())
    flat, _ = replica.contribution(Gradient(replica.model_contribution(0.25), 12, [range(12)]), working=True)
    assert flat.sums.tolist() == [0.25 * value for value in range(1, 8)]
    assert flat.trailer[0] == 12 and flat.trailer[TRAILER - 1] == 0.25
    flat.sums += torch.tensor([0.75 * 9.0] * 7)  # of a rank that weighs three times as much
    flat.trailer[TRAILER - 1] += 0.75
    replica.adopt(replica.total(flat)[0])
    assert replica.parameters.tolist() == [0.25 * value + 0.75 * 9.0 for value in range(1, 8)]


def test_a_model_that_is_not_finite_weighs_nothing():
    replica = replica_of(Two())
    replica.parameters[3] = math.nan
    flat, sound = replica.contribution(Gradient(replica.model_contribution(0.25), 12, [range(12)]), working=True)
    assert not sound and flat.trailer[0] == 0 and flat.trailer[TRAILER - 1] == 0
    flat.sums += torch.tensor([0.75 * 9.0] * 7)
    flat.trailer[TRAILER - 1] += 0.75
    replica.adopt(replica.total(flat)[0])
    assert replica.parameters.tolist() == [9.0] * 7, "the mean of those that are"


def test_the_weight_of_a_model_does_not_outlive_its_memory():
    replica = replica_of(Two())
    flat, _ = replica.contribution(Gradient(replica.model_contribution(0.25), 12, [range(12)]), working=True)
    replica.adopt(replica.total(flat)[0])
    again, _ = replica.contribution(taken(replica, 3, 1.0, 1.0), working=True)
    assert again is flat and again.trailer[TRAILER - 1] == 3


def test_adopting_nobodys_model_changes_nothing():
    replica = replica_of(Two())
    flat, _ = replica.contribution(Gradient(None, 0), working=True)
    replica.adopt(replica.total(flat)[0])
    assert replica.parameters.tolist() == [1, 2, 3, 4, 5, 6, 7] and replica.buffer() is flat


def test_models_tell_no_noise():
    replica = replica_of(Two())
    own, other = (Gradient(replica.model_contribution(2), 2) for _ in range(2))
    replica.adopt(added_up(replica, own, other)[0])
    assert replica.noise.value is None


def test_a_model_in_half_precision_is_averaged_in_full():
    model = Two(torch.bfloat16)
    replica = replica_of(model)
    model.vector.data.fill_(1.0)
    flat, _ = replica.contribution(Gradient(replica.model_contribution(257), 257), working=True)
    assert flat.whole.dtype == torch.float32 and flat.sums[4:].tolist() == [257.0] * 3
    replica.adopt(replica.total(flat)[0])
    assert replica.parameters.tolist() == [1, 2, 3, 4, 1, 1, 1]


# ---- what is not used


def test_memory_of_what_is_not_used_comes_back():
    replica = replica_of(Two())
    batch = taken(replica, 1, 1.0, 1.0)
    batch += taken(replica, 1, 1.0, 1.0)
    flat = batch.values
    replica.release(batch)
    assert batch.values is None and replica.buffer() is flat
    replica.release(taken(replica, 1, 1.0, 1.0))  # never took any
    replica.release(Gradient(None, 0))
    assert replica.buffer() is not flat


# ---- the noise


def test_a_rounds_total_tells_the_noise():
    """Sums of one and of three samples: all that is needed travels in the trailer."""
    replica = replica_of(Two(torch.float64))
    total, _, _ = added_up(replica, taken(replica, 1, 1.0, 0.0), taken(replica, 3, 2.0, 1.0))
    norm = replica.apply(total)
    squares, of_the_sum = 1.0 * 4 + (6.0**2 * 4 + 3.0**2 * 3), 7.0**2 * 4 + 3.0**2 * 3
    assert norm == approx(math.sqrt(of_the_sum) / 4)
    squared_norm, variance = estimate(4, of_the_sum, squares, 1 + 9)
    assert (replica.noise.squared_norm, replica.noise.variance) == (approx(squared_norm), approx(variance))


def test_what_came_from_one_rank_alone_tells_no_noise():
    replica = replica_of(Two())
    replica.apply(added_up(replica, taken(replica, 4, 1.0, 2.0), Gradient(None, 0))[0])
    replica.apply(taken(replica, 4, 1.0, 2.0))  # a local step
    assert replica.noise.value is None


def test_the_noise_of_many_rounds_is_found():
    """Per-sample gradients of mean 1 and variance 3 in each of seven places, in rounds of 2 and 6 samples."""
    replica = replica_of(Two(torch.float64), rate=0.0)
    chance = torch.Generator().manual_seed(0)
    for _ in range(600):
        parts = []
        for count in (2, 6):
            noise = torch.randn(count, 7, generator=chance, dtype=torch.float64).mul(math.sqrt(3)).add(1).mean(0)
            leave(replica.model, 0.0, 0.0)
            replica.model.matrix.grad += noise[:4].view(2, 2)
            replica.model.vector.grad += noise[4:]
            parts.append(replica.take_gradients(count, []))
        replica.apply(added_up(replica, *parts)[0])
    assert replica.noise.squared_norm == approx(7, rel=0.4) and replica.noise.variance == approx(21, rel=0.4)
    assert replica.noise.value == approx(3, rel=0.4)


def test_two_totals_add_up_to_the_noise_of_both():
    replica = replica_of(Two(torch.float64))
    one, _, _ = added_up(replica, taken(replica, 1, 1.0, 0.0), taken(replica, 2, 2.0, 1.0))
    other, _, _ = added_up(replica, taken(replica, 3, 4.0, 0.5), taken(replica, 1, -1.0, 0.0))
    one += other
    before = replica.parameters.clone()
    replica.apply(one)
    sums = torch.tensor([[1.0, 0.0], [4.0, 2.0], [12.0, 1.5], [-1.0, 0.0]])
    places = torch.tensor([4.0, 3.0])
    squares, of_the_sum = float((sums**2 @ places).sum()), float(sums.sum(0) ** 2 @ places)
    squared_norm, variance = estimate(7, of_the_sum, squares, 1 + 4 + 9 + 1)
    assert (replica.noise.squared_norm, replica.noise.variance) == (approx(squared_norm), approx(variance))
    assert (before - replica.parameters).tolist() == [approx(16 / 7)] * 4 + [approx(0.5)] * 3


def test_gradients_too_large_for_their_square_tell_no_noise_and_are_still_used():
    replica = replica_of(Two(torch.float64))
    total, _, _ = added_up(replica, taken(replica, 1, 1e19, 0.0), taken(replica, 1, 1e19, 0.0))
    assert replica.apply(total) == approx(2e19) and replica.noise.value is None
    assert replica.parameters.isfinite().all()


# ---- what strategies ask


@pytest.mark.parametrize(
    ("make", "momentum", "adaptive"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.5), 0.0, False),
        (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, nesterov=True), 0.9, False),
        (lambda p: torch.optim.Adam(p, lr=0.5), 0.9, True),
        (lambda p: torch.optim.AdamW(p, lr=0.5, betas=(0.0, 0.99)), 0.0, True),
        (lambda p: torch.optim.Adagrad(p, lr=0.5), 0.0, True),
        (lambda p: torch.optim.RMSprop(p, lr=0.5, momentum=0.5), 0.5, True),
    ],
)
def test_learning_rate_and_momentum_are_the_optimizers(make, momentum, adaptive):
    model = Two()
    replica = Replica(model, make(model.parameters()))
    assert (
        replica.steps.learning_rate == 0.5 and replica.steps.momentum == momentum and replica.steps.adaptive == adaptive
    )
    assert replica.steps.nesterov == (momentum == 0.9 and not adaptive)


@pytest.mark.parametrize(
    ("layer", "divisible"),
    [
        (nn.BatchNorm1d(2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LazyBatchNorm2d())), False),
        (nn.SyncBatchNorm(2), False),
        (nn.LayerNorm(2), True),
        (nn.GroupNorm(1, 2), True),
        (nn.Dropout(), True),
    ],
)
def test_only_statistics_over_a_micro_batch_make_a_model_indivisible(layer, divisible):
    model = nn.Sequential(nn.Linear(2, 2), layer)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert Replica(model, optimizer).divisible == divisible
