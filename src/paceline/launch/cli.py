"""The commands that start training. Like the command's own module it imports neither torch nor numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import PacelineError, no_such

SYSTEMS = ("slurm", "kubernetes")
ADDRESS_HELP = "Ray: of a running cluster, or auto. Default: RAY_ADDRESS, or one is started on this machine."
RESOURCES_HELP = (
    "Ray: what each worker needs, as JSON: '{\"CPU\": 4}', or a list with one for each worker and then each server: "
    '\'[{"GPU": 1}, {"CPU": 4}]\'. Default: one core.'
)
MASTER_HELP = "HOST:PORT of the first host, where all meet; the same on all."
INTERFACE_HELP = "Network interface of this host, or its address. Default: the one that leads to --master."
STUCK_HELP = "Seconds that a rank may at least be busy with its own code while others wait for it; 0: for ever."
JOIN_HELP = "Join the run that trains in this folder, with --nproc further ranks; or a copy of its door.json."
ARRIVE_HELP = "Seconds to wait for every host and every rank to arrive."
SILENCE_HELP = "Seconds of silence after which a rank is given up."
RETURN_HELP = "Seconds that ranks look for a control plane that has died."
REPLACE_HELP = "How often, in all, a rank of this host that was lost is started again; servers are not."
REPORT_HELP = "Write report.html into the run's folder at the end."
SECRET_HELP = "Of the secret that hosts share. Default: PACELINE_SECRET, or ~/.config/paceline/secret."


def add_to(app: typer.Typer) -> None:
    """Make them commands of the application."""
    app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(run)
    app.command()(template)


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script; its own arguments follow it.")],
    nproc: Annotated[int, typer.Option(help="How many processes to start on this machine, or in Ray.", min=1)] = 1,
    engine: Annotated[str, typer.Option(help="Who starts them: local, or ray.")] = "local",
    address: Annotated[str | None, typer.Option(help=ADDRESS_HELP)] = None,
    resources: Annotated[str | None, typer.Option(help=RESOURCES_HELP)] = None,
    nnodes: Annotated[int, typer.Option(help="How many hosts; the command is started on each.", min=1)] = 1,
    node_rank: Annotated[int | None, typer.Option(help="The number of this host, from 0.", min=0)] = None,
    master: Annotated[str | None, typer.Option(help=MASTER_HELP)] = None,
    interface: Annotated[str | None, typer.Option(help=INTERFACE_HELP)] = None,
    secret_file: Annotated[Path | None, typer.Option(help=SECRET_HELP)] = None,
    join: Annotated[Path | None, typer.Option(help=JOIN_HELP)] = None,
    name: Annotated[str, typer.Option(help="The run's folder is OUT/NAME/TIME.")] = "run",
    out: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Of the control plane; 0 takes a free one.", min=0, max=65535)] = 0,
    join_timeout: Annotated[float, typer.Option(help=ARRIVE_HELP, min=0.1)] = 120.0,
    heartbeat_timeout: Annotated[float, typer.Option(help=SILENCE_HELP, min=0.1)] = 10.0,
    stuck_timeout: Annotated[float, typer.Option(help=STUCK_HELP, min=0.0)] = 300.0,
    return_timeout: Annotated[float, typer.Option(help=RETURN_HELP, min=0.0)] = 20.0,
    replace: Annotated[int, typer.Option(help=REPLACE_HELP, min=0)] = 0,
    restarts: Annotated[int, typer.Option(help="How often a run that has failed is started again.", min=0)] = 0,
    servers: Annotated[int, typer.Option(help="Further processes that serve: bsp, ssp, dssp, asp, gssp.", min=0)] = 0,
    report: Annotated[bool, typer.Option("--report", help=REPORT_HELP)] = False,
) -> None:
    """Run a training script on processes of this machine, of several or of Ray, and show what every worker does."""
    from paceline.launch.command import run_script
    from paceline.launch.door import Door
    from paceline.launch.hosts import Hosts
    from paceline.ray.cluster import RayCluster

    given = {"--nnodes": nnodes > 1, "--node-rank": node_rank, "--master": master, "--secret-file": secret_file}
    given |= {"--engine": engine != "local", "--port": port, "--servers": servers}
    door = Door.of_options(join, interface, given)
    hosts = None if door else Hosts.of_options(nnodes, node_rank, master, interface=interface, secret_file=secret_file)
    cluster = RayCluster.of_options(engine, address, resources, nproc=nproc, servers=servers, alone=hosts is None)
    code = run_script(
        [str(script), *context.args],
        nproc,
        out / name,
        servers=servers,
        replace=replace,
        restarts=restarts,
        report=report,
        hosts=door or cluster or hosts,
        port=port,
        join_timeout=join_timeout,
        heartbeat_timeout=heartbeat_timeout,
        stuck_timeout=stuck_timeout,
        return_timeout=return_timeout,
    )
    raise typer.Exit(code)


def template(
    system: Annotated[str, typer.Argument(help="slurm or kubernetes.")],
    script: Annotated[list[str], typer.Argument(help="The training script; its own arguments follow it after --.")],
    pool: Annotated[
        list[str],
        typer.Option(
            help="Hosts that are alike, as HOSTSxNPROC with options behind colons: 2x8:gpus=8:where=fast. Repeat it "
            "for a mixed cluster. Options: servers, gpus, cpus, memory (GB), kind (of GPU), where (a partition, or "
            "label=value of nodes)."
        ),
    ],
    name: Annotated[str, typer.Option(help="Of the job.")] = "paceline",
    restarts: Annotated[int, typer.Option(help="How often a run that has failed is started again.", min=0)] = 0,
    time_limit: Annotated[str | None, typer.Option("--time", help="Slurm: the limit, as sbatch takes it.")] = None,
    secret_file: Annotated[
        str, typer.Option(help="Slurm: the shared secret's file; the job makes it when there is none.")
    ] = "~/.config/paceline/secret",
    form: Annotated[str, typer.Option(help="Kubernetes: jobset, or plain (a Service and Jobs).")] = "jobset",
    image: Annotated[str, typer.Option(help="Kubernetes: of the container, with Paceline and the script.")] = "",
    secret: Annotated[str, typer.Option(help="Kubernetes: name of the Secret with the key `secret`.")] = "paceline",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let sbatch or the cluster look at it, without starting anything.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write it to this file. Default: to the terminal.")] = None,
) -> None:
    """Write a job for Slurm or Kubernetes that runs a script on hosts of several kinds, and check it."""
    from paceline.launch import kubernetes, slurm
    from paceline.launch.pools import Job, Pool

    job = Job(name, [Pool.parse(text) for text in pool], script, restarts)
    if system == "slurm":
        text = slurm.batch_script(job, time_limit, secret_file)
        checked = slurm.check(text, dry_run)
    elif system == "kubernetes":
        if not image:
            raise PacelineError("The containers need an image.", remedy="Name it with --image.")
        text = kubernetes.as_yaml(kubernetes.manifests(job, form, image, secret), secret)
        checked = ["names, labels and quantities are in order", *(kubernetes.dry_run(text) if dry_run else [])]
    else:
        raise no_such("template for", system, SYSTEMS)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text)
    typer.echo(f"Checked: {'; '.join(checked) or 'nothing, there is no bash here'}.", err=True)
