"""What workers do about lateness, against the equations: where gradients are taken, what is pushed, what it steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.simulator.cluster import Cluster
from paceline.simulator.network import Network
from paceline.strategies import create

Play = Callable[..., Any]
RATE, BETA, DECAY = 0.02, 0.8, 0.1
MOMENTUM = partial(torch.optim.SGD, lr=RATE, momentum=BETA)
SPEEDS = (1.0, 0.7, 0.25)
WORKERS, SERVER = 3, 3


def served(servers: int = 1, speeds: tuple[float, ...] = SPEEDS) -> Cluster:
    network = Network(latency=0.05)
    return replace(Cluster.from_speeds(speeds, micro_batch_seconds=1.0, network=network), servers=servers)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def pulled(played: Any, worker: int) -> list[Tensor]:
    """The parameters that it was sent, one for each micro-batch."""
    sent = [each for each in played.sent if each.what == "parameters" and each.to == worker]
    return [each.tensors[0] for each in sent][: len(played.micro_batches[worker])]


def pushed(played: Any, worker: int) -> list[Tensor]:
    return [each.tensors[0] for each in played.sent if each.what == "push" and each.sender == worker]


@pytest.mark.parametrize("text", ["asp:delay_cure=predict", "ssp:delay_cure=predict", "asp", "dssp"])
def test_a_worker_computes_where_the_others_will_have_brought_the_parameters(play: Play, text: str) -> None:
    played = play(create(text + ("" if text == "dssp" else ":overlap=never")), served(), optimizer=MOMENTUM)
    for worker in range(WORKERS):
        points = [batch.point for batch in played.micro_batches[worker]]
        sent = pulled(played, worker)
        assert len(points) == len(sent) > 3
        close(points[0], sent[0])  # nothing to go by yet
        for before, now, point in zip(sent, sent[1:], points[1:], strict=False):
            close(point, now + (WORKERS - 1) / WORKERS * (now - before))


@pytest.mark.parametrize("text", ["asp:delay_cure=momentum", "ssp", "gssp:grouping=0-1/2:delay_cure=momentum"])
def test_workers_push_what_nesterovs_step_with_their_own_momentum_would_be(play: Play, text: str) -> None:
    strategy = create(text)
    played = play(strategy, served(strategy.servers_for(WORKERS)), optimizer=MOMENTUM)
    for worker in range(WORKERS):
        velocity = torch.zeros_like(played.start)
        found = pushed(played, worker)
        assert len(found) > 3
        for (indices, point), push in zip(played.micro_batches[worker], found, strict=True):
            gradient = played.gradient(point, indices)
            velocity = BETA * velocity + gradient
            close(push, gradient + BETA * velocity)


@pytest.mark.parametrize("exchange", ["delta", "gradient", "global"])
def test_the_servers_step_has_no_momentum_then_and_as_much_weight_decay_as_it_would_have(
    play: Play, exchange: str
) -> None:
    text = f"gssp:grouping=0-2:delay_cure=momentum:exchange={exchange}"
    optimizer = partial(MOMENTUM, weight_decay=DECAY)
    played = play(create(text), served(create(text).servers_for(WORKERS)), optimizer=optimizer)
    steps = played.stepped[SERVER]
    here = played.start
    for step, after in zip(steps, played.committed[SERVER], strict=False):
        here = here - RATE * step.scale * (step.mean + DECAY / (1 - BETA) * here)
        if exchange == "global":  # what comes from there lies between
            break
        close(after, here)
    assert len(steps) > 20


@pytest.mark.parametrize(("cure", "forgets_by_rounds"), [("auto", True), ("predict", True), ("none", False)])
def test_adam_forgets_the_size_of_gradients_by_rounds_and_not_by_pushes(
    play: Play, cure: str, forgets_by_rounds: bool
) -> None:
    optimizer = partial(torch.optim.Adam, lr=RATE, betas=(BETA, 0.99))
    played = play(create(f"asp:delay_cure={cure}"), served(), optimizer=optimizer)
    here = torch.nn.Parameter(played.start.clone())
    adam = optimizer([here])
    steps = played.stepped[SERVER]
    assert len(steps) > 20 and steps[0].scale == pytest.approx(1 / WORKERS)
    for step, after in zip(steps, played.committed[SERVER], strict=False):
        kept = 0.99**step.scale if forgets_by_rounds else 0.99
        adam.param_groups[0].update(lr=RATE * step.scale, betas=(BETA, kept))
        here.grad = step.mean.clone()
        adam.step()
        close(after, here.detach())


def test_plain_sgd_has_no_momentum_to_keep(play: Play) -> None:
    plain = partial(torch.optim.SGD, lr=RATE)
    found, expected = (
        play(create(f"asp:delay_cure={cure}"), served(), optimizer=plain) for cure in ("momentum", "none")
    )
    assert torch.equal(found.path[-1], expected.path[-1]) and found.events == expected.events


@pytest.mark.parametrize("text", ["bsp", "ssp:staleness=0", "gssp:grouping=0-2:staleness=0"])
def test_where_all_step_together_nothing_is_cured(play: Play, text: str) -> None:
    found, expected = (
        play(create(f"{text}:delay_cure={cure}"), served(), optimizer=MOMENTUM) for cure in ("auto", "none")
    )
    assert torch.equal(found.path[-1], expected.path[-1]) and found.events == expected.events


def test_one_worker_alone_trains_as_its_user_would(play: Play) -> None:
    """Nobody steps while it computes."""
    alone = play(create("all-reduce"), served(0, (1.0,)), optimizer=MOMENTUM)
    found = play(create("asp:overlap=never"), served(1, (1.0,)), optimizer=MOMENTUM)
    close(found.path[-1], alone.path[-1])


def test_the_published_method_cures_nothing() -> None:
    assert create("gssp --paper").delay_cure == "none"  # type: ignore[attr-defined]  # of this strategy
    assert create("gssp").delay_cure == "auto"  # type: ignore[attr-defined]  # as above


def test_a_quadratic_bears_a_learning_rate_at_which_late_momentum_runs_away(play: Play) -> None:
    """Why the cure is the default: eight workers, as far as synchronous training would go."""

    def bowl(w: Tensor, indices: Any) -> Tensor:
        return w

    optimizer = partial(torch.optim.SGD, lr=0.15, momentum=0.9)
    options = {"optimizer": optimizer, "gradient": bowl, "samples": 800, "epochs": 3}
    cluster = served(1, (1.0,) * 8)
    ends = {
        cure: float(play(create(f"asp:delay_cure={cure}"), cluster, **options).path[-1].norm())
        for cure in ("none", "auto")
    }
    assert ends["auto"] < 0.5 < 100 < ends["none"], ends
