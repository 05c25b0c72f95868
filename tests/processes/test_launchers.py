"""One script, unchanged: alone, under `paceline run` and under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
with paceline.Run(sys.argv[2], out=sys.argv[1], name="mine", join_timeout=60, servers=int(sys.argv[3])) as run:
    loader = run.loader(torch.utils.data.TensorDataset(x, y), micro_batch=4, epochs=2)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    given = 0
    for inputs, wanted in loader:
        given += 1
        optimizer.zero_grad()
        ((model(inputs) - wanted) ** 2).mean().backward()
        optimizer.step()
    facts = {"folder": str(run.folder), "world": run.world_size, "applied": run.node.samples_applied}
    facts |= {"given": given, "serves": run.node.serves, "final": run.node.parameters.tolist()}
    Path(sys.argv[1], f"facts-{run.rank}.json").write_text(json.dumps(facts))
print("the last line of rank", run.rank)
"""
LAUNCHERS = {
    "alone": [],
    "paceline": [
        "-c",
        "from paceline.cli import main; main()",
        "run",
        "--nproc",
        "2",
        "--name",
        "mine",
        "--out",
        "OUT",
    ],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def launched(prefix: list[str], folder: Path, world: int, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """What the ranks of the script wrote, and all that was printed."""
    script, out = folder / "script.py", folder / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    process = subprocess.Popen(
        [sys.executable, *(part.replace("OUT", str(out)) for part in prefix), str(script), str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"},
        cwd=folder,
        start_new_session=True,
    )
    try:
        said, complained = process.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nothing stays behind, also when it hangs
        process.wait()
    assert process.returncode == 0, said + complained
    facts = [json.loads((out / f"facts-{rank}.json").read_text()) for rank in range(world)]
    assert all(fact["final"] == facts[0]["final"] and fact["applied"] == 66 for fact in facts)
    books = account(read_events(Path(facts[0]["folder"]) / "events"))
    assert (books.computed, books.applied, books.errors) == (66, 66, ())
    return facts, said


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_script_runs_everywhere(launcher: str, tmp_path: Path) -> None:
    world = 1 if launcher == "alone" else 2
    facts, said = launched(LAUNCHERS[launcher], tmp_path, world, "abs-sgd", "0")
    assert [fact["world"] for fact in facts] == [world] * world
    folder = Path(facts[0]["folder"])
    assert folder.parent == tmp_path / "out" / "mine", "the run's folder is OUT/NAME/TIME"
    for rank in range(world):
        assert f"the last line of rank {rank}" in said
    if launcher == "paceline":
        assert f"The run's folder: {folder}" in said
        assert "the last line of rank 1" in (folder / "logs" / "rank-0001.log").read_text()


def test_under_torchrun_the_last_rank_serves(tmp_path: Path) -> None:
    prefix = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    facts, _ = launched(prefix, tmp_path, 3, "ssp", "1")
    assert [fact["serves"] for fact in facts] == [False, False, True] and facts[2]["given"] == 0
