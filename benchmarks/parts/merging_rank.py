"""One rank of `merging`: merging_rank.py WORKLOAD STRATEGY MICRO_BATCH SAMPLES FOLDER

Trains on so many rows and writes down what it needed."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline import workloads
from paceline.workloads.sparse_rows import SparseSamples


def main() -> None:
    text, strategy, micro_batch, samples, folder = sys.argv[1:]
    torch.set_num_threads(1)
    workload = workloads.load(text)
    rows = SparseSamples(*workload.train[: int(samples)])
    model = workload.build_model(0)
    with paceline.Run(strategy) as run:
        loader = run.loader(rows, micro_batch=int(micro_batch), epochs=1, collate_fn=rows.collate)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        computing = 0.0
        for batch in loader:
            began = time.perf_counter()
            optimizer.zero_grad()
            workload.loss(model, batch).backward()
            computing += time.perf_counter() - began
            optimizer.step()
    found = {
        "rank": run.rank,
        "parameters": sum(p.numel() for p in model.parameters()),
        "computing": computing,
        "cpu": time.process_time(),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "folder": str(run.folder),
        "check": float(torch.cat([p.detach().flatten()[::1009] for p in model.parameters()]).double().sum()),
    }
    (Path(folder) / f"{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
