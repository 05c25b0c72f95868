"""Ray Train with DDP: a local Ray, and one TorchTrainer of four workers for all races of a session.

Ray gets its settings from the environment, which its processes inherit: a runtime environment would be made anew for
each worker, and workers that Ray has started in advance could not be used.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from parts.peers.course import WORKERS, Race, load_workload
from parts.peers.lane import Lane
from parts.peers.sessions import SHARE, take_share, wake_soon
from parts.peers.torch_loops import ddp

CONTROLLER = 1  # Ray Train's own actor, beside the workers
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # a token would be left in the user's home; nobody else is on this network
    "RAY_USAGE_STATS_ENABLED": "0",  # there is nobody to report to
    "RAY_worker_niceness": "0",  # by default its workers give way to all others; as everybody else here, they do not
    # A loaded machine needs longer than usual.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_worker_register_timeout_seconds": "300",
}


def train(config: dict[str, Any]) -> None:
    """What a worker of Ray runs: the loop of DDP around a model that Ray has prepared, race after race."""
    take_share(os.environ[SHARE])
    wake_soon()
    torch.set_num_threads(1)
    rank, folder, workload = get_context().get_world_rank(), Path(config["folder"]), load_workload()
    for number, race in enumerate(config["races"]):
        lane = Lane(Race(**race), rank, workload, folder / str(number))
        lane.rest_before_sending()
        ddp(lane, prepare_model(lane.model, parallel_strategy_kwargs={"gradient_as_bucket_view": True}))
        lane.say_over()


def main() -> None:
    folder = Path(sys.argv[2])
    os.environ |= SETTINGS
    ray.init(
        num_cpus=WORKERS + CONTROLLER,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "ray"),
    )
    TorchTrainer(
        train,
        train_loop_config={"races": json.loads((folder / "races.json").read_text()), "folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(folder / "results")),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
