"""The command line: its options are frozen, and every mistake gets one clear paragraph and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline import __version__, cli
from paceline.strategies import STRATEGIES

RESULT = [
    "strategy",
    "backend",
    "seconds",
    "share_of_ideal",
    "time_to_target",
    "final_metric",
    "final_loss",
    "rounds",
    "samples_computed",
    "samples_applied",
    "samples_discarded",
    "bytes_sent",
    "workers",
]
LIMIT = ["share", "hardware", "batch", "statistics", "noise_scale", "comm_seconds", "best_batch", "seconds"]
WORKER = ["rank", "speed", "samples", "computing", "communicating", "idle"]
RACE = ["results", "ideal_samples_per_second", "speeds", "workload", "seed"]
OPTIONS = {
    "race": [
        "--backend",
        "--cluster",
        "--data",
        "--json",
        "--lr",
        "--micro-batch-seconds",
        "--model",
        "--optimizer",
        "--out",
        "--seconds",
        "--seed",
        "--servers",
        "--speeds",
        "--strategies",
        "--target",
        "--workload",
    ],
    "export": [],
    "doctor": [
        "--data",
        "--host",
        "--json",
        "--listen",
        "--model",
        "--nproc",
        "--peers",
        "--port",
        "--secret-file",
        "--workload",
        "--write",
    ],
    "limit": [
        "--comm-seconds",
        "--json",
        "--micro-batch",
        "--micro-batch-seconds",
        "--noise-scale",
        "--speeds",
    ],
    "report": ["--markdown", "--open", "--png", "--trace"],
    "run": [
        "--address",
        "--engine",
        "--heartbeat-timeout",
        "--interface",
        "--join",
        "--join-timeout",
        "--master",
        "--name",
        "--nnodes",
        "--node-rank",
        "--nproc",
        "--out",
        "--port",
        "--replace",
        "--report",
        "--resources",
        "--restarts",
        "--return-timeout",
        "--secret-file",
        "--servers",
        "--stuck-timeout",
    ],
    "simulate": [
        "--cluster",
        "--json",
        "--micro-batch",
        "--micro-batch-seconds",
        "--parameters",
        "--report",
        "--seconds",
        "--seed",
        "--servers",
        "--speeds",
        "--strategy",
        "--trace",
        "--workers",
    ],
    "strategies": [],
    "template": [
        "--dry-run",
        "--form",
        "--image",
        "--name",
        "--out",
        "--pool",
        "--restarts",
        "--secret",
        "--secret-file",
        "--time",
    ],
    "topology": [
        "--budget",
        "--cluster",
        "--graph",
        "--json",
        "--parameters",
        "--plot",
        "--probability",
        "--seed",
        "--workers",
    ],
}


def paceline(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_options_are_what_they_were() -> None:
    group: Any = typer.main.get_command(cli.app)
    found = {
        name: sorted(option for each in command.params if each.param_type_name == "option" for option in each.opts)
        for name, command in group.commands.items()
    }
    assert {name: [option for option in options if option != "--help"] for name, options in found.items()} == OPTIONS


def test_help_answers_without_importing_torch() -> None:
    commands = [[], *([command] for command in OPTIONS)]
    code = f"""
