"""From measured machines to a described cluster, and from that to a strategy: what the simulator expects of each.

The rules are those of docs/choosing.md. The simulator says how much of the machines a strategy uses; it does not say
what a late gradient or a model of one's own is worth to learning. So a strategy with fresh gradients is preferred
where it loses little, and the ones that trade them for speed where it loses much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, log2
from typing import Any

from paceline.backends.learners import TimingLearner
from paceline.doctor.host import Host, Peer, Task
from paceline.errors import PacelineError
from paceline.race.spec import with_servers
from paceline.race.timing import BYTES_PER_PARAMETER, time_strategy
from paceline.report.words import percent
from paceline.rules.codes import code_bytes
from paceline.simulator.cluster import Cluster
from paceline.simulator.cluster_file import parse_cluster
from paceline.simulator.network import Network
from paceline.strategies import create

CANDIDATES = {
    "all-reduce": "fresh",
    "balanced": "fresh",
    "non-blocking": "fresh",
    "abs-sgd": "1 round late",
    "local-sgd:by_speed": "of own model",
    "ad-psgd": "of own model",
    "gssp": "late",
}
"""What is simulated, and what its gradients are."""
COMPRESSED = {
    "all-reduce:compress=int8": "fresh, rounded",
    "abs-sgd:compress=int8": "late, rounded",
}
"""What is simulated, too, where an all-reduce takes longer than a micro-batch of the fastest worker."""
SHORTER = 0.75  # of an all-reduce: what int8 saves is then worth its rounding; where latency counts it saves nothing
LITTLE_LOSS = 0.95  # of ideal: what is left to gain is within what a late gradient costs to learn from
SLOW_NETWORK = 10  # micro-batches of the fastest worker in the time of one all-reduce
STEPS_A_SYNC = 4  # own steps for each micro-batch that an average lasts: then waiting takes a fifth of the time
SHORT_SECONDS = 0.005  # a round's own work of about 1 ms is then a fifth and more
MICRO_BATCHES = 8_000  # of all workers together in one simulation: below a second of real time
SLOWEST = 50  # at least so many of the slowest worker


@dataclass(frozen=True)
class Expectation:
    """What the simulator expects of a strategy."""

    strategy: str
    gradients: str
    share_of_ideal: float
    samples_per_second: float
    samples_per_round: float


@dataclass(frozen=True)
class Advice:
    """What to take, and why in one line; further lines are worth knowing too."""

    strategy: str
    share_of_ideal: float
    why: str
    notes: tuple[str, ...] = ()


def joined(networks: Sequence[Network]) -> Network:
    """One network for all: a collective goes at the pace of its slowest link.

    >>> network = joined([Network(latency=1e-4, bandwidth=1e9), Network(latency=1e-3, bandwidth=2e9)])
    >>> network.latency, network.bandwidth
    (0.001, 1000000000.0)
    """
    return Network(max(each.latency for each in networks), min(each.bandwidth for each in networks))


def cluster_text(hosts: Sequence[Host], network: Network, task: Task) -> str:
    """The cluster file of these machines; speed 1 is the fastest device."""
    fastest = min(device.micro_batch_seconds for host in hosts for device in host.devices)
    lines = [
        f"# Measured by `paceline doctor`: {task.workload}, {task.model}, micro-batches of {task.micro_batch} samples.",
        f"micro_batch_seconds = {_number(fastest)}  # of a device with speed 1",
    ]
    first = 0
    for host in hosts:
        for device in host.devices:
            ranks = f"rank {first}" if device.workers == 1 else f"ranks {first} to {first + device.workers - 1}"
            first += device.workers
            lines += ["", f"[[devices]]  # {ranks}: {_words(host.name)}, {device.device} ({_words(device.name)})"]
            lines += [f"speed = {_number(fastest / device.micro_batch_seconds)}", f"count = {device.workers}"]
            if device.jitter:
                lines.append(f'jitter = {{kind = "log-normal", sigma = {_number(device.jitter)}}}')
    lines += ["", "[network]", f"latency = {_number(network.latency)}  # seconds"]
    lines.append(f"bandwidth = {_number(network.bandwidth)}  # bytes a second")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """As a TOML float.

    >>> _number(1.0), _number(123456789.0), _number(0.0000123), _number(float("inf"))
    ('1.0', '1.235e+08', '1.23e-05', 'inf')
    """
    text = f"{value:.4g}"
    return text if any(sign in text for sign in ".en") else f"{text}.0"


def _words(name: str) -> str:
    """A name of a machine for a comment: whatever it holds, it stays on its line."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def sync_micro_batches(cluster: Cluster, task: Task, code: str = "none") -> float:
    """Micro-batches of the fastest worker in the time of one all-reduce of gradients that travel in that code."""
    nbytes = code_bytes(code, task.parameters)
    return cluster.network.all_reduce_seconds(cluster.workers, nbytes) / cluster.micro_batch_seconds


def local_steps(cluster: Cluster, task: Task) -> str:
    """local-sgd with as many own steps as the network asks for: a power of two.

    >>> task = Task("digits", "mlp", 32, 1_000_000, divisible=True)
    >>> network = Network(bandwidth=1e6)  # an all-reduce of two takes 4 s
    >>> local_steps(Cluster.from_speeds([1, 1], micro_batch_seconds=0.1, network=network), task)
    'local-sgd:steps=256:by_speed'
    """
    wanted = STEPS_A_SYNC * sync_micro_batches(cluster, task)
    return f"local-sgd:steps={2 ** max(3, ceil(log2(max(1.0, wanted))))}:by_speed"


