"""One script, unchanged: alone, under `paceline run` and under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.record import read_events
from paceline.summary import account

SCRIPT = """
import json, sys
from pathlib import Path
import torch
import paceline

x = torch.arange(66.0).view(33, 2) / 66
y = x.sum(1, keepdim=True)
model = torch.nn.Linear(2, 1)
with paceline.Run("abs-sgd", out=sys.argv[1], name="mine", join_timeout=60) as run:
    loader = run.loader(torch.utils.data.TensorDataset(x, y), micro_batch=4, epochs=2)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for inputs, wanted in loader:
        optimizer.zero_grad()
        ((model(inputs) - wanted) ** 2).mean().backward()
        optimizer.step()
    facts = {"folder": str(run.folder), "world": run.world_size, "applied": run.node.samples_applied}
    facts["final"] = run.node.parameters.tolist()
    Path(sys.argv[1], f"facts-{run.rank}.json").write_text(json.dumps(facts))
print("the last line of rank", run.rank)
"""
LAUNCHERS = {
    "alone": [],
    "paceline": ["-m", "paceline.cli", "run", "--nproc", "2", "--name", "mine", "--out", "OUT"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_script_runs_everywhere(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    out.mkdir()
    prefix = [part.replace("OUT", str(out)) for part in LAUNCHERS[launcher]]
    if launcher == "paceline":
        prefix = ["-c", "from paceline.cli import main; main()", *prefix[2:]]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    process = subprocess.Popen(
        [sys.executable, *prefix, str(script), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"},
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        said, complained = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nothing stays behind, also when it hangs
        process.wait()
    assert process.returncode == 0, said + complained
    world = 1 if launcher == "alone" else 2
    facts = [json.loads((out / f"facts-{rank}.json").read_text()) for rank in range(world)]
    assert all(fact["final"] == facts[0]["final"] for fact in facts)
    assert [(fact["world"], fact["applied"]) for fact in facts] == [(world, 66)] * world
    folder = Path(facts[0]["folder"])
    assert folder.parent == out / "mine", "the run's folder is OUT/NAME/TIME"
    accounts = account(read_events(folder / "events"))
    assert (accounts.computed, accounts.applied, accounts.errors) == (66, 66, ())
    for rank in range(world):
        assert f"the last line of rank {rank}" in said
    if launcher == "paceline":
        assert f"The run's folder: {folder}" in said
        assert "the last line of rank 1" in (folder / "logs" / "rank-0001.log").read_text()
