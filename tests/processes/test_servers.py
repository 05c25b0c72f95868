"""Real ranks, some of which serve: the same bits in the end, every sample once, the equations by hand, and resuming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.rules.order import order
from paceline.run.checkpoint import read
from paceline.summary import account

SAMPLES, EPOCHS = 53, 2
Ranks = Callable[..., Any]


def everything(samples: int = SAMPLES) -> Counter[tuple[int, int]]:
    return Counter((epoch, index) for epoch in range(EPOCHS) for index in range(samples))


def assert_served(outcome: Any, workers: int, used: int = EPOCHS * SAMPLES) -> None:
    """All ranks end with the same bits, servers had no micro-batch, and all samples are accounted for."""
    first = outcome.facts[0]
    for fact in outcome.facts:
        assert fact["final"] == first["final"] and fact["after_round"][-1] == first["after_round"][-1]
        assert fact["applied"] == first["applied"]
    assert all(not fact["seen"] and not fact["steps"] for fact in outcome.facts[workers:])
    books = account(outcome.events)
    assert books.errors == () and books.in_flight == 0 and books.applied == used
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    assert (outcome.ledger["used"], outcome.ledger["discarded"]) == (used, books.discarded)
    computed = {event["rank"] for event in outcome.events if event["kind"] == "compute"}
    assert computed <= set(range(workers))
    stepped = Counter(event["of"] for event in outcome.events if event["kind"] == "step")
    assert set(stepped) == computed


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        ("bsp", 1),
        ("ssp", 2),
        ("gssp:grouping=0-1/2", 2),
        ("gssp:grouping=0/1-2:exchange=global", 3),
        ("gssp:parts=2:warm_up=1:grouping=equal", 4),
        ("gssp:grouping=2/0-1:compress=top-k:ratio=0.3", 2),
    ],
)
def test_all_ranks_end_alike_and_every_sample_is_used_once(ranks: Ranks, strategy: str, servers: int) -> None:
    options = {"samples": SAMPLES, "optimizer": "momentum", "slow": {"0": 0.002, "1": 0.006, "2": 0.003}}
    outcome = ranks("train", 3 + servers, servers=servers, strategy=strategy, **options)
    assert outcome.seen == everything()
    assert_served(outcome, 3)
    assert outcome.facts[0]["applied"] == EPOCHS * SAMPLES


# ---- by hand


def points() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x, x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.3


def start() -> nn.Linear:
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, 0.2, 0.3]]))
        model.bias.zero_()
    return model


@pytest.mark.parametrize(("name", "servers"), [("sgd", 1), ("nesterov", 2), ("adam", 1)])
def test_bsp_is_the_optimizer_on_the_joined_batches(ranks: Ranks, name: str, servers: int) -> None:
    """The n-th micro-batches of all workers make one step; where one has none any more, the learning rate is halved."""
    outcome = ranks("train", 2 + servers, servers=servers, strategy="bsp", samples=SAMPLES, optimizer=name)
    batches = [[indices for _, indices in fact["steps"]] for fact in outcome.facts[:2]]
    model, (x, y) = start(), points()
    optimizer: torch.optim.Optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }[name](model.parameters())
    [group], rounds = optimizer.param_groups, max(map(len, batches))
    as_set = group["lr"]
    assert min(map(len, batches)) > 5
    for number in range(rounds):
        together = [own[number] for own in batches if number < len(own)]
        joined = [index for own in together for index in own]
        optimizer.zero_grad()
        ((model(x[joined]).squeeze(-1) - y[joined]) ** 2).mean().backward()
        group["lr"] = as_set * len(together) / 2
        optimizer.step()
    by_hand = nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(torch.tensor(outcome.facts[0]["final"], dtype=torch.float64), by_hand, rtol=1e-9, atol=0)
    assert_served(outcome, 2)


# ---- saving and resuming


def used_by(path: Path, samples: int) -> list[tuple[int, int]]:
    """The (epoch, sample) pairs that a checkpoint says are used."""
    positions = [position for begin, stop in read(path).values["used"] for position in range(begin, stop)]
    orders = [order(0, epoch, samples) for epoch in range(EPOCHS)]
    return [(position // samples, int(orders[position // samples][position % samples])) for position in positions]


@pytest.mark.parametrize(
    ("strategy", "workers", "servers"),
    [
        ("ssp:overlap=always:delay_cure=none", 2, 2),
        ("gssp:grouping=0/1:parts=2:compress=top-k:ratio=0.5:delay_cure=none", 2, 4),
    ],
)
def test_a_run_goes_on_from_its_servers_momentum(ranks: Ranks, strategy: str, workers: int, servers: int) -> None:
    options = {"strategy": strategy, "servers": servers, "samples": 61}
    first = ranks("train_served", workers + servers, **options, save_after={"1": 4})
    assert first.seen == everything(61)
    assert_served(first, workers, EPOCHS * 61)
    [path] = (first.folder / "checkpoints").glob("round-*")
    saved, used = read(path), used_by(path, 61)
    assert 0 < len(used) == len(set(used)) == saved.values["samples_applied"] < EPOCHS * 61

    # Of the first group's servers each had a part of the momentum when all met.
    held = [fact["when_met"][0]["momenta"] for fact in first.facts[workers : workers + 2]]
    momenta = [saved.tensors["optimizer"][f"{number}.momentum_buffer"].flatten().tolist() for number in range(2)]
    assert momenta == [held[0][0], held[-1][1]] and all(any(each) for each in momenta)

    second = ranks("train_served", workers + servers, **options, resume=True)
    assert {fact["taken"] for fact in second.facts} == {str(path)}
    assert Counter(used) + second.seen == everything(61)
    assert {fact["applied"] for fact in second.facts} == {EPOCHS * 61}
    for fact in second.facts[workers:]:
        assert fact["first"] == momenta, "before a server's first step"


def test_a_checkpoint_holds_the_momentum_that_a_worker_keeps(ranks: Ranks) -> None:
    """The first worker's: all go on from it."""
    options = {"strategy": "ssp", "servers": 1, "samples": 61}
    first = ranks("train_served", 3, **options, save_after={"1": 4})
    [path] = (first.folder / "checkpoints").glob("round-*")
    saved = read(path)
    size = sum(tensor.numel() for tensor in saved.tensors["model"].values())
    assert saved.tensors["strategy"]["velocity"].shape == (size,) and saved.tensors["strategy"]["velocity"].any()
    assert not any("momentum" in name for name in saved.tensors["optimizer"]), "the server has none"
    second = ranks("train_served", 3, **options, resume=True)
    assert {fact["applied"] for fact in second.facts} == {EPOCHS * 61}