def candidates(cluster: Cluster, task: Task) -> dict[str, str]:
    """The strategies to simulate, and what their gradients are."""
    chosen = dict(CANDIDATES)
    if cluster.workers > 1 and sync_micro_batches(cluster, task) > 1:
        chosen |= COMPRESSED
        chosen[local_steps(cluster, task)] = "of own model"
    return chosen


def expectations(cluster: Cluster, task: Task) -> list[Expectation]:
    """What the simulator expects of each candidate."""
    learner = TimingLearner(nbytes=task.parameters * BYTES_PER_PARAMETER, divisible=task.divisible)
    slowest = max(cluster.mean_seconds(rank) for rank in range(cluster.workers))
    all_reduce = cluster.network.all_reduce_seconds(cluster.workers, learner.nbytes)
    seconds = max(MICRO_BATCHES / cluster.micro_batches_per_second(), SLOWEST * max(slowest, all_reduce))
    found = []
    for strategy, gradients in candidates(cluster, task).items():
        try:
            served = with_servers(cluster, create(strategy), None)
        except PacelineError:  # not for so many workers
            continue
        outcome = time_strategy(strategy, served, learner, seconds=seconds, micro_batch=task.micro_batch)
        found.append(
            Expectation(
                strategy,
                gradients,
                min(1.0, outcome.share_of_ideal),  # jitter may by chance give the devices a little more than their mean
                outcome.samples_applied / outcome.seconds,
                outcome.samples_applied / max(1, outcome.rounds),
            )
        )
    return found


def advise(expected: Sequence[Expectation], cluster: Cluster, task: Task) -> Advice:
    """The rules of docs/choosing.md on what is expected."""
    of = {each.strategy: each for each in expected}
    blocking, balanced, ahead = of["all-reduce"], of["balanced"], of["abs-sgd"]
    if cluster.workers == 1:
        why = "there is one worker, so that nobody waits for anybody; with --peers or --nproc there are more"
        return Advice(blocking.strategy, blocking.share_of_ideal, why)
    notes = _notes(cluster, task, ahead)
    if blocking.share_of_ideal >= LITTLE_LOSS:
        why = "the workers are alike and the network is quick, so that waiting costs little and every gradient is fresh"
        return Advice(blocking.strategy, blocking.share_of_ideal, why, notes)
    slow = _for_a_slow_network(of, cluster, task)
    if slow is not None:
        return Advice(slow[0].strategy, slow[0].share_of_ideal, slow[1], notes)
    if balanced.share_of_ideal > ahead.share_of_ideal:
        why = (
            f"{task.model} has BatchNorm, so that micro-batches cannot be cut, and shares by speed use more than "
            f"abs-sgd ({percent(ahead.share_of_ideal)}); its gradients are fresh"
            if not task.divisible
            else f"shares by speed use more than abs-sgd ({percent(ahead.share_of_ideal)}), and gradients are fresh"
        )
        return Advice(balanced.strategy, balanced.share_of_ideal, why, notes)
    why = (
        f"nobody waits; all-reduce would use {percent(blocking.share_of_ideal)}. "
        f"If every gradient must be fresh: balanced, {percent(balanced.share_of_ideal)}"
    )
    return Advice(ahead.strategy, ahead.share_of_ideal, why, notes)


def _for_a_slow_network(of: Mapping[str, Expectation], cluster: Cluster, task: Task) -> tuple[Expectation, str] | None:
    """What sends less, where an all-reduce takes longer than a micro-batch; None where it would not help."""
    ahead = of.get("abs-sgd:compress=int8")
    if ahead is None:
        return None
    plain, rounded = (sync_micro_batches(cluster, task, code) for code in ("none", "int8"))
    saves = f"an all-reduce takes {plain:,.1f} micro-batches of the fastest worker, and {rounded:,.1f} as int8"
    if rounded > SLOW_NETWORK:
        local = of[local_steps(cluster, task)]
        return local, (
            f"{saves}: a round of abs-sgd would have {ahead.samples_per_round:,.0f} samples. "
            "So each worker makes steps of its own, and models are averaged seldom"
        )
    if rounded < SHORTER * plain:
        return ahead, (
            f"{saves}, so that a round has {ahead.samples_per_round:,.0f} samples instead of "
            f"{of['abs-sgd'].samples_per_round:,.0f}; nobody waits"
        )
    return None


def _notes(cluster: Cluster, task: Task, ahead: Expectation) -> tuple[str, ...]:
    notes, shortest = [], cluster.micro_batch_seconds
    if shortest < SHORT_SECONDS:
        notes.append(
            f"A micro-batch of {1000 * shortest:.1f} ms is hardly longer than what a rank does for a round itself "
            "(about 1 ms), which the simulator does not know: expect less, or take larger micro-batches."
        )
    longer = sync_micro_batches(cluster, task)
    if longer > SLOW_NETWORK:
        notes.append(
            f"An all-reduce takes as long as {longer:,.0f} micro-batches of the fastest worker, so that a round of "
            f"abs-sgd has {ahead.samples_per_round:,.0f} samples. Larger micro-batches, local-sgd or adaptive-sgd may "
            "learn sooner than it: race them in the simulator."
        )
    return tuple(notes)


def as_json(value: Any) -> Any:
    """Without what JSON cannot say: a number that is not finite is null."""
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def described(own: Host, peers: Sequence[Peer], task: Task) -> tuple[Cluster, str] | None:
    """The cluster of these machines and its file; None when nothing could be measured."""
    reached = [peer.host for peer in peers if peer.host is not None]
    hosts = [host for host in (own, *reached) if host.devices]
    ways = [peer.link for peer in peers] + [host.network for host in hosts if host.workers > 1 or not reached]
    measured = [way for way in ways if way is not None]
    if not hosts or not measured:
        return None
    text = cluster_text(hosts, joined(measured), task)
    return parse_cluster(text), text
