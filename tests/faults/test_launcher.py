"""The launcher: nothing that it started stays behind, the first error is told last, and a failed run starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.launch import command, local, surroundings
from paceline.launch.local import Launch
from paceline.launch.surroundings import new_run

DEAF = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({folder!r}, "pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""
LAUNCHER = """
import pathlib, sys
from paceline.launch import local
local.KILL_SECONDS = 0.2
folder = pathlib.Path(sys.argv[1])
local.launch([sys.executable, str(folder / "deaf.py")], 2, folder, quiet=True)
"""


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_ranks_that_heed_nothing_end_with_their_launcher(
    ended_by: signal.Signals, tmp_path: Path, wait: Callable[..., Any], is_alive: Callable[[int], bool]
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF.format(folder=str(tmp_path)))
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background job would ignore it, and pass it on
    try:
        launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    wait(lambda: all(file.exists() and file.read_text() for file in files), "the ranks to start")
    ranks = [int(file.read_text()) for file in files]
    assert all(map(is_alive, ranks))
    launcher.send_signal(ended_by)
    launcher.communicate(timeout=60)
    if ended_by == signal.SIGTERM:
        assert launcher.returncode == 128 + signal.SIGTERM
    wait(lambda: not any(map(is_alive, ranks)), "the ranks to end")


def test_the_first_to_fail_is_the_first_that_the_control_plane_lost() -> None:
    """Not the first whose process was seen to end, nor one that the launcher has ended itself."""
    state = {"lost": {"2": "ValueError: bad data", "0": "it cannot go on", "1": "it cannot go on"}}
    assert local._first(state, {0, 1, 2}, first_seen=0) == 2
    assert local._first(state, {0, 1}, first_seen=1) == 0
    assert local._first({"lost": {}}, {1}, first_seen=1) == 1
    assert local._first({"lost": {}}, set(), first_seen=None) is None


def test_the_whole_traceback_of_the_first_error_is_told_last(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    deep = [line for depth in range(30) for line in (f'  File "a.py", line {depth}, in f', "    f()")]
    cause = ["Traceback (most recent call last):", *deep, "KeyError: 'x'", ""]
    chained = ["During handling of the above exception, another exception occurred:", ""]
    error = ["Traceback (most recent call last):", *deep, "ValueError: bad data"]
    noise = [f"epoch {number}" for number in range(50)]
    command.explain(Launch([0, 1], 1, {0: [], 1: noise + cause + chained + error}), tmp_path)
    told = capsys.readouterr().err.splitlines()
    assert told[1] == "Rank 1 failed first (ended with exit code 1). Its last words:"
    assert [line.removeprefix("  ") for line in told[2:-1]] == cause + chained + error
    assert told[-1] == f"All logs: {tmp_path / 'logs'}"


def test_the_secret_is_on_no_command_line_and_in_no_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = bytes(range(100, 132))
    monkeypatch.setattr(local.secrets, "token_bytes", lambda count: secret[:count])
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, paceline.launch.surroundings as place\n"
        "place._from_environment()\n"
        "for pid in (os.getpid(), os.getppid()):\n"
        "    print(pathlib.Path(f'/proc/{pid}/cmdline').read_bytes())\n"
        "print(dict(os.environ))\n".replace("\\\n", "\n")
    )
    folder = new_run(tmp_path / "run")
    assert local.launch([sys.executable, str(script)], 2, folder).ok
    said = "".join(capfd.readouterr())
    assert "PACELINE_CONTROL" in said and said.count("script.py") >= 2
    written = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    for text in (said, written):
        assert secret.hex() not in text and "PACELINE_SECRET" not in text


def test_a_secret_is_taken_out_of_the_environment_and_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_given", {})
    monkeypatch.setenv(surroundings.SECRET, "ab" * 16)
    assert [surroundings._given_secret() for _ in range(2)] == ["ab" * 16] * 2
    assert surroundings.SECRET not in os.environ
    for bad in ("ab" * 15, "secret" * 10, "ab" * 16 + "c"):
        monkeypatch.setenv(surroundings.SECRET, bad)
        with pytest.raises(PacelineError, match="PACELINE_SECRET is no secret") as error:
            surroundings._given_secret()
        assert bad not in str(error.value)


@pytest.mark.parametrize("given", [True, False], ids=["given to all ranks", "made by rank 0"])
def test_under_torchrun_a_given_secret_does_not_pass_through_its_store(
    given: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._C._distributed_c10d import TCPStore

    monkeypatch.setattr(surroundings, "_given", {surroundings.SECRET: "ab" * 32} if given else {})
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    for name, value in {"ADDR": "127.0.0.1", "PORT": str(store.port)}.items():
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    service, card = surroundings._under_torchrun(0, 2, tmp_path, 60.0)
    assert service is not None
    try:
        assert surroundings._under_torchrun(1, 2, tmp_path, 60.0) == (None, card)
        assert (card["secret"].encode() in store.get("paceline/attempt-0")) != given
        assert (card["secret"] == "ab" * 32) == given
    finally:
        service.close()


# ---- restarts


def test_a_run_that_failed_starts_again_so_often(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(command.time, "sleep", pauses.append)
    monkeypatch.setattr(local, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(local.time, "sleep", lambda seconds: pauses.append(seconds) if seconds else None)
    script, tries = tmp_path / "script.py", tmp_path / "tries"
    script.write_text(
        f"with open({str(tries)!r}, 'a') as file: file.write('x')\nraise ValueError('again')".replace("\\\n", "\n")
    )
    assert command.run_script([str(script)], 1, tmp_path / "run", restarts=2) == 1
    assert tries.read_text() == "xxx" and pauses == [1.0, 2.0] and len(list((tmp_path / "run").iterdir())) == 3
    told = capfd.readouterr().err
    assert told.count("ValueError: again") == 6, "of each attempt once as it came, once at its end"
    assert "Restart 2 of 2, in 2 s." in told and told.rindex("ValueError") > told.rindex("Restart")


TRAINING = r"""
import os, pathlib, signal, sys
import torch
import paceline

