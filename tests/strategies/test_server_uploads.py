"""What workers push to a parameter server: compressed, broken, or refused. Nothing of it is lost, and nothing stops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.backends.simulated import simulate
from paceline.backends.simulated_node import SimulatedNode
from paceline.errors import PacelineError
from paceline.rules.compression import entries, gdtopk_ratio
from paceline.simulator.cluster import Cluster
from paceline.simulator.jitter import LogNormal
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.summary import account

Play = Callable[..., Any]
SPEEDS = (1.0, 0.7, 0.25, 0.5)
PLAIN = partial(torch.optim.SGD, lr=0.02)


def served(servers: int, speeds: Sequence[float] = SPEEDS, latency: float = 0.1) -> Cluster:
    network = Network(latency=latency)
    alone = Cluster.from_speeds(speeds, micro_batch_seconds=1.0, jitter=LogNormal(0.2), network=network, seed=1)
    return replace(alone, servers=servers)


def assert_books(played: Any, discarded: int) -> None:
    """All samples were used but so many, and all ranks end with the same bits."""
    books = account(played.events)
    assert books.errors == () and books.in_flight == 0, books
    assert books.discarded == discarded and books.applied == played.run.samples_applied
    assert played.ledger.complete and played.ledger.leased == 0
    assert (played.ledger.used, played.ledger.discarded) == (books.applied, discarded)
    ends = [learner.parameters for learner in played.learners]
    assert all(torch.equal(end, ends[0]) for end in ends)


def dense(tensors: Sequence[Tensor], size: int) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    whole = torch.zeros(size, dtype=torch.float64)
    whole[tensors[0].long()] = tensors[1]
    return whole


def gradients(played: Any, worker: int) -> list[Tensor]:
    return [played.gradient(point, indices) for indices, point in played.micro_batches[worker]]


# ---- what is not sent is kept


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "text", ["bsp:compress=top-k:ratio=0.3", "ssp:compress=gdtopk", "asp:compress=top-k:ratio=0.6"]
)
def test_what_the_servers_step_with_is_all_that_was_computed(play: Play, text: str, servers: int) -> None:
    """Σ scale·step = Σ gradient/N over the run, though each push leaves most of it out."""
    played = play(create(text), served(servers), samples=192, epochs=3, optimizer=PLAIN, pieces=2)
    size = 4 // servers
    stepped = torch.cat(
        [sum(step.scale * step.mean for step in played.stepped[4 + part]) for part in range(servers)]  # type: ignore[misc]
    )
    computed = sum(sum(gradients(played, worker)) for worker in range(4))
    torch.testing.assert_close(stepped, computed / 4, rtol=1e-10, atol=1e-12)
    sparse = [sent for sent in played.sent if sent.what == "push"]
    assert {len(sent.tensors) for sent in sparse} == {2} and all(len(sent.tensors[0]) <= size for sent in sparse)
    assert min(len(sent.tensors[0]) for sent in sparse) < size, "something was left out"
    torch.testing.assert_close(played.path[-1], played.start - 0.02 * stepped, rtol=1e-10, atol=1e-12)
    assert_books(played, 0)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_sends_the_rest_at_the_end_of_an_epoch_and_of_the_run(play: Play, servers: int) -> None:
    """Whatever it has sent by then is all that it has computed by then; and before that it is not."""
    played = play(create("asp:compress=top-k:ratio=0.3"), served(servers), samples=192, epochs=3, pieces=2)
    size = 4 // servers
    for worker in range(4):
        own = gradients(played, worker)
        epochs = played.epochs[worker]
        sent, computed, pushed, kept_back = torch.zeros(4).double(), torch.zeros(4).double(), 0, 0
        for message in (each for each in played.sent if each.sender == worker and each.what in ("push", "rest")):
            first = (message.to - 4) * size
            sent[first : first + size] += dense(message.tensors, size)
            if message.to != 3 + servers:
                continue  # not all parts have left
            if message.what == "push":
                computed += own[pushed]
                pushed += 1
                kept_back += not torch.allclose(sent, computed)
            else:
                assert pushed == len(own) or epochs[pushed] > epochs[pushed - 1]
                torch.testing.assert_close(sent, computed, rtol=1e-10, atol=1e-12)
        assert pushed == len(own) and kept_back > pushed / 2
        torch.testing.assert_close(sent, computed, rtol=1e-10, atol=1e-12)


SIZE = 1000


def wide(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
    return torch.linspace(0.1, 1.0, SIZE, dtype=torch.float64) * (1 + float(indices[0]) / 200)


@pytest.mark.parametrize("direction", ["code", "speed"])
def test_the_ratio_of_gdtopk_follows_epoch_and_group(play: Play, direction: str) -> None:
    """Four groups: a = .25, .30, .30, .35 from the fastest to the slowest, or the other way round."""
    strategy = create(f"gssp:grouping=equal:compress=gdtopk:direction={direction}:warm_up=1")
    cluster = replace(Cluster.from_speeds((0.25, 1.0, 0.5, 0.7), micro_batch_seconds=1.0), servers=4)
    options = {"gradient": wide, "start": (0.0,) * SIZE, "samples": 400, "epochs": 7, "optimizer": PLAIN}
    played = play(strategy, cluster, **options)
    bases = {1: 0.25, 3: 0.30, 2: 0.30, 0: 0.35} if direction == "code" else {1: 0.35, 3: 0.30, 2: 0.30, 0: 0.25}
    found = 0
    for worker in range(4):
        bytes_of = [sum(t.nbytes for t in s.tensors) for s in played.sent if s.sender == worker and s.what == "push"]
        for epoch, nbytes in zip(played.epochs[worker], bytes_of, strict=True):
            assert nbytes == entries(gdtopk_ratio(epoch, bases[worker]), SIZE) * (4 + 8)
            found += epoch == 6
    assert found == 50
    assert_books(played, 0)


def test_gdtopk_of_one_group_falls_too(play: Play) -> None:
    """Its a is .30, and nobody's speed has to be known for that."""
    options = {"gradient": wide, "start": (0.0,) * SIZE, "samples": 80, "epochs": 6, "optimizer": PLAIN}
    played = play(create("ssp:compress=gdtopk"), served(1, speeds=(1.0, 0.5)), **options)
    sizes = [len(sent.tensors[0]) for sent in played.sent if sent.what == "push" and sent.sender == 0]
    assert sizes[0] == 350 and sizes[-1] == entries(0.3**4, SIZE)


