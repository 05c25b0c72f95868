"""Runs on a real Ray cluster of three nodes, all on this machine; and what needs no Ray at all."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline.ray
from paceline.errors import PacelineError
from paceline.ray import actors
from paceline.ray.cluster import RayCluster
from paceline.ray.needs import Need, needs_of, needs_of_option
from paceline.record import read_events
from paceline.summary import account

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_digits.py"
LONGEST_SECONDS = 280  # a guard against a hang
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # a token would be left in the user's home
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_register_timeout_seconds": "200",  # where the machine is loaded
    "RAY_health_check_timeout_ms": "60000",
    "RAY_worker_niceness": "0",  # the same: by default actors are the last to get a core
}
SCRIPT = """
import os, signal, sys
import torch
import paceline

x = torch.arange(264.0).view(132, 2) / 264
model = torch.nn.Linear(2, 1)
with paceline.Run(sys.argv[1]) as run:
    loader = run.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), micro_batch=4, epochs={epochs})
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for number, (inputs, wanted) in enumerate(loader):
        if {when}:  # in these strategies nobody goes ahead of another
            {then}
        optimizer.zero_grad()
        ((model(inputs) - wanted) ** 2).mean().backward()
        optimizer.step()
    print("rank", run.rank, "has applied", run.node.samples_applied)
"""
SAMPLES = 2 * 132
KILL = "os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
LASTING = f"""
            joins = os.environ.get("PACELINE_JOINS") == "1"
            if run.rank == 1 and not joins and number == 3: {KILL}
            if joins and number == 3: open("joined", "w").close()
            if number > 3 and os.path.exists("joined"): break"""


def test_each_process_says_what_it_needs() -> None:
    wanted = [{"GPU": 1, "accelerator_type:A100": 0.001}, {"CPU": 2, "label_selector": {"pool": "old"}}]
    fast, slow = needs_of(wanted, "workers", 1)
    assert fast.options == {"num_cpus": 0, "num_gpus": 1, "resources": {"accelerator_type:A100": 0.001}}
    assert slow == Need({"CPU": 2.0}, {"pool": "old"})
    assert needs_of_option('{"CPU": 3}', 2, 1) == ([Need({"CPU": 3.0})] * 2, [Need({"CPU": 1.0})])
    assert needs_of_option('[{"CPU": 3}, {"GPU": 1}]', 1, 1) == ([Need({"CPU": 3.0})], [Need({"GPU": 1.0})])


@pytest.mark.parametrize(
    ("resources", "telling"),
    [
        ("{CPU: 1}", "Write JSON"),
        ("3", "Write JSON"),
        ('[{"CPU": 1}, {"CPU": 1}, {"CPU": 1}]', "3 descriptions for 2 workers and 0 servers"),
        ('{"CPU": "many"}', "does not say what a process needs"),
        ('{"CPU": -1}', "does not say what a process needs"),
        ('{"CPU": 0}', "does not say what a process needs"),
        ('{"CPU": 1, "label_selector": "old"}', "does not say what a process needs"),
    ],
)
def test_needs_that_make_no_sense_are_refused(resources: str, telling: str) -> None:
    with pytest.raises(PacelineError, match=telling):
        needs_of_option(resources, 2, 0)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PacelineError, match=r"paceline\[ray\]"):
        paceline.ray.fit(print, workers=2)
    with pytest.raises(PacelineError, match=r"paceline\[ray\]"):
        RayCluster.of_options("ray", None, None, nproc=2, servers=0, alone=True)


def test_hosts_of_ones_own_and_ray_exclude_each_other() -> None:
    with pytest.raises(PacelineError, match="Leave out --nnodes"):
        RayCluster.of_options("ray", None, None, nproc=2, servers=0, alone=False)


def test_reports_outside_of_fit_are_refused() -> None:
    with pytest.raises(PacelineError, match="nobody to report to"):
        paceline.ray.report({"loss": 1.0})


def test_a_rank_tells_what_its_script_writes_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if something that the script has started lives on, and keeps its output open."""
    monkeypatch.setattr(actors, "LISTEN_SECONDS", 0.2)
    sleeper = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid); sys.exit('enough')"
    (tmp_path / "script.py").write_text(sleeper)
    environment = {"PACELINE_FOLDER": str(tmp_path / "run")}
    *heard, code = list(actors.ScriptRank(0).run(["script.py"], str(tmp_path), environment, 0.0))
    told = {stream: text for lines in heard if isinstance(lines, list) for stream, text in lines}
    os.kill(int(told["stdout"]), signal.SIGKILL)
    assert code == 1 and told["stderr"] == "enough\n" and (tmp_path / "run").is_dir()


