"""The whole command on this machine: alone, with a peer on the loopback, and with a broken torch."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from paceline import cli
from paceline.doctor import command, compute, examination, machine
from paceline.doctor.advice import CANDIDATES, COMPRESSED, Advice, Expectation
from paceline.doctor.host import OK, PROBLEM, WARNING, Finding
from paceline.doctor.words import Speaker
from paceline.launch.secret import find_secret
from paceline.simulator.cluster_file import read_cluster

SHARED = "ab" * 32


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little of everything: what is measured is not the matter here. And nobody's own secret."""
    monkeypatch.setattr(compute, "MEASURED_SECONDS", 0.05)
    monkeypatch.setattr("paceline.doctor.advice.MICRO_BATCHES", 500)
    monkeypatch.setattr("paceline.doctor.advice.SLOWEST", 10)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("PACELINE_SECRET", raising=False)


def doctor(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, found = tmp_path / "cluster.toml", tmp_path / "found.json"
    assert doctor(monkeypatch, "--nproc", "3", "--write", str(file), "--json", str(found)) == 0
    said = capsys.readouterr().out
    for part in ("torch", "gloo here", "Speed alone: digits, mlp, 9,610 parameters", "share of ideal", "Recommended: "):
        assert part in said
    assert f"paceline race --backend simulated --cluster {file}" in said and "paceline run --nproc 3" in said
    cluster = read_cluster(file)
    assert cluster.workers == 3 and cluster.network.latency > 0
    content = json.loads(found.read_text())
    assert list(content) == ["host", "peers", "task", "problems", "cluster", "expected", "recommended"]
    assert content["cluster"] == file.read_text() and content["problems"] == 0
    task = {"workload": "digits", "model": "mlp", "micro_batch": 4, "parameters": 9610, "divisible": True}
    assert content["task"] == task
    (device,) = content["host"]["devices"]
    assert device["workers"] == 3 and device["micro_batch_seconds"] == pytest.approx(cluster.micro_batch_seconds, 1e-3)
    shares = {each["strategy"]: each["share_of_ideal"] for each in content["expected"]}
    assert {"all-reduce", "balanced", "abs-sgd", "gssp"} <= shares.keys()
    assert all(0 < share <= 1 for share in shares.values())
    advised = content["recommended"]
    assert advised["share_of_ideal"] == shares[advised["strategy"]] and advised["why"]


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = machine.versions() | {"torch": "not installed"}
    monkeypatch.setattr(machine, "versions", lambda: versions)
    assert doctor(monkeypatch) == 1
    said = capsys.readouterr().out
    assert "problem  torch          not installed" in said and "pip install torch" in said
    assert said.rstrip().endswith("One thing will not work: torch. See above.")


def test_nothing_measured_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "not installed"})
    assert doctor(monkeypatch, "--write", str(tmp_path / "cluster.toml")) == 2
    assert "no cluster to write" in capsys.readouterr().err
    assert not (tmp_path / "cluster.toml").exists()


def test_a_device_that_fails_is_a_problem_and_the_rest_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Finding("gloo here", PROBLEM, "an all-reduce failed", "A firewall.", "Open it.")
    monkeypatch.setattr(compute, "measure_network", lambda gpus, nbytes: (None, told))
    assert doctor(monkeypatch) == 1
    said = capsys.readouterr().out
    assert "Open it." in said and "clock" in said and "Recommended" not in said


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A doctor that listens, as a process of its own; its address, and the file of its secret."""
    file = tmp_path / "secret"
    program = """