def test_dgc_has_its_own_momentum(play: Play) -> None:
    with pytest.raises(PacelineError, match="compress=dgc has its own momentum, and the optimizer's is 0"):
        play(create("ssp:compress=dgc"), served(1), optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9))
    played = play(create("ssp:compress=dgc:ratio=0.25"), served(1), optimizer=PLAIN)
    assert_books(played, 0)


def test_where_nothing_is_computed_nothing_can_be_compressed() -> None:
    for text in ("bsp:compress=top-k", "asp:compress=gdtopk", "gssp:compress=dgc"):
        strategy = create(text)
        with pytest.raises(PacelineError, match="needs gradients, and a simulation of timing alone has none"):
            simulate(strategy, served(strategy.servers_for(4)), seconds=2.0)


# ---- gradients that are no numbers


def sometimes_nan(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
    return torch.full_like(w, torch.nan) if int(indices.min()) < 8 else w - 1.0


ALL = ["bsp", "ssp", "ssp:staleness=1:overlap=always", "dssp", "asp", "gssp:grouping=0-1/2-3", "gssp:parts=2"]


@pytest.mark.parametrize("text", [*ALL, "ssp:compress=top-k", "gssp:exchange=gradient", "gssp:exchange=global"])
def test_what_is_not_a_number_is_discarded_and_the_run_goes_on(play: Play, text: str) -> None:
    strategy = create(text)
    played = play(
        strategy, served(strategy.servers_for(4)), gradient=sometimes_nan, start=(3.0,) * 4, samples=195, pieces=2
    )
    bad = sum(len(indices) for own in played.micro_batches for indices, _ in own if int(indices.min()) < 8)
    assert 0 < bad < 195
    assert_books(played, bad)
    assert {event["reason"] for event in played.of_kind("discard")} == {"non-finite gradient"}
    assert bool(played.path[-1].isfinite().all()) and float(played.path[-1].max()) < 3.0
    for rank, own in enumerate(played.micro_batches):
        said = played.of_kind("warning", rank)
        assert len(said) == any(int(indices.min()) < 8 for indices, _ in own), "it is said once"


@pytest.mark.parametrize("staleness", [0, 1])
def test_nobody_waits_for_a_gradient_that_was_discarded(play: Play, staleness: int) -> None:
    """All are equally fast and every second gradient is NaN: nobody ever stands still."""

    def half_nan(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
        return torch.full_like(w, torch.nan) if int(indices.sum()) % 2 else w - 1.0

    alone = Cluster.from_speeds((1.0,) * 3, micro_batch_seconds=1.0)
    played = play(create(f"ssp:staleness={staleness}"), replace(alone, servers=1), gradient=half_nan, samples=192)
    for rank in range(3):
        for before, after in pairwise(played.of_kind("compute", rank)):
            assert after["t"] == before["end"]
    assert_books(played, 8 * sum(int(i.sum()) % 2 for own in played.micro_batches for i, _ in own))


@pytest.mark.parametrize("text", ["bsp", "ssp", "asp:overlap=always", "gssp:grouping=0-1/2-3"])
def test_a_run_in_which_nothing_is_a_number_ends(play: Play, text: str) -> None:
    def nan(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
        return torch.full_like(w, torch.nan)

    strategy = create(text)
    with pytest.raises(PacelineError, match="no rank has brought one finite gradient in the last 20 rounds"):
        play(strategy, served(strategy.servers_for(4)), gradient=nan, epochs=5)


# ---- pushes that no worker of this run would send

BROKEN: dict[str, tuple[Callable[[Tensor], list[Tensor]], str]] = {
    "too short": (
        lambda mean: [mean[:-1]],
        r"a tensor of shape \(3,\) and torch.float64 where a gradient of shape \(4,",
    ),
    "nothing": (lambda mean: [], "A push holds 0 tensors"),
    "three": (lambda mean: [mean, mean, mean], "A push holds 3 tensors"),
    "another shape": (lambda mean: [mean.view(2, 2)], r"a tensor of shape \(2, 2\)"),
    "another type": (lambda mean: [mean.float().repeat(2)], r"a tensor of shape \(8,\) and torch.float32"),
    "integers": (lambda mean: [mean.long()], "torch.int64 where a gradient"),
    "NaN": (lambda mean: [mean * torch.nan], "it has NaN or infinity in it"),
    "indices beyond the end": (
        lambda mean: [torch.tensor([0, 99], dtype=torch.int32), mean[:2]],
        "The indices of a push do not ascend",
    ),
    "indices of another type": (lambda mean: [torch.tensor([0]), mean[:1]], "A push has indices of shape"),
    "values of another type": (
        lambda mean: [torch.tensor([0], dtype=torch.int32), mean[:1].float()],
        "A push holds 2 tensors",
    ),
    "sparse NaN": (
        lambda mean: [torch.tensor([0], dtype=torch.int32), mean[:1] * torch.nan],
        "NaN or infinite at 1 of its 1 entries",
    ),
}


@contextmanager
def broken(make: Callable[[Tensor], list[Tensor]], worker: int, what: str = "push") -> Iterator[None]:
    """Messages of one worker that begin so go wrong on their way."""
    send = SimulatedNode.send

    def instead(node: SimulatedNode, to: int, kind: str, *tensors: Tensor) -> None:
        if node.rank == worker and kind.startswith(what):
            tensors = tuple(make(tensors[0]))
        send(node, to, kind, *tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedNode, "send", instead)
        yield


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("text", ["ssp", "bsp", "gssp:grouping=0-1/2-3"])
def test_a_push_that_cannot_be_is_refused_with_the_reason(play: Play, text: str, how: str) -> None:
    strategy, (make, why) = create(text), BROKEN[how]
    with broken(make, worker=1, what="push 3 "):
        played = play(strategy, served(strategy.servers_for(4)), samples=195, pieces=2)
    whole_round = text == "bsp" and how == "NaN"  # it is found when the round's pushes have been added up
    events = played.of_kind("discard")
    assert [event["rank"] for event in events if not whole_round] == ([] if whole_round else [1])
    for event in events:
        [warning] = played.of_kind("warning", event["rank"])
        assert re.search(why, event["reason"])
        assert f"refused a push of rank {event['rank']}: {event['reason']}" in warning["text"]
    assert len(events) == (4 if whole_round else 1)
    assert_books(played, sum(event["samples"] for event in events))
    assert len(played.micro_batches[1]) > 5, "it goes on"


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("name", ["bsp", "ssp", "asp"])
def test_a_worker_learns_of_every_refusal_also_of_its_last_push(play: Play, name: str, overlap: str) -> None:
    make, _ = BROKEN["too short"]
    with broken(make, worker=1):
        played = play(create(f"{name}:overlap={overlap}"), served(1), samples=195)
    assert_books(played, sum(len(indices) for indices, _ in played.micro_batches[1]))


@pytest.mark.parametrize("how", ["too short", "NaN"])
def test_what_was_kept_back_is_refused_if_it_cannot_be(play: Play, how: str) -> None:
    make, why = BROKEN[how]
    with broken(make, worker=1, what="rest"):
        played = play(create("ssp:compress=top-k:ratio=0.5"), served(1), samples=195)
    warnings = [event["text"] for event in played.of_kind("warning", 4)]
    assert warnings and all(
        re.search(f"rank 1 had kept back of its gradients was refused: .*{why}", t) for t in warnings
    )
    assert_books(played, 0)