def test_a_script_that_a_node_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"There is no script missing.py in .* ray job submit"):
        list(actors.ScriptRank(0).run(["missing.py"], str(tmp_path), {}, 0.0))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, and two nodes that differ. Its processes are gone afterwards."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'paceline[ray]'")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
        try:
            made.add_node(num_cpus=1, num_gpus=2)
            made.add_node(num_cpus=1, labels={"pool": "old"})
            ray.init(made.address, log_to_driver=False)  # once for all calls of `fit`
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture
def launched(cluster: Any, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`paceline run --engine ray` on the cluster."""

    def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from paceline.cli import main; main()", "run", "--engine", "ray"]
        command += ["--address", cluster.address, "--out", str(tmp_path / "runs"), *arguments]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=LONGEST_SECONDS,
            check=False,
        )

    return launch


def used(folder: Path) -> Any:
    """Where the samples of a run have gone."""
    return account(read_events(folder / "events"))


def test_the_same_script_runs_on_ray(launched: Any, tmp_path: Path) -> None:
    needs = '[{"CPU": 1}, {"GPU": 1}, {"CPU": 1, "label_selector": {"pool": "old"}}]'
    done = launched("--nproc", "3", "--resources", needs, str(EXAMPLE), "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\[rank 0\] \d+ rounds over 2874 samples: accuracy", done.stdout, re.MULTILINE), done.stdout
    (folder,) = (tmp_path / "runs" / "run").iterdir()
    assert "accuracy" in (folder / "logs" / "rank-0000.log").read_text()
    assert len(list((folder / "events").iterdir())) == 3
    assert not (folder / "control.journal").exists()
    assert (used(folder).applied, used(folder).in_flight, used(folder).errors) == (2874, 0, ())


def test_a_script_goes_on_when_an_actor_is_killed(launched: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(when="run.rank == number == 1", then=KILL, epochs=2))
    done = launched("--nproc", "2", "--servers", "1", "script.py", "bsp")
    assert done.returncode == 0, done.stderr
    assert re.search(r"Rank 1 on .+ was lost \(its actor died: .*\); the run went on without it\.", done.stderr)
    assert f"[rank 0] rank 0 has applied {SAMPLES}" in done.stdout


def test_an_actor_that_is_killed_is_replaced_and_joins(launched: Any, tmp_path: Path) -> None:
    """The run lasts until the newcomer has computed, however long Ray takes to start it."""
    (tmp_path / "script.py").write_text(SCRIPT.format(when="True", then=LASTING, epochs=100_000))
    done = launched("--nproc", "2", "--replace", "1", "script.py", "all-reduce")
    assert done.returncode == 0, done.stderr
    assert re.search(r"Rank 1 was lost \(its actor died: .*\); it is started again, to join the run", done.stderr)
    assert "the run went on without it" not in done.stderr
    assert {"[rank 0] rank 0", "[rank 1] rank 1"} == set(re.findall(r"\[rank \d\] rank \d", done.stdout))
    (folder,) = (tmp_path / "runs" / "run").iterdir()
    assert used(folder).errors == ()
    assert "Rank 1 takes part from round" in (folder / "events" / "rank-0000.jsonl").read_text()


def test_a_run_that_fails_ends_with_the_first_error(launched: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # Rank 0 comes to its third micro-batch only when rank 1 is lost: one fails, then the other, and nobody is left.
    fails = "sys.exit(f'{run.rank} has no more data')"
    script.write_text(SCRIPT.format(when="number == 2 - run.rank", then=fails, epochs=2))
    done = launched("--nproc", "2", "script.py", "all-reduce")
    assert done.returncode == 1, done.stderr
    last = done.stderr[done.stderr.rindex("Rank 1 on ") :]
    assert "failed first (ended with exit code 1). Its last words:\n  1 has no more data\n" in last


def training() -> Callable[[dict[str, Any]], None]:
    """A training function; made inside of another, Ray sends its code along, and this module need not be there."""

    def learn(config: dict[str, Any]) -> None:
        import ray
        import torch

        import paceline

        x = torch.arange(264.0).view(132, 2) / 264
        model = torch.nn.Linear(2, 1)
        with paceline.Run("all-reduce", join_timeout=200) as run:
            loader = run.loader(
                torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), micro_batch=4, epochs=config.get("epochs", 2)
            )
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
            for number, (inputs, wanted) in enumerate(loader):
                if run.rank == config.get("hangs") and number == 1 and "PACELINE_JOINS" not in os.environ:
                    Path(config["mark"]).write_text(ray.get_runtime_context().get_node_id())
                    threading.Event().wait()
                if "joined" in config and os.environ.get("PACELINE_JOINS") == "1" and number == 3:
                    Path(config["joined"]).touch()
                time.sleep(0.01 if "joined" in config else 0)  # others need the cores to join
                if "joined" in config and number > 3 and Path(config["joined"]).exists():
                    break
                optimizer.zero_grad()
                ((model(inputs) - wanted) ** 2).mean().backward()
                optimizer.step()
            if config.get("saves"):
                run.save()
            names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
            facts: dict[str, Any] = {name: os.environ.get(name) for name in names}
            facts |= {"applied": run.node.samples_applied, "labels": ray.get_runtime_context().get_node_labels()}
            facts |= {
                "secret": run.surroundings.secret.hex(),
                "main": threading.current_thread() is threading.main_thread(),
            }
            facts["in environment"] = "PACELINE_SECRET" in os.environ
            Path(config["out"], f"facts-{run.rank}.json").write_text(json.dumps(facts))
            paceline.ray.report({"applied": run.node.samples_applied, "rank": run.rank}, config.get("checkpoint"))

    return learn


def test_fit_trains_on_workers_of_unequal_resources(cluster: Any, tmp_path: Path) -> None:
    workers = [{"CPU": 1}, {"GPU": 1}, {"CPU": 1, "label_selector": {"pool": "old"}}, {"CPU": 1, "GPU": 1}]
    config = {"out": str(tmp_path), "saves": True}
    result = paceline.ray.fit(training(), config, workers=workers, out=tmp_path / "runs", address=cluster.address)
    assert result.metrics == {"applied": SAMPLES, "rank": 0} and result.history == [result.metrics]
    assert result.error is None and result.lost == {}
    assert result.checkpoint is not None and (result.checkpoint / "model.safetensors").exists()
    assert result.path in result.checkpoint.parents and used(result.path).applied == SAMPLES
    facts = [json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in range(4)]
    assert [each["RANK"] for each in facts] == ["0", "1", "2", "3"] and all(each["main"] for each in facts)
    assert [each["LOCAL_RANK"] for each in facts] == ["0", "0", "0", "1"]
    assert [each["LOCAL_WORLD_SIZE"] for each in facts] == ["1", "2", "1", "2"]
    gpus = facts[1]["CUDA_VISIBLE_DEVICES"]
    assert sorted(gpus.split(",")) == ["0", "1"] and facts[3]["CUDA_VISIBLE_DEVICES"] == gpus
    assert facts[2]["labels"]["pool"] == "old"
    # The secret is the same for all, no longer in their environment, and in no file that Ray or the run keeps.
    (secret,) = {each["secret"] for each in facts}
    assert not any(each["in environment"] for each in facts)
    kept = [*Path(cluster.head_node.get_logs_dir_path()).rglob("*"), *result.path.rglob("*")]
    assert len(kept) > 10 and not [file for file in kept if file.is_file() and secret.encode() in file.read_bytes()]


def test_a_failed_training_tells_why_and_what_there_was(cluster: Any, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "weights").write_text("of my own")

    def fails() -> None:
        paceline.ray.report({"loss": 0.5}, checkpoint=mine)
        raise ValueError("the loss is not what it was")

    with pytest.raises(paceline.ray.TrainingFailed, match="ValueError: the loss is not what it was") as raised:
        paceline.ray.fit(fails, out=tmp_path / "runs", address=cluster.address)
    result = raised.value.result
    assert result.metrics == {"loss": 0.5} and result.error is raised.value
    assert result.checkpoint is not None and result.checkpoint != mine
    assert (result.checkpoint / "weights").read_text() == "of my own"


def test_training_goes_on_when_a_node_is_killed(cluster: Any, tmp_path: Path) -> None:
    doomed = cluster.add_node(num_cpus=2, resources={"doomed": 2})
    mark = tmp_path / "mark"

    def kill_it_then() -> None:
        while not mark.exists() or mark.read_text() != doomed.node_id:
            time.sleep(0.05)
        cluster.remove_node(doomed, allow_graceful=False)

    killer = threading.Thread(target=kill_it_then, daemon=True)
    killer.start()
    workers = [{"CPU": 1}, {"CPU": 1, "doomed": 1}, {"CPU": 1}, {"CPU": 1, "doomed": 1}]
    config = {"out": str(tmp_path), "hangs": 1, "mark": str(mark)}
    result = paceline.ray.fit(training(), config, workers=workers, out=tmp_path / "runs", address=cluster.address)
    killer.join(LONGEST_SECONDS)
    assert sorted(result.lost) == [1, 3] and all("died" in why for why in result.lost.values())
    assert result.metrics == {"applied": SAMPLES, "rank": 0}
    assert used(result.path).errors == ()


def test_what_a_killed_node_held_is_placed_on_another_and_joins(cluster: Any, tmp_path: Path) -> None:
    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1, resources={"pool-b": 1}) for _ in "ab")}
    mark, joined = tmp_path / "mark", tmp_path / "joined"

    def kill_its_node() -> None:
        while not mark.exists() or mark.read_text() not in nodes:
            time.sleep(0.05)
        cluster.remove_node(nodes[mark.read_text()], allow_graceful=False)

    killer = threading.Thread(target=kill_its_node, daemon=True)
    killer.start()
    config = {"out": str(tmp_path), "hangs": 1, "mark": str(mark), "joined": str(joined), "epochs": 100_000}
    workers = [{"CPU": 1}, {"CPU": 1, "pool-b": 1}]
    result = paceline.ray.fit(
        training(), config, workers=workers, out=tmp_path / "runs", address=cluster.address, replace=1
    )
    killer.join(LONGEST_SECONDS)
    assert result.lost == {} and joined.exists() and result.metrics is not None
    facts = [json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in range(2)]
    assert all(fact["applied"] > 0 for fact in facts), "each looks when it leaves its own loop"
    assert used(result.path).errors == ()


def test_without_room_the_error_says_what_is_there(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"no room within 1 s for all 2 processes.+'GPU': 9.+Free are CPU \d"):
        paceline.ray.fit(
            print, workers=[{"CPU": 1}, {"GPU": 9}], out=tmp_path / "runs", address=cluster.address, join_timeout=1.0
        )
