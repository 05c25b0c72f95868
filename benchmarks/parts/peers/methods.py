"""Everybody who races: what each is, and how it is set up. Peers are set up as their documentation advises."""

from __future__ import annotations

from dataclasses import dataclass

RANKS = "parts.peers.rank"
SEEDS, MANY_SEEDS = 3, 9


@dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
        name: in tables; of Paceline's, the strategy with its options.
        kind: `peer`, `by hand` (balanced by somebody who knows all speeds in advance) or `paceline`.
        configuration: in words.
        package: what has to be installed, into an environment of its own.
        module: what a session starts.
        seeds: at least; more for those whose factors are asked for.
        alone: whether it needs so much of the processors that races at the same time would disturb each other.
    """

    name: str
    kind: str
    configuration: str = "as it is, no option"
    package: str = ""
    module: str = RANKS
    alone: bool = False
    seeds: int = SEEDS


METHODS = (
    Method(
        "ddp",
        "peer",
        "DistributedDataParallel(gradient_as_bucket_view=True), gloo; the same batch on every rank",
        seeds=MANY_SEEDS,
    ),
    Method(
        "ddp-balanced",
        "by hand",
        "DistributedDataParallel inside Join; batches in proportion to the devices' true mean speeds, losses weighted",
        seeds=MANY_SEEDS,
    ),
    Method(
        "post-local-sgd",
        "peer",
        "PostLocalSGDOptimizer, PeriodicModelAverager(period=4, warmup_steps=8), post_localSGD_hook without subgroups",
    ),
    Method("accelerate-local-sgd", "peer", "LocalSGD(local_sgd_steps=8) around an Accelerator", "accelerate"),
    Method(
        "torchft-local-sgd",
        "peer",
        "LocalSGD(sync_every=8), one replica group a rank, lighthouse as in the README (tick 100 ms)",
        "torchft",
    ),
    Method(
        "torchft-diloco",
        "peer",
        "DiLoCo(sync_every=8), outer SGD(lr=0.7, momentum=0.9, nesterov=True), the rest as above",
        "torchft",
    ),
    Method(
        "hivemind",
        "peer",
        "hivemind.Optimizer, steps over 16 micro-batches, matchmaking_time=1, request_timeout=0.5, groups of four",
        "hivemind",
        alone=True,
    ),
    Method(
        "hivemind-delayed",
        "peer",
        "the same with delay_grad_averaging and delay_optimizer_step",
        "hivemind",
        alone=True,
    ),
    Method("hivemind-local", "peer", "the same with use_local_updates", "hivemind", alone=True),
    Method(
        "ray-ddp",
        "peer",
        "TorchTrainer with four workers, TorchConfig(backend='gloo'), prepare_model; the loop of ddp",
        "ray[train]",
        "parts.peers.ray_session",
    ),
    Method("all-reduce", "paceline"),
    Method("balanced", "paceline"),
    Method("local-sgd:by_speed", "paceline", "slower workers make fewer steps"),
    Method("rennala", "paceline"),
    Method("non-blocking", "paceline"),
    Method("adaptive-sgd", "paceline"),
    Method("ad-psgd", "paceline"),
    Method("gssp", "paceline", "one server"),
    Method("abs-sgd", "paceline", seeds=MANY_SEEDS),
    Method("local-sgd", "paceline"),
    Method("d-psgd", "paceline"),
    Method("matcha", "paceline"),
    Method("bsp", "paceline", "one server"),
    Method("ssp", "paceline", "one server"),
    Method("dssp", "paceline", "one server"),
    Method("asp", "paceline", "one server"),
    Method("elastic-averaging", "paceline"),
    Method("crossbow", "paceline"),
)
