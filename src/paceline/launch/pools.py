"""Hosts of a mixed cluster, in pools of like ones: what the templates for Slurm and Kubernetes are made from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from paceline.errors import PacelineError
from paceline.options import read_options, split_name

SHAPE = re.compile(r"(\d+)x(\d+)")
NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")  # as Kubernetes wants it, with room for what it appends
GIGABYTES = "memory"


@dataclass(frozen=True)
class Pool:
    """Hosts that are alike.

    Args:
        hosts: how many.
        nproc: processes on each that learn.
        servers: further ones that serve, of each host.
        gpus: of each host that the job gets.
        cpus: cores of each host; 0 for one a process.
        memory: gigabytes of each host; 0 to leave it to the cluster.
        kind: of the GPUs: with Slurm the type of the resource `gpu`, on Kubernetes the resource's name if it is not
            `nvidia.com/gpu`.
        where: the Slurm partition, or the Kubernetes node label as `label=value`.

    >>> Pool.parse("2x4:gpus=4:where=fast")
    Pool(hosts=2, nproc=4, servers=0, gpus=4, cpus=0, memory=0, kind='', where='fast')
    """

    hosts: int
    nproc: int
    servers: int = 0
    gpus: int = 0
    cpus: int = 0
    memory: int = 0
    kind: str = ""
    where: str = ""

    @classmethod
    def parse(cls, text: str) -> Pool:
        name, settings = split_name(text)
        shape = SHAPE.fullmatch(name)
        if shape is None or not int(shape[1]) or not int(shape[2]):
            raise PacelineError(
                f"{text!r} is no pool of hosts.",
                where="--pool",
                remedy="Write hosts x processes, then options: --pool 2x8:gpus=8 --pool 4x2:cpus=16.",
            )
        known = {key: value for key, value in asdict(cls(1, 1)).items() if key not in ("hosts", "nproc")}
        pool = cls(int(shape[1]), int(shape[2]), **read_options(settings, known, "pool", name))
        for key in ("servers", "gpus", "cpus", "memory"):
            if getattr(pool, key) < 0:
                raise PacelineError(f"A pool cannot have {key}={getattr(pool, key)}.", where="--pool")
        return pool

    @property
    def cores(self) -> int:
        return self.cpus or self.nproc + self.servers

    def options(self, node_rank: str, master: str, nnodes: int) -> list[str]:
        """Of `paceline run` on a host of the pool."""
        chosen = ["--nnodes", str(nnodes), "--node-rank", node_rank, "--master", master, "--nproc", str(self.nproc)]
        return chosen + (["--servers", str(self.servers)] if self.servers else [])


@dataclass(frozen=True)
class Job:
    """What a template is for.

    Args:
        name: of the job.
        pools: its hosts; the first one of the first pool is the run's first host.
        script: that is trained, and its arguments.
        restarts: how often a run that has failed is started again.
    """

    name: str
    pools: Sequence[Pool]
    script: Sequence[str]
    restarts: int = 0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise PacelineError(
                f"{self.name!r} is no name for a job.",
                where="--name",
                remedy="Take up to 32 small letters, digits and dashes, beginning with a letter.",
            )
        if not self.pools:
            raise PacelineError("The job has no hosts.", where="--pool", remedy="For example --pool 2x8:gpus=8.")

    @property
    def nnodes(self) -> int:
        return sum(pool.hosts for pool in self.pools)

    def first_node_ranks(self) -> list[int]:
        """The node rank of the first host of each pool."""
        return [sum(pool.hosts for pool in self.pools[:place]) for place in range(len(self.pools))]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.script[0]).name
