"""Ray Train with DDP: a local Ray, a TorchTrainer of four workers for each race."""

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
from parts.peers.lane import LAUNCHED, TRACES, Lane
from parts.peers.torch_loops import ddp


def train(config: dict[str, Any]) -> None:
    """What a worker of Ray runs: the loop of DDP around a model that Ray has prepared."""
    torch.set_num_threads(1)
    rank, folder = get_context().get_world_rank(), Path(config["folder"])
    lane = Lane(Race(**config["race"]), rank, load_workload(), folder)
    lane.rest_before_sending()
    ddp(lane, prepare_model(lane.model, parallel_strategy_kwargs={"gradient_as_bucket_view": True}))
    lane.say_over()


def main() -> None:
    folder = Path(sys.argv[2])
    races = json.loads((folder / "races.json").read_text())
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a token would be left in the user's home; nobody else is on this network
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "300"  # a loaded machine needs longer than usual
    ours = ("PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", LAUNCHED, TRACES)
    kept = [*ours, *(name for name in os.environ if name.startswith("RAY_"))]
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "ray"),
        runtime_env={"env_vars": {name: os.environ[name] for name in kept}},
    )
    for number, race in enumerate(races):
        TorchTrainer(
            train,
            train_loop_config={"race": race, "folder": str(folder / str(number))},
            scaling_config=ScalingConfig(num_workers=WORKERS),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(storage_path=str(folder / "results")),
        ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