import sys, contextlib, io
from paceline.cli import main
for command in {commands!r}:
    sys.argv = ["paceline", *command, "--help"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        main()
    assert "Usage:" in said.getvalue()
sys.argv = ["paceline", "strategies"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_simulate_needs_no_torch(tmp_path: Path) -> None:
    code = """
import sys
from paceline.cli import main
sys.argv = ["paceline", "simulate", "--speeds", "1,0.5", "--seconds", "1"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "abs-sgd on 2 workers" in done.stdout


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert paceline(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"


def test_the_strategies_are_all_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert paceline(monkeypatch, "strategies") == 0
    said = capsys.readouterr().out
    for name in STRATEGIES:
        assert any(line.startswith(f"{name} ") for line in said.splitlines())
    assert "delay_cure=auto" in said


SIMULATED = ("race", "--backend", "simulated")
LIMITED = ("limit", "--speeds", "1,0.5")
KUBERNETES = ("template", "kubernetes", "a.py", "--image", "me/train:1")
HOSTS = ("run", "--nnodes", "2", "--node-rank", "1", "--master", "10.0.0.1")
MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a template for nothing known": (("template", "slrum", "a.py", "--pool", "1x1"), ("'slrum'", "'slurm'")),
    "no pool of hosts": (("template", "slurm", "a.py", "--pool", "2"), ("'2' is no pool", "2x8:gpus=8")),
    "unknown option of a pool": (("template", "slurm", "a.py", "--pool", "2x2:gpu=1"), ("'gpu'", "'gpus'")),
    "no name for a job": (("template", "slurm", "a.py", "--pool", "1x1", "--name", "A b"), ("'A b' is no name",)),
    "containers without an image": (("template", "kubernetes", "a.py", "--pool", "1x1"), ("--image",)),
    "unknown form": ((*KUBERNETES, "--pool", "1x1", "--form", "pod"), ("'pod'", "jobset, plain")),
    "no label of nodes": ((*KUBERNETES, "--pool", "1x1:where=fast"), ("where=fast names no node label",)),
    "no resource": ((*KUBERNETES, "--pool", "1x1:gpus=1:kind=a100"), ("kind=vendor.com/gpu",)),
    "unknown engine": (("run", "--engine", "rya", __file__), ("'rya'", "Possible: local, ray")),
    "an address without Ray": (("run", "--address", "auto", __file__), ("--address is for Ray", "--engine ray")),
    "no resources": (("run", "--engine", "ray", "--resources", "GPU=1", __file__), ("GPU=1 says no", "Write JSON")),
    "one host with a master": (("run", "--master", "a:1", __file__), ("--master is for several hosts", "--nnodes")),
    "several hosts without a master": (("run", "--nnodes", "2", __file__), ("2 hosts need --master and --node-rank",)),
    "a node rank too many": (
        ("run", "--nnodes", "2", "--node-rank", "2", "--master", "a", __file__),
        ("--node-rank 2",),
    ),
    "a secret for hosts that is not there": ((*HOSTS, "--secret-file", "no-such-file", __file__), ("openssl rand",)),
    "a secret that others may read": ((*HOSTS, "--secret-file", __file__, __file__), ("Others may read", "chmod 600")),
    "unknown strategy": ((*SIMULATED, "--strategies", "abs-sdg"), ("'abs-sdg'", "Did you mean 'abs-sgd'?")),
    "no strategy": ((*SIMULATED, "--strategies", ","), ("no strategy",)),
    "unknown workload": ((*SIMULATED, "--workload", "digit"), ("'digit'", "digits")),
    "unknown model": ((*SIMULATED, "--workload", "fashion-mnist", "--model", "resnet"), ("'resnet'", "'resnet-18'")),
    "model of another workload": ((*SIMULATED, "--model", "lenet-5"), ("workload digits", "Possible: mlp")),
    "unknown optimizer": ((*SIMULATED, "--optimizer", "adam"), ("'adam'", "'adamw'")),
    "learning rate zero": ((*SIMULATED, "--lr", "0"), ("learning rate of 0",)),
    "learning rate below zero": ((*SIMULATED, "--lr=-1"), ("learning rate of -1",)),
    "learning rate not a number": ((*SIMULATED, "--lr", "nan"), ("learning rate of nan",)),
    "infinite learning rate": ((*SIMULATED, "--lr", "inf"), ("learning rate of inf",)),
    "unknown option of a strategy": ((*SIMULATED, "--strategies", "abs-sgd:cure=none"), ("'cure'", "'delay_cure'")),
    "impossible option of a strategy": ((*SIMULATED, "--strategies", "abs-sgd:delay_cure=x"), ("delay_cure='x'",)),
    "option of a strategy that is no number": ((*SIMULATED, "--strategies", "all-reduce:micro_batches=x"), ("'x'",)),
    "speed zero": ((*SIMULATED, "--speeds", "1,0"), ("speed 0", "--speeds 1,0")),
    "speed below zero": ((*SIMULATED, "--speeds=-1"), ("speed -1",)),
    "speed not a number": ((*SIMULATED, "--speeds", "nan"), ("speed nan",)),
    "infinite speed": ((*SIMULATED, "--speeds", "1,inf"), ("speed inf",)),
    "speed a word": ((*SIMULATED, "--speeds", "abc"), ("'abc'",)),
    "no speeds": ((*SIMULATED, "--speeds", ""), ("''",)),
    "seconds zero": ((*SIMULATED, "--seconds", "0"), ("0 seconds",)),
    "seconds not a number": ((*SIMULATED, "--seconds", "nan"), ("nan seconds",)),
    "endless": ((*SIMULATED, "--seconds", "inf"), ("inf seconds",)),
    "micro-batch of no time": ((*SIMULATED, "--micro-batch-seconds", "0"), ("more than zero seconds",)),
    "micro-batch of endless time": ((*SIMULATED, "--micro-batch-seconds", "inf"), ("seconds",)),
    "backend unknown": (("race", "--backend", "ray"), ("'ray'", "processes, simulated")),
    "json into a missing folder": ((*SIMULATED, "--json", "missing/x.json"), ("missing/x.json", "--json")),
    "json into a folder": ((*SIMULATED, "--json", "."), ("--json",)),
    "both speeds and cluster": ((*SIMULATED, "--speeds", "1", "--cluster", "good.toml"), ("either",)),
    "missing cluster file": ((*SIMULATED, "--cluster", "none.toml"), ("none.toml",)),
    "cluster file with a wrong value": ((*SIMULATED, "--cluster", "bad.toml"), ("bad.toml, line 5, key speed",)),
    "cluster file with an unknown key": (
        (*SIMULATED, "--cluster", "odd.toml"),
        ("odd.toml, line 4, key sped", "speed?"),
    ),
    "cluster file that is no TOML": ((*SIMULATED, "--cluster", "no.toml"), ("no.toml", "line 2")),
    "script missing": (("run", "nowhere.py"), ("nowhere.py",)),
    "simulate: unknown strategy": (("simulate", "--speeds", "1", "--strategy", "x"), ("'x'", "all-reduce")),
    "simulate: no cluster": (("simulate",), ("either",)),
    "simulate: seconds zero": (("simulate", "--speeds", "1", "--seconds", "0"), ("0 seconds",)),
    "simulate: endless": (("simulate", "--speeds", "1", "--seconds", "inf"), ("inf seconds",)),
    "limit: no workers": (("limit", "--noise-scale", "500"), ("no workers", "--speeds")),
    "limit: speed zero": (("limit", "--speeds", "1,0", "--noise-scale", "500"), ("speed 0",)),
    "limit: speed beyond all devices": (("limit", "--speeds", "1e300", "--noise-scale", "1"), ("samples a second",)),
    "limit: no noise scale": (LIMITED, ("--noise-scale", "race")),
    "limit: noise scale below zero": ((*LIMITED, "--noise-scale=-1"), ("noise scale of -1",)),
    "limit: noise scale not a number": ((*LIMITED, "--noise-scale", "nan"), ("noise scale of nan",)),
    "limit: communication below zero": (
        (*LIMITED, "--noise-scale", "1", "--comm-seconds=-0.1"),
        ("all-reduce of -0.1",),
    ),
    "limit: communication not a number": (
        (*LIMITED, "--noise-scale", "1", "--comm-seconds", "nan"),
        ("all-reduce of nan",),
    ),
    "limit: communication without end": (
        (*LIMITED, "--noise-scale", "1", "--comm-seconds", "inf"),
        ("all-reduce of inf",),
    ),
    "limit: communication in the wrong unit": (
        (*LIMITED, "--noise-scale", "1", "--comm-seconds", "1e9"),
        ("a unit is wrong",),
    ),
    "limit: micro-batch of no time": (
        (*LIMITED, "--noise-scale", "1", "--micro-batch-seconds", "0"),
        ("more than zero seconds",),
    ),
    "limit: json": ((*LIMITED, "--noise-scale", "1", "--json", "missing/x.json"), ("missing/x.json",)),
    "topology: unknown graph": (("topology", "--graph", "rign", "--workers", "4"), ("'rign'", "Did you mean 'ring'?")),
    "topology: no workers": (("topology", "--graph", "ring"), ("how many workers", "--workers")),
    "topology: prime torus": (("topology", "--graph", "torus", "--workers", "7"), ("7 workers", "prime", "ring")),
    "topology: budget zero": (("topology", "--workers", "4", "--budget", "0"), ("budget of 0",)),
    "topology: budget above one": (("topology", "--workers", "4", "--budget", "1.5"), ("budget of 1.5",)),
    "topology: budget not a number": (("topology", "--workers", "4", "--budget", "nan"), ("budget of nan",)),
    "topology: probability without chance": (
        ("topology", "--workers", "4", "--probability", "0.5"),
        ("Only an erdos-renyi",),
    ),
    "topology: probability too small": (
        ("topology", "--graph", "erdos-renyi", "--workers", "9", "--probability", "0.01"),
        ("None of 100", "ln n / n"),
    ),
    "topology: cluster without a graph": (("topology", "--cluster", "good.toml"), ("good.toml", "[graph]", "--graph")),
    "topology: graph in two parts": (
        ("topology", "--cluster", "parts.toml"),
        ("parts.toml, line 5, key edges", "{0, 1} and {2, 3}"),
    ),
    "topology: seed for edges": (("topology", "--cluster", "pair.toml", "--seed", "1"), ("--seed", "by name")),
    "topology: edges for other workers": (("topology", "--cluster", "pair.toml", "--workers", "3"), ("not connected",)),
    "topology: plot of another kind": (("topology", "--workers", "4", "--plot", "x.pdf"), ("x.pdf", ".svg or .png")),
    "topology: plot into a missing folder": (
        ("topology", "--workers", "4", "--plot", "missing/x.svg"),
        ("missing/x.svg", "--plot"),
    ),
    "topology: json": (("topology", "--workers", "4", "--json", "missing/x.json"), ("missing/x.json", "--json")),
    "doctor: unknown workload": (("doctor", "--workload", "digit"), ("'digit'", "digits")),
    "doctor: model of another workload": (("doctor", "--model", "lenet-5"), ("workload digits", "Possible: mlp")),
    "doctor: no address": (("doctor", "--peers", "gpu-2"), ("'gpu-2'", "host:port", "--listen")),
    "doctor: no port": (("doctor", "--peers", "gpu-2:70000"), ("'gpu-2:70000'",)),
    "doctor: no peer": (("doctor", "--peers", ","), ("no peer",)),
    "doctor: no secret": (("doctor", "--peers", "a:1", "--secret-file", "none"), ("no secret in none", "--listen")),
    "doctor: a secret too short": (("doctor", "--peers", "a:1", "--secret-file", "short"), ("no secret", "openssl")),
    "doctor: a secret for all to read": (("doctor", "--peers", "a:1", "--secret-file", "open"), ("chmod 600 open",)),
    "doctor: both sides at once": (("doctor", "--listen", "--peers", "a:1"), ("either --listen or --peers",)),
    "doctor: an address of another machine": (
        ("doctor", "--listen", "--host", "192.0.2.1", "--secret-file", "made"),
        ("Cannot listen on 192.0.2.1",),
    ),
    "doctor: cluster file into a folder": (("doctor", "--write", "."), ("--write",)),
    "doctor: json": (("doctor", "--json", "missing/x.json"), ("missing/x.json", "--json")),
    "simulate: json": (("simulate", "--speeds", "1", "--json", "missing/x.json"), ("missing/x.json",)),
}
FILES = {
    "good.toml": "micro_batch_seconds = 0.1\n[[devices]]\nspeed = 1\n",
    "bad.toml": "micro_batch_seconds = 0.1\n\n[[devices]]\ncount = 2\nspeed = -1\n",
    "odd.toml": "micro_batch_seconds = 0.1\n\n[[devices]]\nsped = 1\n",
    "parts.toml": "micro_batch_seconds = 0.1\n[[devices]]\ncount = 4\n[graph]\nedges = [[0, 1], [2, 3]]\n",
    "pair.toml": "micro_batch_seconds = 0.1\n[[devices]]\ncount = 2\n[graph]\nedges = [[0, 1]]\n",
    "no.toml": "micro_batch_seconds = 0.1\n[[devices\n",
    "short": "abcd\n",
    "open": "ab" * 32,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_clear_paragraph(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    Path("short").chmod(0o600)
    arguments, telling = MISTAKES[mistake]
    assert paceline(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("Error: ") and said.err.endswith("\n")
    assert "\n\n" not in said.err and "Traceback" not in said.out + said.err
    for part in telling:
        assert part in said.err
    assert not Path("runs").exists(), "nothing was begun"


def test_the_scripts_arguments_are_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def run_script(command: list[str], nproc: int, folder: Path, **options: Any) -> int:
        seen.update(command=command, nproc=nproc, folder=folder, **options)
        return 3

    monkeypatch.setattr("paceline.launch.command.run_script", run_script)
    code = paceline(monkeypatch, "run", "--nproc", "2", "s.py", "--name", "x", "--out", "y", "--help", "-v", "--", "z")
    assert code == 3, "the script's exit code"
    assert seen["command"] == ["s.py", "--name", "x", "--out", "y", "--help", "-v", "--", "z"]
    assert seen["nproc"] == 2 and seen["folder"] == Path("runs/run")
    assert not seen["report"] and seen["servers"] == seen["restarts"] == seen["replace"] == 0
    assert seen["join_timeout"] == 120 and seen["heartbeat_timeout"] == 10
    assert seen["stuck_timeout"] == 300


def test_a_simulated_race_is_byte_equal_for_equal_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def race(file: str, seed: int) -> bytes:
        options = ["--seconds", "2", "--speeds", "1,0.5", "--seed", str(seed), "--out", str(tmp_path / "runs")]
        assert paceline(monkeypatch, *SIMULATED, *options, "--json", str(tmp_path / file)) == 0
        return (tmp_path / file).read_bytes()

    first = race("first.json", 0)
    assert race("second.json", 0) == first
    assert json.loads(race("third.json", 1))["results"] != json.loads(first)["results"]
    said = capsys.readouterr().out
    assert "share of ideal" in said and "report.html" in said
    content = json.loads(first)
    # Those of the issue, and what a reader needs to run the race again.
    beside = ["metric", "target", "failed", "micro_batch_seconds", "model", "optimizer", "lr", "versions"]
    assert list(content) == [*RACE, *beside]
    assert (content["model"], content["optimizer"], content["lr"]) == ("mlp", "sgd", 0.1)
    assert content["metric"] == "accuracy"
    assert [result["strategy"] for result in content["results"]] == ["all-reduce", "balanced", "abs-sgd"]
    for result in content["results"]:
        assert list(result) == [*RESULT, "limit"]
        assert list(result["limit"]) == LIMIT
        assert result["limit"]["hardware"] == result["share_of_ideal"] and result["limit"]["comm_seconds"] > 0
        assert [list(worker) for worker in result["workers"]] == [WORKER, WORKER]
        assert result["backend"] == "simulated" and result["seconds"] >= 2
        assert 0 < result["share_of_ideal"] <= 1
        assert result["samples_computed"] == result["samples_applied"] + result["samples_discarded"]
        assert result["samples_applied"] == sum(worker["samples"] for worker in result["workers"])
    assert content["speeds"] == [1.0, 0.5] and (content["workload"], content["seed"]) == ("digits", 0)


def test_what_simulate_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "timing.json"
    options = ["--workers", "50", "--speeds", "1,0.5,0.25", "--seconds", "5", "--json", str(file)]
    assert paceline(monkeypatch, "simulate", *options) == 0
    assert "abs-sgd on 50 workers" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert list(content) == [*RACE, "events", "events_per_second", "versions"]
    (result,) = content["results"]
    assert list(result) == RESULT
    assert [list(worker) for worker in result["workers"]] == [WORKER] * 50
    assert content["speeds"][:4] == [1.0, 0.5, 0.25, 1.0] and len(content["speeds"]) == 50
    assert content["events"] > 1000 and content["events_per_second"] > 0
    assert 0 < result["share_of_ideal"] <= 1


def test_what_limit_prints_and_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "limit.json"
    options = ["--speeds", "1,1,0.5,0.25", "--noise-scale", "500", "--comm-seconds", "0.01", "--json", str(file)]
    assert paceline(monkeypatch, "limit", *options) == 0
    headline, header, *rows, binds = capsys.readouterr().out.splitlines()
    assert "4 workers, 4,400 samples a second" in headline and "noise scale 500" in headline
    assert header.split()[:3] == ["at", "best", "batch"] and header.endswith("time")
    assert [row.split()[0] for row in rows] == ["limit", "all-reduce", "balanced", "abs-sgd"]
    assert rows[0].split()[1:4] == ["44", "10.0", "ms"] and "28.0 %" in rows[1] and rows[1].endswith("3.57 x")
    assert binds.startswith("The noise of the gradients binds")
    content = json.loads(file.read_text())
    assert list(content) == [
        *("samples_per_second", "noise_scale", "comm_seconds", "best_batch", "step_seconds"),
        *("seconds_per_step_min", "binds", "methods"),
    ]
    assert (content["samples_per_second"], content["best_batch"], content["step_seconds"]) == (4400.0, 44, 0.01)
    keys = ["method", "batch", "step_seconds", "hardware", "batch_share", "share"]
    assert [list(method) for method in content["methods"]] == [keys] * 3


def test_limit_needs_no_torch() -> None:
    code = """
import sys
from paceline.cli import main
sys.argv = ["paceline", "limit", "--speeds", "1,0.5", "--noise-scale", "100"]
try:
    main()
finally:
    assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_export_writes_the_newest_model_of_a_run(monkeypatch, tmp_path, capsys) -> None:
    import torch

    from paceline.run.checkpoint import Checkpoint, write

    for number in (1, 2):
        taken = write(tmp_path / "run" / "checkpoints", number, Checkpoint({"model": {"w": torch.full((2,), number)}}))
    file = tmp_path / "model.pt"
    assert paceline(monkeypatch, "export", str(tmp_path / "run"), str(file)) == 0
    assert f"Wrote the model of {taken} to {file}" in capsys.readouterr().out
    assert torch.load(file, weights_only=True)["w"].tolist() == [2, 2]
    assert paceline(monkeypatch, "export", str(tmp_path / "nothing"), str(file)) == 2
    assert "There is no checkpoint in" in capsys.readouterr().err
