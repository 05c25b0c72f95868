"""Parameter servers against their equations, written down by hand: what every step was made with, at which parameters
every gradient was taken, who waited for whom, and what the servers of several groups hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from paceline.serving.exchange import ToGlobal
from paceline.serving.group_server import GroupServer
from paceline.simulator.cluster import Cluster
from paceline.simulator.faults import LateJoin
from paceline.simulator.jitter import Constant, LogNormal
from paceline.simulator.network import Network
from paceline.strategies import create
from paceline.summary import account

Play = Callable[..., Any]
RATE = 0.05
SPEEDS = (1.0, 0.7, 0.25, 0.5)
UNCURED = "delay_cure=none"  # then every gradient is taken at parameters that a server has had
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=RATE),
    "momentum": partial(torch.optim.SGD, lr=RATE / 4, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=RATE),
}


def served(
    speeds: Sequence[float] = SPEEDS, servers: int = 1, latency: float = 0.0, sigma: float = 0.0, seed: int = 0
) -> Cluster:
    """A micro-batch of a device of speed 1 takes 1 s."""
    jitter = LogNormal(sigma) if sigma else Constant()
    network = Network(latency=latency)
    alone = Cluster.from_speeds(speeds, micro_batch_seconds=1.0, jitter=jitter, network=network, seed=seed)
    return replace(alone, servers=servers)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def assert_books(played: Any, used: int) -> None:
    """So many samples were used, every other one was discarded, and all ranks end with the same bits."""
    books = account(played.events)
    assert books.errors == () and books.in_flight == 0, books
    assert books.applied == used == played.run.samples_applied
    assert played.ledger.complete and played.ledger.leased == 0
    assert (played.ledger.used, played.ledger.discarded) == (used, books.computed - used)
    ends = [learner.parameters for learner in played.learners]
    assert all(torch.equal(end, ends[0]) for end in ends)


def pushes(played: Any, server: int) -> Iterator[tuple[Any, int, int, Any]]:
    """What the server was told of: the step's event, whose it was, the how manieth of that worker, and its micro-batch.
    (Every gradient is sound: the n-th push is of the n-th micro-batch.)"""
    done: Counter[int] = Counter()
    for event in played.of_kind("step", server):
        worker = event["of"]
        yield event, worker, done[worker], played.micro_batches[worker][done[worker]]
        done[worker] += 1


def mean_step(played: Any, micro_batch: int, workers: int) -> Tensor:
    """Σ (n/n_max)·x/N over all micro-batches: where plain SGD goes, in whatever order it gets them."""
    total = torch.zeros_like(played.start)
    for own in played.micro_batches:
        for indices, point in own:
            total += played.gradient(point, indices) * len(indices) / (micro_batch * workers)
    return total


# ---- BSP


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("speeds", [(1.0,) * 4, SPEEDS], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bsp_is_all_reduce(play: Play, name: str, speeds: Sequence[float], servers: int) -> None:
    options = {"optimizer": OPTIMIZERS[name], "samples": 192, "pieces": 2}
    expected = play(create("all-reduce"), served(speeds, 0), **options)
    for overlap, latency in (("never", 0.0), ("always", 0.3)):
        found = play(create(f"bsp:overlap={overlap}"), served(speeds, servers, latency), **options)
        close(found.path[-1], expected.path[-1])
        if servers == 1:
            for after, wanted in zip(found.committed[4][3::4], expected.committed[0], strict=False):
                close(after, wanted)
        assert_books(found, 2 * 192)
    assert len(expected.committed[0]) >= 12 and not torch.allclose(expected.path[6], expected.path[-1])


def test_a_round_of_bsp_is_a_step_with_its_mean_and_counts_as_the_workers_in_it(play: Play) -> None:
    """195 samples: an epoch ends with a short micro-batch, and the last round is of two workers only."""
    played = play(create("bsp"), served(), samples=195, epochs=3, optimizer=OPTIMIZERS["sgd"])
    here, rounds = played.start, list[list[Any]]()
    for push in pushes(played, 4):
        if push[2] == len(rounds):
            rounds.append([])
        rounds[push[2]].append(push)
    for together, after in zip(rounds, played.committed[4][::4], strict=False):
        sums = [len(batch.indices) * played.gradient(batch.point, batch.indices) for *_, batch in together]
        count = sum(len(batch.indices) for *_, batch in together)
        for *_, batch in together:
            close(batch.point, here)
        here = here - RATE * (len(together) / 4) * sum(sums) / count
        close(after, here)
    assert {len(each) for each in rounds} == {4, 75 % 4} and {event["delay"] for event, *_ in pushes(played, 4)} == {0}
    close(played.path[-1], here)
    assert_books(played, 3 * 195)


def test_weight_decay_of_all_workers_together_is_that_of_all_reduce(play: Play) -> None:
    def nothing(w: Tensor, indices: NDArray[np.int64]) -> Tensor:
        return torch.zeros_like(w)

    optimizer = partial(torch.optim.SGD, lr=1e-3, weight_decay=0.1)
    options = {"optimizer": optimizer, "gradient": nothing, "samples": 192}
    shrunk = (1 - 1e-3 * 0.1) ** 12
    for text in ("all-reduce", "bsp", "ssp", "asp", "gssp:grouping=0-1/2-3"):
        end = play(create(text), served(servers=create(text).servers_for(4)), **options).path[-1]
        in_small_steps = (1 - 1e-3 * 0.1 / 4) ** 48
        if "gssp" not in text:  # changes of groups are added: equal to first order
            close(end, torch.full_like(end, shrunk if text in ("all-reduce", "bsp") else in_small_steps))
        assert float(1 - end[0]) == pytest.approx(1 - shrunk, rel=1e-3)


# ---- bounded staleness


def check_staleness(played: Any, workers: int, low: float, high: float, lock_step: bool = False) -> None:
    """Every gradient was taken at parameters of the server that hold all pushes of clocks ≤ c − s − 1 of everybody, and
    nobody is ever more than s + 1 finished iterations ahead of one who goes on."""
    told = list(pushes(played, workers))
    path = [played.start, *played.committed[workers]]
    versions = {tuple(point.tolist()): number for number, point in enumerate(path)}  # the last one, if a round is one
    totals, done = Counter(worker for _, worker, _, _ in told), Counter[int]()
    for number, (event, worker, clock, batch) in enumerate(told):
        version = versions[tuple(batch.point.tolist())]
        assert event["delay"] == (0 if lock_step else number - version)
        held = Counter(other for _, other, _, _ in told[:version])
        for other in range(workers):
            assert held[other] >= min(clock - high, totals[other]), "a push that must be in the parameters is not"
        done[worker] += 1
        going_on = [done[other] for other in range(workers) if done[other] < totals[other]]
        assert not going_on or done[worker] - min(going_on) <= high + 1
    if low == high == 0:
        assert all(held_at % workers == 0 for held_at in versions.values() if held_at < min(totals.values()) * workers)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    speeds=st.lists(st.sampled_from([1.0, 0.7, 0.4, 0.15]), min_size=1, max_size=5),
    bound=st.sampled_from(["ssp:staleness=0", "ssp:staleness=1", "ssp", "dssp:low=1:high=4", "dssp:low=0:high=3"]),
    overlap=st.sampled_from(["always", "never", "auto"]),
    latency=st.sampled_from([0.0, 0.2, 1.5]),
    sigma=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 100),
)
def test_no_gradient_lacks_more_than_the_bound_allows(
    play: Play, speeds: list[float], bound: str, overlap: str, latency: float, sigma: float, seed: int
) -> None:
    strategy: Any = create(f"{bound}:overlap={overlap}:{UNCURED}")
    played = play(strategy, served(speeds, 1, latency, sigma, seed), optimizer=OPTIMIZERS["sgd"], samples=100)
    low, high = strategy.bound.low, strategy.bound.high
    check_staleness(played, len(speeds), low, high, lock_step=high == 0)
    assert_books(played, 200)


def test_the_bound_is_reached_and_holds_the_fast_back(play: Play) -> None:
    """Else the test above would not see a bound that is too narrow, or none at all."""
    for staleness in (0, 1, 3):
        played = play(create(f"ssp:staleness={staleness}:{UNCURED}"), served((1.0, 0.1)), samples=200, epochs=1)
        done, lead = Counter[int](), 0
        for _, worker, _, _ in pushes(played, 2):
            done[worker] += 1
            lead = max(lead, done[0] - done[1])
        assert lead >= staleness + 1
        check_staleness(played, 2, staleness, staleness, lock_step=staleness == 0)
    played = play(create(f"asp:{UNCURED}"), served((1.0, 0.1)), samples=200, epochs=1)
    with pytest.raises(AssertionError):
        check_staleness(played, 2, 3, 3)


def test_staleness_of_zero_is_bsp(play: Play) -> None:
    cluster = served(latency=0.2, sigma=0.3)
    found, expected = (play(create(text), cluster, samples=195) for text in ("ssp:staleness=0", "bsp"))
    assert found.events == expected.events and torch.equal(found.path[-1], expected.path[-1])


@pytest.mark.parametrize(("overlap", "latency"), [("never", 0.0), ("never", 0.4), ("always", 0.4), ("always", 3.0)])
def test_with_asp_nobody_waits_but_for_the_network(play: Play, overlap: str, latency: float) -> None:
    """A pull takes there and back; one that left when the computing began takes what is left of that."""
    played = play(create(f"asp:overlap={overlap}"), served(latency=latency, sigma=0.3))
    for worker in range(4):
        computed = played.of_kind("compute", worker)
        assert len(computed) > 4
        for before, after in pairwise(computed):
            ahead = before["end"] - before["t"] if overlap == "always" else 0.0
            assert after["t"] - before["end"] == pytest.approx(max(0.0, 2 * latency - ahead), abs=1e-9)


# ---- what a push counts


@pytest.mark.parametrize("text", ["ssp", "dssp", "asp", "ssp:overlap=always", "gssp:grouping=0-1/2-3", "gssp:parts=2"])
def test_a_push_counts_as_one_of_all_workers_and_a_short_one_less(play: Play, text: str) -> None:
    strategy = create(text)
    servers = strategy.servers_for(4)
    played = play(strategy, served(servers=servers, latency=0.1), optimizer=OPTIMIZERS["sgd"], samples=195, pieces=2)
    close(played.path[-1], played.start - RATE * mean_step(played, 8, 4))
    scales = {step.scale for server in range(4, 4 + servers) for step in played.stepped[server]}
    assert scales == {1 / 4, 3 / 8 / 4}
    assert_books(played, 2 * 195)


def test_a_late_push_counts_less(play: Play) -> None:
    """η·N/max(N, delay), on top of what it would count."""
    played = play(create(f"asp:adapt_lr:{UNCURED}"), served((1.0, 1.0, 0.1)), samples=200)
    events = played.of_kind("step", 3)
    assert max(event["delay"] for event in events) > 6 and min(event["delay"] for event in events) < 3
    for event, step in zip(events, played.stepped[3], strict=True):
        assert step.scale == pytest.approx(event["samples"] / 8 / 3 * 3 / max(3, event["delay"]), rel=1e-12)
    check_staleness(played, 3, 1e9, 1e9)


# ---- groups


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("overlap", ["auto", "always"])
def test_one_group_is_ssp(play: Play, overlap: str, parts: int) -> None:
    options = {"samples": 195, "pieces": 2, "optimizer": OPTIMIZERS["adam"]}
    cluster = served(servers=parts, latency=0.2, sigma=0.3)
    found = play(create(f"gssp:parts={parts}:overlap={overlap}"), cluster, **options)
    expected = play(create(f"ssp:overlap={overlap}"), cluster, **options)
    assert found.events == expected.events and torch.equal(found.path[-1], expected.path[-1])


def test_a_group_for_each_worker_is_asp_in_time(play: Play) -> None:
    """With a window of one push every group hears of every push; nobody waits."""
    grouped = play(create("gssp:grouping=0/1/2/3:overlap=never:staleness=0"), served(servers=4, latency=0.2, sigma=0.3))
    alone = play(create("asp:overlap=never"), served(latency=0.2, sigma=0.3))
    assert grouped.of_kind("compute") == alone.of_kind("compute") and len(alone.of_kind("compute")) == 50
    windows = Counter(sent.sender for sent in grouped.sent if sent.what == "window")
    assert windows == {4 + rank: 3 * len(grouped.micro_batches[rank]) for rank in range(4)}


@pytest.mark.parametrize(("window", "pushes"), [(1, 1), (0, 2), (3, 3)], ids=["usual", "of the group's size", "larger"])
def test_other_groups_hear_of_so_many_pushes_at_a_time(play: Play, window: int, pushes: int) -> None:
    played = play(create(f"gssp:grouping=0-1/2-3:window={window}"), served(servers=2))
    for server, workers in ((4, (0, 1)), (5, (2, 3))):
        windows = sum(sent.what == "window" and sent.sender == server for sent in played.sent)
        pushed = sum(len(played.micro_batches[rank]) for rank in workers)
        assert windows == -(-pushed // pushes), "the last one may be smaller"


def test_across_groups_nobody_waits(play: Play) -> None:
    played = play(create("gssp:grouping=0-1/2-3:staleness=0"), served((1.0, 1.0, 0.1, 0.1), servers=2))
    for rank in range(4):
        for before, after in pairwise(played.of_kind("compute", rank)):
            assert after["t"] == before["end"], "the two of a group are equally fast"
    counts = [len(own) for own in played.micro_batches]
    assert counts[0] == counts[1] > 5 * counts[2] and counts[2] == counts[3] > 1


def at_rest(play: Play, patch: pytest.MonkeyPatch, text: str, servers: int, **options: Any) -> tuple[Any, list[Tensor]]:
    """A run, and what each server held when all was said, before they met."""
    held: dict[int, Tensor] = {}
    serve = GroupServer.serve

    async def look(server: Any) -> None:
        await serve(server)
        held[server._node.rank] = server._node.parameters.clone()

    with patch.context() as patched:
        patched.setattr(GroupServer, "serve", look)
        played = play(create(text), served(servers=servers, latency=0.1, sigma=0.2), samples=195, **options)
    assert_books(played, 2 * 195)
    return played, [held[rank] for rank in sorted(held)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("text", ["gssp:grouping=0-1/2/3", "gssp", "gssp:grouping=equal:staleness=0:compress=top-k"])
def test_changes_of_parameters_leave_all_groups_equal(
    play: Play, monkeypatch: pytest.MonkeyPatch, text: str, name: str
) -> None:
    played, held = at_rest(play, monkeypatch, text, 3, optimizer=OPTIMIZERS[name])
    for each in held:
        close(each, held[0])
        close(each, played.path[-1])


def test_gradients_leave_groups_equal_with_plain_sgd_alone(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "gssp:grouping=0-1/2/3:exchange=gradient"
    played, held = at_rest(play, monkeypatch, text, 3, optimizer=OPTIMIZERS["sgd"])
    for each in held:
        close(each, played.start - RATE * mean_step(played, 8, 4))
    played, held = at_rest(play, monkeypatch, text, 3, optimizer=OPTIMIZERS["adam"])
    assert float((held[0] - held[1]).norm()) > 1e-4, "they drift apart"
    close(played.path[-1], torch.stack(held).mean(0))


def test_parts_of_several_groups_are_each_others_peers(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "gssp:grouping=0-1/2-3:parts=2"
    played, held = at_rest(play, monkeypatch, text, 4, optimizer=OPTIMIZERS["momentum"], pieces=2)
    close(held[0][:2], held[2][:2])
    close(held[1][2:], held[3][2:])
    close(played.path[-1], torch.cat([held[0][:2], held[1][2:]]))
    assert torch.equal(held[0][2:], held[1][:2].new_ones(2)), "what is not its own part a server does not touch"


def test_a_global_servers_parameters_become_the_groups(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[Tensor, Tensor]] = []
    hear = ToGlobal.hear

    def look(exchange: Any, message: Any) -> int:
        pushes = hear(exchange, message)
        if message.kind.startswith("overwrite"):
            taken.append((message.tensors[0].clone(), exchange._parameters.clone()))
        return pushes

    monkeypatch.setattr(ToGlobal, "hear", look)
    text = "gssp:grouping=0-1/2/3:exchange=global"
    played, held = at_rest(play, monkeypatch, text, 4, optimizer=OPTIMIZERS["sgd"])
    assert len(taken) > 20 and all(torch.equal(told, found) for told, found in taken)
    overwrites = [sent for sent in played.sent if sent.what == "overwrite"]
    windows = [sent for sent in played.sent if sent.what == "window"]
    assert {sent.to for sent in windows} == {7} == {sent.sender for sent in overwrites}
    assert Counter(sent.to for sent in overwrites) == Counter(sent.sender for sent in windows)
    close(held[-1], played.start - RATE * mean_step(played, 8, 4))
    close(played.path[-1], held[-1])


@pytest.mark.parametrize("text", ["bsp", f"ssp:staleness=2:{UNCURED}", "gssp:grouping=0-3:staleness=0"])
def test_who_comes_late_is_waited_for_from_the_first_iteration_on(play: Play, text: str) -> None:
    """Else the first rounds of BSP would be of those who happen to be there."""
    strategy: Any = create(text)
    cluster = replace(served(), faults=(LateJoin(rank=2, at=7.5),))
    options = {"optimizer": OPTIMIZERS["sgd"], "samples": 192}
    played = play(strategy, cluster, **options)
    check_staleness(played, 4, strategy.bound.low, strategy.bound.high, lock_step=strategy.bound.high == 0)
    assert_books(played, 2 * 192)
    if strategy.bound.high == 0:
        close(played.path[-1], play(create("all-reduce"), served(servers=0), **options).path[-1])
