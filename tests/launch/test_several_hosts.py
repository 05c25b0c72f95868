"""Hosts with addresses of their own, as network namespaces that the tests make and that go with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from paceline.race.links import EmulatedHosts, Link, reason_against
from paceline.record import read_events
from paceline.summary import account

pytestmark = pytest.mark.skipif(bool(reason_against()), reason=f"no hosts can be emulated: {reason_against()}")

# Between two of the first three hosts 10 ms and 1 Gbit/s; to the fourth 50 ms and 100 Mbit/s.
LINKS = [*[Link(1e9, 0.005)] * 3, Link(1e8, 0.045)]
PORT = 29500
LONGEST_SECONDS = 280  # a guard against a hang
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import paceline

x = torch.arange(264.0).view(132, 2) / 264
model = torch.nn.Linear(2, 1)
with paceline.Run("abs-sgd", out=sys.argv[1], name="mine", join_timeout=100) as run:
    loader = run.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), micro_batch=4, epochs=2)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for number, (inputs, wanted) in enumerate(loader):
        if sys.argv[2] == f"rank {run.rank} dies" and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        ((model(inputs) - wanted) ** 2).mean().backward()
        optimizer.step()
    facts = {"world": run.world_size, "applied": run.node.samples_applied, "final": run.node.parameters.tolist()}
    facts |= {"host": run.surroundings.host, "local": os.environ["LOCAL_RANK"], "folder": str(run.folder)}
    facts["secret"] = "PACELINE_SECRET" in os.environ
    Path(sys.argv[1], f"facts-{run.rank}.json").write_text(json.dumps(facts))
"""
PACELINE = [sys.executable, "-c", "from paceline.cli import main; main()"]
SECRET = "ab" * 32
Start = Callable[..., list[subprocess.CompletedProcess[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command on every host, and wait for all. Nothing of them, nor of the network, stays behind."""
    with contextlib.ExitStack() as stack:

        def run(
            links: Sequence[Link], command_of: Callable[[int, str], list[str]]
        ) -> list[subprocess.CompletedProcess[str]]:
            hosts = stack.enter_context(EmulatedHosts(links))
            environment = {
                key: value for key, value in os.environ.items() if not key.startswith(("PACELINE_", "GLOO_"))
            }
            started = []
            for host in range(len(links)):
                pipe = subprocess.PIPE
                process = subprocess.Popen(
                    hosts.command(host, command_of(host, hosts.addresses[0])),
                    stdout=pipe,
                    stderr=pipe,
                    text=True,
                    cwd=tmp_path,
                    env=environment | {"OMP_NUM_THREADS": "1", "PACELINE_SECRET": SECRET},
                    start_new_session=True,
                )
                stack.callback(end, process)
                started.append(process)
            said = [process.communicate(timeout=LONGEST_SECONDS) for process in started]
            return [
                subprocess.CompletedProcess(process.args, process.returncode, *words)
                for process, words in zip(started, said, strict=True)
            ]

        yield run


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def facts_of(tmp_path: Path, world: int) -> list[dict[str, object]]:
    return [json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in range(world)]


def test_a_run_over_four_hosts_of_unequal_size(start: Start, script: Path, tmp_path: Path) -> None:
    nproc = [1, 2, 1, 1]

    def command(host: int, first: str) -> list[str]:
        options = ["--nnodes", "4", "--node-rank", str(host), "--master", first, "--nproc", str(nproc[host])]
        # One is told its interface; the others find the one that leads to the first host.
        options += ["--interface", "eth0"] if host == 2 else []
        return [*PACELINE, "run", *options, "--out", str(tmp_path), "--name", "run", str(script), str(tmp_path), ""]

    done = start(LINKS, command)
    assert [each.returncode for each in done] == [0] * 4, done
    facts = facts_of(tmp_path, 5)
    assert {(fact["world"], fact["applied"], fact["secret"]) for fact in facts} == {(5, 264, False)}
    assert [fact["host"] for fact in facts] == [f"10.231.0.{number}" for number in (1, 2, 2, 3, 4)]
    assert [fact["local"] for fact in facts] == ["0", "0", "1", "0", "0"]
    assert all(fact["final"] == facts[0]["final"] for fact in facts)
    assert "Node rank 1 of 4: ranks 1, 2 of 5." in done[1].stdout
    folder = Path(str(facts[0]["folder"]))
    accounts = account(read_events(folder / "events"))
    assert (accounts.computed, accounts.applied, accounts.errors) == (264, 264, ())
    assert {path.name for path in (folder / "logs").iterdir()} == {f"rank-{rank:04d}.log" for rank in range(5)}
    assert SECRET not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def test_a_run_goes_on_without_a_host_whose_ranks_have_died(start: Start, script: Path, tmp_path: Path) -> None:
    first, second = two_hosts_of_which_one_dies(start, script, tmp_path)
    assert second.returncode == 128 + signal.SIGKILL and first.returncode == 0, first
    assert "Rank 1 failed first (ended by SIGKILL). Its last words:" in second.stderr
    assert f"Rank 1 on {os.uname().nodename} was lost (ended by SIGKILL); the run went on without it." in first.stderr


def test_a_death_on_one_host_is_told_on_all_with_its_place(start: Start, script: Path, tmp_path: Path) -> None:
    frail = "from paceline.strategies.all_reduce import AllReduce\nclass Frail(AllReduce):\n    survives = False\n"
    script.write_text(SCRIPT.replace("\nx =", f"{frail}\nx =").replace('"abs-sgd"', "Frail()"))
    first, second = two_hosts_of_which_one_dies(start, script, tmp_path)
    assert second.returncode == 128 + signal.SIGKILL and first.returncode == 1
    assert "Rank 1 failed first (ended by SIGKILL). Its last words:" in second.stderr
    assert f"Rank 1 on {os.uname().nodename} failed first (ended by SIGKILL). Its log is there." in first.stderr
    assert "The run cannot go on without a lost rank (rank 1: ended by SIGKILL)" in first.stderr


def two_hosts_of_which_one_dies(start: Start, script: Path, tmp_path: Path) -> list[subprocess.CompletedProcess[str]]:
    def command(host: int, first: str) -> list[str]:
        options = ["--nnodes", "2", "--node-rank", str(host), "--master", f"{first}:{PORT}", "--out", str(tmp_path)]
        return [*PACELINE, "run", *options, str(script), str(tmp_path), "rank 1 dies"]

    return start([Link(), Link()], command)


def test_torchrun_over_two_hosts_of_unequal_size(start: Start, script: Path, tmp_path: Path) -> None:
    """Without a word on interfaces: the machine's name leads nowhere on these hosts, as on many real ones."""

    def command(host: int, first: str) -> list[str]:
        options = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(host + 1)]
        options += ["--master-addr", first, "--master-port", str(PORT)]
        return [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path), ""]

    done = start([Link(), Link()], command)
    assert [each.returncode for each in done] == [0] * 2, done
    facts = facts_of(tmp_path, 3)
    assert {(fact["world"], fact["applied"]) for fact in facts} == {(3, 264)}
    assert [fact["host"] for fact in facts] == [f"10.231.0.{number}" for number in (1, 2, 2)]
