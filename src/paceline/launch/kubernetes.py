"""Kubernetes manifests for hosts of several kinds: a JobSet, or a headless Service and plain Jobs.

Both give every host a name in the cluster's DNS, and the first host's is where all meet. The secret comes from a
Kubernetes Secret by the environment: a mounted file gets a mode that others may read, as soon as a group is set for the
pod.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import PacelineError, no_such
from paceline.launch.pools import Job, Pool

FORMS = ("jobset", "plain")
MASTER_PORT = 29500
GPU = "nvidia.com/gpu"
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
QUANTITY = re.compile(r"\d+(Gi)?")
DRY_RUN_SECONDS = 60.0
Manifest = dict[str, Any]


def manifests(job: Job, form: str, image: str, secret: str) -> list[Manifest]:
    """What `kubectl apply` is given.

    Args:
        job: what for.
        form: one of `FORMS`.
        image: of the container: with Python, Paceline and the script in it.
        secret: name of the Kubernetes Secret, with the key `secret`.
    """
    if form not in FORMS:
        raise no_such("form of manifest", form, FORMS)
    names = [f"pool-{number}" for number in range(len(job.pools))]
    # A JobSet appends the number of the job, always 0 here, before that of the pod.
    first = f"{job.name}-{names[0]}-0-0" if form == "jobset" else f"{job.name}-{names[0]}-0"
    master = f"{first}.{job.name}:{MASTER_PORT}"
    specs = []
    for pool, node_rank in zip(job.pools, job.first_node_ranks(), strict=True):
        pod = _pod(job, pool, _command(job, pool, node_rank, master), image, secret)
        if form == "plain":
            pod["spec"]["subdomain"] = job.name
        specs.append(_spec_of_job(pool, pod))
    made = _job_set(job, names, specs) if form == "jobset" else _plain(job, names, specs)
    check(made)
    return made


def _command(job: Job, pool: Pool, node_rank: int, master: str) -> list[str]:
    # Kubernetes itself reads $(…) in a command; $$ is one that it leaves to the shell.
    options = pool.options(f"$$(({node_rank} + JOB_COMPLETION_INDEX))", master, job.nnodes)
    options += ["--name", job.name, "--restarts", str(job.restarts)] if job.restarts else ["--name", job.name]
    return ["/bin/sh", "-c", f"exec paceline run {' '.join(options)} {shlex.join(job.script)}"]


def _pod(job: Job, pool: Pool, command: list[str], image: str, secret: str) -> Manifest:
    resources: dict[str, Any] = {"cpu": str(pool.cores)}
    if pool.memory:
        resources["memory"] = f"{pool.memory}Gi"
    if pool.gpus:
        resources[pool.kind or GPU] = str(pool.gpus)
    container = {
        "name": "paceline",
        "image": image,
        "command": command,
        "env": [{"name": "PACELINE_SECRET", "valueFrom": {"secretKeyRef": {"name": secret, "key": "secret"}}}],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    spec: Manifest = {
        "restartPolicy": "Never",  # a launcher that failed has restarted all it may
        "containers": [container],
        # Workers of data loaders hand batches over in shared memory, of which a container has 64 MB.
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    if pool.where:
        label, _, value = pool.where.partition("=")
        spec["nodeSelector"] = {label: value}
    return {"metadata": {"labels": {"app": job.name}}, "spec": spec}


def _spec_of_job(pool: Pool, pod: Manifest) -> Manifest:
    each = {"parallelism": pool.hosts, "completions": pool.hosts, "completionMode": "Indexed", "backoffLimit": 0}
    return {**each, "template": pod}


def _job_set(job: Job, names: Sequence[str], specs: Sequence[Manifest]) -> list[Manifest]:
    jobs = [{"name": name, "replicas": 1, "template": {"spec": spec}} for name, spec in zip(names, specs, strict=True)]
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": job.restarts},  # anew on all hosts, if one is lost with its node
                "replicatedJobs": jobs,
            },
        }
    ]


def _plain(job: Job, names: Sequence[str], specs: Sequence[Manifest]) -> list[Manifest]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        # Without an address of its own it only names the pods, before they are ready: they wait for each other.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": job.name}},
    }
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{job.name}-{name}"}, "spec": spec}
        for name, spec in zip(names, specs, strict=True)
    ]
    return [service, *jobs]


# ---- whether it is right


def check(made: Sequence[Manifest]) -> None:
    """Protest at what a cluster would refuse: names, labels, quantities, numbers."""
    for manifest in made:
        name = manifest["metadata"]["name"]
        _insist(bool(DNS_LABEL.fullmatch(name)), f"{name!r} is no name in Kubernetes")
    for job_name, spec in _jobs(made):
        pod = spec["template"]["spec"]
        longest = f"{job_name}-{spec['completions'] - 1}"
        _insist(len(longest) <= 63, f"the name {longest} of a pod has more than 63 characters")
        _insist(spec["parallelism"] == spec["completions"] > 0, f"{job_name} would not start all hosts at once")
        for label, value in pod.get("nodeSelector", {}).items():
            _insist(bool(label and value), f"where={label} names no node label: write where=label=value")
        for container in pod["containers"]:
            _insist(bool(container["image"].strip()), "there is no image")
            resources = container["resources"]["limits"]
            wrong = [f"{key}={value}" for key, value in resources.items() if not QUANTITY.fullmatch(value)]
            _insist(not wrong, f"no quantities: {', '.join(wrong)}")
            extended = [key for key in resources if key not in ("cpu", "memory")]
            _insist(all("/" in key for key in extended), f"{extended} is no resource: write kind=vendor.com/gpu")


def _jobs(made: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for manifest in made:
        if manifest["kind"] == "Job":
            yield manifest["metadata"]["name"], manifest["spec"]
        for replicated in manifest["spec"].get("replicatedJobs", ()):
            yield f"{manifest['metadata']['name']}-{replicated['name']}-0", replicated["template"]["spec"]


def _insist(true: bool, otherwise: str) -> None:
    if not true:
        raise PacelineError(f"The manifest would be refused: {otherwise}.", remedy="Change the options; see --help.")


def dry_run(text: str) -> list[str]:
    """Let the cluster that kubectl knows look at it, without making anything."""
    if not shutil.which("kubectl"):
        raise PacelineError("There is no kubectl for a dry run.", remedy="Install it, or leave --dry-run out.")
    command = ["kubectl", "apply", "--dry-run=server", f"--request-timeout={DRY_RUN_SECONDS:g}s", "-f", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PacelineError(
            f"kubectl refuses the manifest: {done.stderr.strip()}",
            remedy="Is there a cluster (`kubectl cluster-info`), and JobSet installed in it? Else take --form plain.",
        )
    return [f"the cluster accepts {len(done.stdout.splitlines())} objects"]


# ---- as text


def as_yaml(made: Sequence[Manifest], secret: str) -> str:
    """The manifests, and above them how to make the secret."""
    head = [
        "# Written by `paceline template kubernetes`. One launcher runs in each pod. First, once, make the secret:",
        f"#   kubectl create secret generic {secret} --from-literal=secret=$(openssl rand -hex 32)",
    ]
    return "\n".join([*head, *("---\n" + "\n".join(_lines(manifest)) for manifest in made), ""])


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """Block YAML of what JSON knows; texts as JSON writes them, which YAML reads the same."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            written = key if re.fullmatch(r"[A-Za-z]+", key) else json.dumps(key)
            if isinstance(part, Mapping | list) and part:
                yield f"{indent}{written}:"
                yield from _lines(part, indent + "  ")
            else:
                yield f"{indent}{written}: {json.dumps(part)}"
        return
    for part in value:
        if isinstance(part, Mapping):
            first, *rest = _lines(part, indent + "  ")
            yield f"{indent}- {first.removeprefix(indent + '  ')}"
            yield from rest
        else:
            yield f"{indent}- {json.dumps(part)}"
