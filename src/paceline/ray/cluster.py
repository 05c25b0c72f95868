"""Ray itself: found or started, and room in it for all processes of a run at once."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, no_such
from paceline.launch.local import JOIN_SECONDS
from paceline.launch.surroundings import card_of
from paceline.ray import actors
from paceline.ray.needs import Need, needs_of_option
from paceline.ray.team import Control, Spare, Team, answer

ENGINES = ("local", "ray")
ADDRESS = "RAY_ADDRESS"
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
CLOSE_SECONDS = 70.0  # longer than the control plane waits for ranks that have not left


@dataclass(frozen=True)
class RayCluster:
    """Where Ray is, and what it gives to each process of a run.

    Args:
        address: of a running cluster, or `auto`; by default that of `RAY_ADDRESS`, else a Ray of this machine's own is
            started for the run.
        workers, servers: what each of them needs.
        placement: how Ray spreads them over its nodes, see its placement groups.
        functions: whether ranks run functions, in the actors' own processes, and not scripts.
    """

    address: str | None
    workers: Sequence[Need]
    servers: Sequence[Need] = ()
    placement: str = "PACK"
    functions: bool = False

    @classmethod
    def of_options(
        cls,
        engine: str,
        address: str | None,
        resources: str | None,
        *,
        nproc: int,
        servers: int,
        alone: bool,
    ) -> RayCluster | None:
        """What the options of `paceline run` say; None for another engine. `alone`: no other hosts were named."""
        if engine not in ENGINES:
            raise no_such("engine", engine, ENGINES)
        if engine == "local":
            for option, value in {"--address": address, "--resources": resources}.items():
                if value is not None:
                    raise PacelineError(f"{option} is for Ray.", remedy="Add --engine ray, or leave it out.")
            return None
        if not alone:
            raise PacelineError(
                "Ray itself places the processes on its nodes.",
                remedy="Leave out --nnodes; --nproc counts all of them.",
            )
        cluster = cls(address, *needs_of_option(resources, nproc, servers))
        import_ray()
        return cluster

    @property
    def needs(self) -> list[Need]:
        return [*self.workers, *self.servers]

    @contextmanager
    def connected(self) -> Iterator[None]:
        """With Ray; if nobody in this process was, until the block ends."""
        ray = import_ray()
        if self.placement not in PLACEMENTS:
            raise no_such("placement", self.placement, PLACEMENTS)
        if ray.is_initialized():
            yield
            return
        settings: dict[str, Any] = {"log_to_driver": self.functions, "logging_level": logging.WARNING}
        address = self.address or os.environ.get(ADDRESS) or "local"
        if address.startswith("ray://"):
            raise PacelineError(
                "Ray's client cannot drive a run.",
                where=f"--address or {ADDRESS}",
                remedy="Start the command on a node of the cluster, or with `ray job submit`.",
            )
        if address == "local":  # as under the local launcher, there may be more processes than cores
            cores = math.ceil(sum(need.resources.get("CPU", 0) for need in self.needs))
            settings |= {"num_cpus": max(cores, os.cpu_count() or 1), "include_dashboard": False}
            settings["_node_ip_address"] = "127.0.0.1"
        try:
            with _own_sigterm():
                ray.init(address, **settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PacelineError(
                f"There is no Ray at {address!r}: {error}",
                where=f"--address or {ADDRESS}",
                remedy="Start it with `ray start --head`, or leave the address out to have one started here.",
            ) from error
        try:
            yield
        finally:
            ray.shutdown()

    @contextmanager
    def team(self, folder: Path, *, port: int = 0, replace: int = 0, **timeouts: float) -> Iterator[Team]:
        """All ranks and their control plane as long as the block lasts.

        Args:
            folder: the run's, made before.
            port: of the control plane; 0 takes a free one.
            replace: how often, in all, a rank that was lost is started again, where Ray then has room for it.
            timeouts: see `launch`.
        """
        import ray

        timeouts = {"join_timeout": JOIN_SECONDS, **timeouts}
        seconds, secret, needs = timeouts["join_timeout"], secrets.token_bytes(32), self.needs
        started: list[Any] = []
        with self._room(needs, seconds) as group:
            try:
                beside = {"num_cpus": 0, "scheduling_strategy": _beside_the_driver()}
                plane = ray.remote(actors.ControlPlane).options(**beside)
                control = plane.remote(len(needs), secret, folder, port, timeouts)
                started.append(control)
                kind = actors.FunctionRank if self.functions else actors.ScriptRank

                def make(rank: int) -> Any:
                    started.append(_actor(kind, rank, needs[rank], group))
                    return started[-1]

                ranks = [make(rank) for rank in range(len(needs))]
                address = answer(control.address.remote(), "The control plane", seconds)
                card = card_of(address, folder, secret)
                yield Team(ranks, len(self.servers), Control(control), card, seconds, Spare(replace, make))
                with suppress(ray.exceptions.RayError):
                    ray.get(control.close.remote(), timeout=CLOSE_SECONDS)
            finally:
                for actor in started:
                    ray.kill(actor)

    @contextmanager
    def _room(self, needs: Sequence[Need], seconds: float) -> Iterator[Any]:
        """A place for every process; all or none."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group(
            [dict(need.resources) for need in needs],
            self.placement,
            bundle_label_selector=[dict(need.labels) for need in needs],
        )
        try:
            if not group.wait(seconds):
                there = ", ".join(f"{name} {amount:g}" for name, amount in sorted(ray.available_resources().items()))
                wanted = "; ".join(str({**need.resources, **need.labels}) for need in needs)
                raise PacelineError(
                    f"Ray found no room within {seconds:g} s for all {len(needs)} processes: {wanted}.",
                    cause=f"Free are {there}.",
                    remedy="Ask for less, add nodes, or wait for others to end: `ray status` shows who has what.",
                )
            yield group
        finally:
            remove_placement_group(group)


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise PacelineError(
            "Ray is not installed here.", remedy="pip install 'paceline[ray]', on every node."
        ) from error
    return ray


def _actor(kind: type, rank: int, need: Need, group: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    # A script's rank must hear that it is to end while it runs; a function is given the main thread.
    concurrent = 2 if hasattr(kind, "terminate") else 1
    return ray.remote(kind).options(**need.options, max_concurrency=concurrent, scheduling_strategy=bundle).remote(rank)


def _beside_the_driver() -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Not softly: a node that is busy would hand the control plane on, also to one that is about to go.
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray makes SIGTERM end the driver its own way; a launcher has its own, by which all that it started ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
