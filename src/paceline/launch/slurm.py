"""A Slurm batch script for hosts of several kinds: each kind is a component of a heterogeneous job."""

from __future__ import annotations

import shlex
import shutil
import subprocess

from paceline.errors import PacelineError
from paceline.launch.pools import Job, Pool

DRY_RUN_SECONDS = 30.0
FIRST_PORT, PORTS = 20_000, 20_000  # below those that systems hand out by themselves, and another for each job


def batch_script(job: Job, time_limit: str | None, secret_file: str) -> str:
    """The script for `sbatch`. The secret's file is on a file system that all hosts share, with the home directory."""
    several = len(job.pools) > 1
    group = [f"_HET_GROUP_{number}" if several else "" for number in range(len(job.pools))]
    steps = [
        _step(job, pool, first, f"--het-group={number} " if several else "")
        for number, (pool, first) in enumerate(zip(job.pools, job.first_node_ranks(), strict=True))
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name={job.name}",
            "#SBATCH --output=%x-%j.log",
            *([f"#SBATCH --time={time_limit}"] if time_limit else []),
            *"\n#SBATCH hetjob\n".join("\n".join(_resources(pool)) for pool in job.pools).split("\n"),
            "",
            "# Written by `paceline template slurm`. One launcher runs on each host, and starts that host's processes.",
            "set -euo pipefail",
            f"secret={_in_home(secret_file)}",
            'if [ ! -e "$secret" ]; then',
            '  mkdir -p "$(dirname "$secret")"',
            '  (umask 077 && openssl rand -hex 32 > "$secret")',
            "fi",
            f'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST{group[0]}" | head -n 1)',
            f"export MASTER=$first:$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS})) SECRET=$secret",
            "",
            "steps=()",
            *steps,
            "",
            "code=0",
            'for step in "${steps[@]}"; do',
            '  wait "$step" || code=$?',
            "done",
            'exit "$code"',
            "",
        ]
    )


def _resources(pool: Pool) -> list[str]:
    gpus = f"gpu:{pool.kind}:{pool.gpus}" if pool.kind else f"gpu:{pool.gpus}"
    return [
        f"#SBATCH --nodes={pool.hosts}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --cpus-per-task={pool.cores}",
        *([f"#SBATCH --gres={gpus}"] if pool.gpus else []),
        *([f"#SBATCH --mem={pool.memory}G"] if pool.memory else []),
        *([f"#SBATCH --partition={pool.where}"] if pool.where else []),
    ]


def _step(job: Job, pool: Pool, first: int, group: str) -> str:
    """The launchers of one component, beside those of the others."""
    options = pool.options(f"$(({first} + SLURM_NODEID))", '"$MASTER"', job.nnodes)
    options += ["--secret-file", '"$SECRET"', "--name", job.name]
    options += ["--restarts", str(job.restarts)] if job.restarts else []
    command = f"exec paceline run {' '.join(options)} {shlex.join(job.script)}"
    return f"srun {group}--cpus-per-task={pool.cores} bash -c {shlex.quote(command)} &\nsteps+=($!)"


def _in_home(path: str) -> str:
    """For the shell: a leading ~ stays the home of whoever runs it, whatever else is in the path."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def check(script: str, dry_run: bool = False) -> list[str]:
    """What was found in order, by the tools that are here; raises at what is not."""
    checked = []
    if shutil.which("bash"):
        _ask(["bash", "-n"], script, "bash -n")
        checked.append("bash reads it")
    if dry_run:
        _ask(["sbatch", "--test-only"], script, "sbatch --test-only")
        checked.append("sbatch --test-only accepts it")
    return checked


def _ask(command: list[str], script: str, name: str) -> None:
    try:
        done = subprocess.run(
            command, input=script, capture_output=True, text=True, check=False, timeout=DRY_RUN_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PacelineError(
            f"{name} gave no answer: {error}", remedy="Is it installed here? Else leave --dry-run out."
        ) from error
    if done.returncode:
        raise PacelineError(
            f"{name} refuses the script: {done.stderr.strip()}",
            remedy="Partitions, GPU types and limits are those of your cluster: `sinfo` and `scontrol show config`.",
        )
