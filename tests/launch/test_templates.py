"""Jobs for Slurm and Kubernetes: made from few options, whole, and such that every host gets its own place."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import PacelineError
from paceline.launch import kubernetes, slurm
from paceline.launch.pools import Job, Pool

MIXED = ["--pool", "2x8:gpus=8:kind=a100:where=fast", "--pool", "3x2:servers=1:memory=32"]
POOLS = ["--pool", "2x8:gpus=8:where=gpu=fast", "--pool", "3x2:servers=1:memory=32"]


def written(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["template", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "Checked: " in done.stderr
    return done.stdout


def documents(*arguments: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(written("kubernetes", *arguments, "--image", "me/train:1", "train.py")))


def test_a_mixed_slurm_job_has_a_component_for_each_kind_of_host() -> None:
    text = written("slurm", *MIXED, "--time", "1:00:00", "train.py", "--", "--lr", "0.1 ")
    first, second = text.split("#SBATCH hetjob\n")
    assert "#SBATCH --nodes=2\n" in first and "#SBATCH --gres=gpu:a100:8\n" in first
    assert "#SBATCH --partition=fast\n" in first and "#SBATCH --time=1:00:00\n" in first
    assert "#SBATCH --nodes=3\n" in second and "#SBATCH --mem=32G\n" in second and "--gres" not in second
    assert "#SBATCH --cpus-per-task=3\n" in second, "two that learn and one that serves"
    assert text.count("#SBATCH --ntasks-per-node=1\n") == 2, "one launcher on each host"


@pytest.mark.parametrize("pools", [MIXED, ["--pool", "5x2"]])
def test_every_host_of_a_slurm_job_gets_its_own_node_rank(pools: list[str], tmp_path: Path) -> None:
    """The script runs, with Slurm's commands played by others: srun starts one task for each host of its component."""
    hosts = [2, 3] if pools is MIXED else [5]
    (tmp_path / "scontrol").write_text('#!/bin/sh\nprintf "%s-a\\n%s-b\\n" "$3" "$3"\n')
    counts = " ".join(f"{number}) nodes={count};;" for number, count in enumerate(hosts))
    (tmp_path / "srun").write_text(
        "#!/bin/bash\ngroup=0\n"
        'case "$1" in --het-group=*) group=${1#*=}; shift;; esac\nshift\n'
        f"case $group in {counts} esac\n"
        'for ((id = 0; id < nodes; id++)); do SLURM_NODEID=$id "$@" || exit; done\n'
    )
    (tmp_path / "paceline").write_text('#!/bin/bash\nprintf "%s|" "$@" > "$OUT/said-$5"\n')
    for tool in ("scontrol", "srun", "paceline"):
        (tmp_path / tool).chmod(0o755)
    (tmp_path / "job.sh").write_text(written("slurm", *pools, "train.py", "--", "--words", "it's two"))
    lists = {f"SLURM_JOB_NODELIST_HET_GROUP_{n}": f"part{n}" for n in range(2)} | {"SLURM_JOB_NODELIST": "part0"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run(
        ["bash", str(tmp_path / "job.sh")], env=environment | lists | {"SLURM_JOB_ID": "41234"}, check=True, timeout=60
    )
    said = {path.name: path.read_text() for path in tmp_path.glob("said-*")}
    assert set(said) == {f"said-{node_rank}" for node_rank in range(5)}
    secret = tmp_path / ".config" / "paceline" / "secret"
    assert re.fullmatch(r"[0-9a-f]{64}\n", secret.read_text()) and secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().strip() not in "".join(said.values())
    for node_rank, nproc in enumerate([8, 8, 2, 2, 2] if pools is MIXED else [2] * 5):
        options = said[f"said-{node_rank}"]
        assert options.startswith(f"run|--nnodes|5|--node-rank|{node_rank}|--master|part0-a:21234|--nproc|{nproc}|")
        assert options.endswith(f"--secret-file|{secret}|--name|paceline|train.py|--words|it's two|")
        assert ("--servers|1|" in options) == (pools is MIXED and node_rank >= 2)


def test_a_script_that_bash_cannot_read_is_refused() -> None:
    with pytest.raises(PacelineError, match="bash -n refuses the script"):
        slurm.check("if true; then\n")


def test_a_job_set_for_a_mixed_pool() -> None:
    (job_set,) = documents(*POOLS, "--name", "digits", "--restarts", "2")
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (
        job_set["spec"]["failurePolicy"] == {"maxRestarts": 2} and job_set["spec"]["network"]["subdomain"] == "digits"
    )
    gpu, cpu = (each["template"]["spec"] for each in job_set["spec"]["replicatedJobs"])
    assert (gpu["completions"], gpu["parallelism"], cpu["completions"]) == (2, 2, 3)
    assert gpu["template"]["spec"]["nodeSelector"] == {"gpu": "fast"}
    (container,) = gpu["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "8", "nvidia.com/gpu": "8"}
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "paceline", "key": "secret"}
    assert "--master digits-pool-0-0-0.digits:29500" in container["command"][2]


def test_plain_jobs_find_each_other_by_a_headless_service() -> None:
    service, gpu, cpu = documents(*POOLS, "--form", "plain", "--name", "digits")
    assert service["kind"] == "Service" and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True, "hosts wait for each other before they are ready"
    for job in (gpu, cpu):
        pod = job["spec"]["template"]
        assert job["kind"] == "Job" and pod["spec"]["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        # The pods of an indexed job are called after it and their index.
        assert f"--master {gpu['metadata']['name']}-0.digits:29500" in pod["spec"]["containers"][0]["command"][2]


@pytest.mark.parametrize("form", kubernetes.FORMS)
def test_every_pod_gets_its_own_node_rank(form: str, tmp_path: Path) -> None:
    """The shell of a pod runs its command, as Kubernetes hands it over."""
    (tmp_path / "paceline").write_text('#!/bin/sh\nprintf "%s " "$@"\n')
    (tmp_path / "paceline").chmod(0o755)
    made = kubernetes.manifests(Job("digits", [Pool(2, 8), Pool(3, 2)], ["train.py", "it's"]), form, "image", "secret")
    ranks = []
    for _, spec in kubernetes._jobs(made):
        (container,) = spec["template"]["spec"]["containers"]
        for index in range(spec["completions"]):
            # $$ stands for one $ that Kubernetes leaves to the shell.
            command = [part.replace("$$", "$") for part in container["command"]]
            environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)}
            said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            assert said.endswith("train.py it's ")
            ranks.append(int(said.split()[said.split().index("--node-rank") + 1]))
    assert ranks == list(range(5))


def test_the_secret_is_never_in_a_template() -> None:
    for text in (written("slurm", *MIXED, "a.py"), written("kubernetes", *POOLS, "--image", "i", "a.py")):
        assert not re.search(r"[0-9a-f]{32}", text) and "openssl rand -hex 32" in text


def test_a_name_too_long_for_a_pod_is_refused() -> None:
    assert kubernetes.manifests(Job("a" * 32, [Pool(1000, 1)], ["a.py"]), "jobset", "image", "secret")
    made = kubernetes.manifests(Job("digits", [Pool(1, 1)], ["a.py"]), "plain", "image", "secret")
    made[1]["metadata"]["name"] = "a" * 63
    with pytest.raises(PacelineError, match="more than 63 characters"):
        kubernetes.check(made)


def test_the_file_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    assert written("slurm", "--pool", "1x1", "--out", str(tmp_path / "job.sh"), "a.py") == ""
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash\n")
