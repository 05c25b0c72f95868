"""The commands that start training. Like the command's own module it imports neither torch nor numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SECRET_HELP = "Of the secret that hosts share. Default: PACELINE_SECRET, or ~/.config/paceline/secret."


def add_to(app: typer.Typer) -> None:
    """Make them commands of the application."""
    app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(run)


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script; its own arguments follow it.")],
    nproc: Annotated[int, typer.Option(help="How many processes to start on this machine.", min=1)] = 1,
    nnodes: Annotated[int, typer.Option(help="How many hosts; the command is started on each.", min=1)] = 1,
    node_rank: Annotated[int | None, typer.Option(help="The number of this host, from 0.", min=0)] = None,
    master: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first host, where all meet; the same on all.")
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(help="Network interface of this host, or its address. Default: the one that leads to --master."),
    ] = None,
    secret_file: Annotated[Path | None, typer.Option(help=SECRET_HELP)] = None,
    name: Annotated[str, typer.Option(help="The run's folder is OUT/NAME/TIME.")] = "run",
    out: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Of the control plane; 0 takes a free one.", min=0, max=65535)] = 0,
    join_timeout: Annotated[
        float, typer.Option(help="Seconds to wait for every host and every rank to arrive.", min=0.1)
    ] = 120.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds of silence after which a rank is given up.", min=0.1)
    ] = 10.0,
    return_timeout: Annotated[
        float, typer.Option(help="Seconds that ranks look for a control plane that has died.", min=0.0)
    ] = 20.0,
    restarts: Annotated[int, typer.Option(help="How often a run that has failed is started again.", min=0)] = 0,
    servers: Annotated[int, typer.Option(help="Further processes that serve: bsp, ssp, dssp, asp, gssp.", min=0)] = 0,
    report: Annotated[
        bool, typer.Option("--report", help="Write report.html into the run's folder at the end.")
    ] = False,
) -> None:
    """Run a training script on several processes of this machine, or of several, and show what every worker does."""
    from paceline.launch.command import run_script
    from paceline.launch.hosts import Hosts

    code = run_script(
        [str(script), *context.args],
        nproc,
        out / name,
        servers=servers,
        restarts=restarts,
        report=report,
        hosts=Hosts.of_options(nnodes, node_rank, master, interface=interface, secret_file=secret_file),
        port=port,
        join_timeout=join_timeout,
        heartbeat_timeout=heartbeat_timeout,
        return_timeout=return_timeout,
    )
    raise typer.Exit(code)