import sys
from paceline.cli import main
from paceline.doctor import compute
compute.MEASURED_SECONDS = 0.05
main()
"""
    options = ["doctor", "--listen", "--nproc", "2", "--secret-file", str(file)]
    with subprocess.Popen([sys.executable, "-uc", program, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = [process.stdout.readline() for _ in range(3)]
            address = re.search(r"--peers (\S+) --secret-file", said[2])
            assert address is not None and address[1].startswith("127.0.0.1:"), said
            yield address[1], file
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130


def test_two_machines(
    listening: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    address, secret = listening
    assert secret.stat().st_mode & 0o777 == 0o600
    another = tmp_path / "another"
    another.write_text(SHARED)
    another.chmod(0o600)
    assert doctor(monkeypatch, "--nproc", "1", "--peers", address, "--secret-file", str(another)) == 1
    assert "it has another secret" in capsys.readouterr().out
    written = tmp_path / "cluster.toml"
    found = tmp_path / "found.json"
    options = ["--nproc", "1", "--peers", address, "--secret-file", str(secret), "--json", str(found)]
    assert doctor(monkeypatch, *options, "--write", str(written)) == 0
    said = capsys.readouterr().out
    assert "MB a second" in said or "GB a second" in said
    assert "expects of 3 workers" in said and "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2" in said
    assert read_cluster(written).workers == 3
    (peer,) = json.loads(found.read_text())["peers"]
    assert peer["address"] == address and peer["link"]["bandwidth"] > 1e5 and peer["host"]["devices"]


def test_a_listener_prints_what_to_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From all interfaces only when asked, and the secret is never on the line to copy."""
    said = io.StringIO()
    monkeypatch.setenv("PACELINE_SECRET", SHARED)
    monkeypatch.setattr(command, "wait_for_ever", lambda: None)
    command.listen(command.Settings(), "127.0.0.1", 0, Speaker(Console(file=said)))
    assert SHARED not in said.getvalue() and "scp" not in said.getvalue() and "loopback" in said.getvalue()
    assert re.search(r"paceline doctor --peers 127\.0\.0\.1:\d+\n", said.getvalue())


def test_where_a_secret_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made, where = find_secret(None, make=True)
    assert where == str(tmp_path / "config" / "paceline" / "secret") and len(made) == 32
    assert find_secret(None, make=False) == (made, where), "made once"
    monkeypatch.setenv("PACELINE_SECRET", SHARED)
    assert find_secret(None, make=False) == (bytes.fromhex(SHARED), "PACELINE_SECRET")
    assert find_secret(Path(where), make=False)[0] == made, "what is named counts more than the environment"


# ---- what it looks like


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    file = io.StringIO()
    speaker = Speaker(Console(file=file, width=width, force_terminal=True, color_system=None))
    speaker.findings(
        [
            Finding("cores", OK, "two of them " * 20),
            Finding("a-host-with-a-long-name:29600", WARNING, "slow", "Cause " * 30, "Remedy " * 30),
        ]
    )
    speaker.paragraph("Recommended: abs-sgd, 99.9 % of ideal. " * 9)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line.startswith("%") for line in lines), "a figure keeps its sign"


def test_the_tables_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    speaker = Speaker(Console(file=file, width=80, force_terminal=True, color_system=None))
    command.examine(command.Settings(nproc=2), speaker)
    said = file.getvalue()
    assert "…" not in re.sub(r"cpu, .*…", "", said), "nothing was cut off but a device's long name"
    tables = [line for line in said.splitlines() if not line.startswith("  paceline")]
    assert max(map(len, tables)) <= 80


def test_what_is_expected_fits_also_where_the_network_is_slow() -> None:
    file = io.StringIO()
    speaker = Speaker(Console(file=file, width=80, force_terminal=True, color_system=None))
    names = {"local-sgd:steps=128:by_speed": "of own model"} | CANDIDATES | COMPRESSED
    rows = [Expectation(name, gradients, 1.0, 123_456.0, 12_345.0) for name, gradients in names.items()]
    speaker.expected(rows, Advice("abs-sgd", 1.0, "nobody waits."), 2)
    assert "…" not in file.getvalue() and max(map(len, file.getvalue().splitlines())) <= 80


def test_settings_are_what_the_command_offers() -> None:
    group: Any = typer.main.get_command(cli.app)
    offered = {each.name for each in group.commands["doctor"].params}
    assert offered >= set(command.Settings.__dataclass_fields__)


def test_a_look_needs_no_more_than_it_was_given() -> None:
    """Wrong names are told before anything is measured."""
    with pytest.raises(cli.PacelineError, match="no workload"):
        examination.Examination("digit", None, None, None, several_hosts=False)
