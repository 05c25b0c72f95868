"""A script of its own on several real ranks of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import torch.distributed as dist


def launch(script: str, arguments: Sequence[str], world_size: int) -> None:
    """Run it as every rank, with one thread each, and wait for all of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen([sys.executable, script, *arguments], env=common | {"RANK": str(rank)})
        for rank in range(world_size)
    ]
    try:
        failed = [rank for rank, process in enumerate(ranks) if process.wait()]
    finally:
        for process in ranks:
            process.kill()
        del store
    if failed:
        raise SystemExit(f"rank {failed[0]} failed")


def own_control_plane(name: str) -> None:
    """For one of several runs of the same processes, after another."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = name