class Points(torch.utils.data.Dataset):
    def __len__(self): return 48
    def __getitem__(self, index): return index, torch.full((2,), index / 48)

out = pathlib.Path(sys.argv[1])
model = torch.nn.Linear(2, 1)
with paceline.Run("all-reduce") as run:
    loader = run.loader(Points(), micro_batch=4, epochs=2)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    taken = run.resume()
    def after_round():
        run.save()
        if taken is None and list(run.folder.glob("checkpoints/round-*")):
            os.kill(os.getpid(), signal.SIGKILL)
    run.after_round(after_round)
    for indices, x in loader:
        if taken is not None:
            with (out / f"seen-{run.rank}").open("a") as file:
                file.writelines(f"{index}\n" for index in indices.tolist())
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if run.rank == 0:
        (out / "taken").write_text(str(taken))
"""


def test_a_run_that_nobody_survives_costs_a_restart_from_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from paceline.rules.order import order
    from paceline.run.checkpoint import read

    monkeypatch.setattr(command, "FIRST_PAUSE", 0.0)
    script = tmp_path / "script.py"
    script.write_text(TRAINING)
    assert command.run_script([str(script), str(tmp_path)], 2, tmp_path / "run", restarts=1) == 0, capfd.readouterr()
    used = read(Path((tmp_path / "taken").read_text())).values["used"]
    orders = [*order(0, 0, 48).tolist(), *order(0, 1, 48).tolist()]
    before = Counter(orders[position] for start, stop in used for position in range(start, stop))
    after = Counter(int(line) for file in tmp_path.glob("seen-*") for line in file.read_text().split())
    assert before and before + after == Counter(orders)
    assert "failed first (ended by SIGKILL)" in capfd.readouterr().err