# ---- wrong numbers of ranks


@pytest.mark.parametrize(
    ("strategy", "nproc", "servers", "what"),
    [
        ("ssp", 1, 0, "The strategy ssp needs workers and servers, and has 1 and 0."),
        ("gssp", 2, 2, "The strategy gssp needs workers and servers, and has 0 and 2."),
        ("abs-sgd", 3, 1, "The strategy abs-sgd has no servers, and was given 1."),
        ("ssp", 4, 3, "A model of 2 parameters cannot be cut into 3 parts."),
    ],
)
def test_ranks_that_cannot_serve_so_are_told(ranks: Ranks, strategy: str, nproc: int, servers: int, what: str) -> None:
    outcome = ranks("train", nproc, servers=servers, strategy=strategy, fails=True)
    assert set(outcome.codes) == {1}
    assert any(what in output.strip().splitlines()[-1] for output in outcome.outputs), outcome.outputs


@pytest.mark.parametrize(
    ("strategy", "servers", "how", "why"),
    [
        ("ssp", 1, "short", "where a gradient of shape"),
        ("gssp:grouping=0/1", 2, "nan", "it has NaN or infinity in it"),
    ],
)
def test_a_wrong_push_is_refused_with_the_reason_and_the_run_goes_on(
    ranks: Ranks, strategy: str, servers: int, how: str, why: str
) -> None:
    outcome = ranks("train_pushing_wrong", 2 + servers, servers=servers, strategy=strategy, how=how)
    discarded = [event for event in outcome.events if event["kind"] == "discard"]
    assert [event["rank"] for event in discarded] == [1] and why in discarded[0]["reason"]
    warned = [event["text"] for event in outcome.events if event["kind"] == "warning"]
    assert any("A server has refused a push of rank 1" in text and why in text for text in warned)
    assert_served(outcome, 2, EPOCHS * SAMPLES - discarded[0]["samples"])


def test_a_push_with_the_secret_of_an_old_run_is_turned_away(ranks: Ranks) -> None:
    outcome = ranks("train_beside_a_stranger", 3, servers=1, strategy="ssp")
    assert "Turned away a connection from 127.0.0.1" in outcome.outputs[2]
    assert_served(outcome, 2, EPOCHS * SAMPLES)


@pytest.mark.parametrize("victim", [0, 2, 4])
@pytest.mark.parametrize("strategy", ["bsp", "ssp", "gssp:grouping=0-1/2"])
def test_the_run_goes_on_without_a_killed_rank(ranks: Ranks, strategy: str, victim: int) -> None:
    """Rank 4 is a server of two: of a group of its own, or of a part of the model, without which it cannot go on."""
    outcome = ranks("train_until_shot", 5, servers=2, fails=True, strategy=strategy, victim=victim)
    if victim == 4 and not strategy.startswith("gssp"):
        assert outcome.codes == [1, 1, 1, 1, -9]
        assert all("would need a group of servers that is whole" in output for output in outcome.outputs[:4])
        return
    assert outcome.codes == [-9 if rank == victim else 0 for rank in range(5)], "\n".join(outcome.outputs)
    living = [fact for rank, fact in enumerate(outcome.facts) if rank != victim]
    assert len({tuple(fact["final"]) for fact in living}) == 1
    assert outcome.ledger["complete"] and outcome.ledger["leased"] == 0
    books = account(outcome.events)
    told = [error for error in books.errors if not error.startswith(f"rank {victim} computed")]
    assert not told, "all but the dead rank have written down what they did"
    if victim < 3:
        assert books.applied == outcome.ledger["used"] == 3 * 61, "no sample is used twice, and none is lost"
    warned = [event["text"] for event in outcome.events if event["kind"] == "warning"]
    assert any(f"Rank {victim} was lost (ended with -9); the run goes on without it." in text for text in warned)
