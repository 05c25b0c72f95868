"""The command. This module imports neither torch nor numpy, so that `paceline --help` answers at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import __version__
from paceline.errors import PacelineError
from paceline.launch import cli as launching

app = typer.Typer(
    name="paceline",
    help="Train one PyTorch model on unequal machines, at the speed of all of them together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SpeedsOption = Annotated[
    str | None, typer.Option("--speeds", help="One speed a worker, e.g. 1,1,0.5,0.25.", show_default=False)
]
ClusterOption = Annotated[
    Path | None, typer.Option("--cluster", help="TOML file with devices, jitter, network and faults.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")]
WorkloadOption = Annotated[
    str,
    typer.Option(
        help="cifar-10, digits, fashion-mnist, multi30k, synthetic, xmc or xmc-generated; options behind colons, "
        "as in xmc-generated:like=amazon-670k:scale=0.01."
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="lenet-5 (default for images), resnet-18, vgg-19; mlp (also for fashion-mnist); seq2seq for multi30k; "
        "sparse-mlp for xmc."
    ),
]
DataOption = Annotated[Path | None, typer.Option(help="Folder of data files.", envvar="PACELINE_DATA")]
ServersOption = Annotated[
    int | None, typer.Option("--servers", help="Of bsp, ssp, dssp, asp and gssp. Default: what each needs.", min=1)
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="Write a trace for ui.perfetto.dev to this .json or .json.gz file.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Of all chance in it. Default: the cluster file's, or 0.", min=0)
]


@app.command()
def race(
    strategies: Annotated[str, typer.Option(help="Comma-separated; options behind colons.")] = (
        "all-reduce,balanced,abs-sgd"
    ),
    speeds: SpeedsOption = None,
    workload: WorkloadOption = "digits",
    model: ModelOption = None,
    optimizer: Annotated[str, typer.Option(help="sgd, nesterov, adamw, or plain-sgd without momentum.")] = "sgd",
    lr: Annotated[float | None, typer.Option(help="Learning rate. Default: the workload's for the optimizer.")] = None,
    backend: Annotated[str, typer.Option(help="processes or simulated.")] = "processes",
    seconds: Annotated[float, typer.Option(help="That every strategy may train for.")] = 20.0,
    target: Annotated[float | None, typer.Option(help="Held-out metric to reach.")] = None,
    cluster: ClusterOption = None,
    micro_batch_seconds: Annotated[
        float | None, typer.Option(help="Of a micro-batch at speed 1. Default: by measuring; 0.02 simulated.")
    ] = None,
    data: DataOption = None,
    seed: SeedOption = None,
    servers: ServersOption = None,
    out: Annotated[Path, typer.Option(help="Where the race's folder is made.")] = Path("runs"),
    json_file: JsonOption = None,
) -> None:
    """Race strategies on the same emulated cluster, model, data and seed; print the table, write a report."""
    from paceline.race.race import run_race
    from paceline.race.spec import RaceSpec

    if speeds is None and cluster is None:
        speeds = "1,1,0.5,0.25"
    spec = RaceSpec(
        strategies=tuple(name.strip() for name in strategies.split(",") if name.strip()),
        speeds=parse_speeds(speeds),
        workload=workload,
        model=model,
        optimizer=optimizer,
        lr=lr,
        backend=backend,
        seconds=seconds,
        target=target,
        cluster=str(cluster.absolute()) if cluster else None,
        micro_batch_seconds=micro_batch_seconds,
        data=str(data.absolute()) if data else None,
        seed=seed_of(seed, cluster),
        servers=servers,
    )
    check_writable(json_file)
    result = run_race(spec, out)
    write_json(json_file, result)
    for strategy, error in result["failed"].items():
        raise PacelineError(f"{strategy} did not finish: {error}")


@app.command()
def simulate(
    strategy: Annotated[str, typer.Option(help="Its name; options behind colons.")] = "abs-sgd",
    workers: Annotated[int | None, typer.Option(help="How many; the devices are repeated in turn.", min=1)] = None,
    speeds: SpeedsOption = None,
    cluster: ClusterOption = None,
    seconds: Annotated[float, typer.Option(help="Of virtual time.")] = 60.0,
    micro_batch_seconds: Annotated[
        float | None, typer.Option(help="Of a micro-batch at speed 1; with --speeds.")
    ] = None,
    micro_batch: Annotated[int, typer.Option(help="Samples in a micro-batch.", min=1)] = 32,
    parameters: Annotated[int, typer.Option(help="Of the model; they decide what an all-reduce costs.", min=1)] = (
        1_000_000
    ),
    servers: ServersOption = None,
    seed: SeedOption = None,
    json_file: JsonOption = None,
    report: Annotated[Path | None, typer.Option(help="Write a report, one HTML file, to this file.")] = None,
    trace: TraceOption = None,
) -> None:
    """Simulate a cluster in virtual time, timing only: no gradients, so thousands of workers are cheap."""
    from paceline.race.timing import cluster_of, simulate_timing

    for file, option in ((json_file, "--json"), (report, "--report"), (trace, "--trace")):
        check_writable(file, option)
    described = cluster_of(workers, parse_speeds(speeds), cluster, micro_batch_seconds, seed)
    result = simulate_timing(
        strategy,
        described,
        seconds=seconds,
        micro_batch=micro_batch,
        parameters=parameters,
        servers=servers,
        report=report,
        trace=trace,
    )
    write_json(json_file, result)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Of a race or a run, e.g. runs/race/TIME.")],
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    png: Annotated[
        Path | None, typer.Option(help="Draw the main charts to this .png file; .svg gives the same as vectors.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file.")] = None,
    trace: TraceOption = None,
) -> None:
    """Write report.html into a folder from what was recorded there; also a picture, tables or a trace."""
    from paceline.report.command import write_all

    for file, option in ((png, "--png"), (markdown, "--markdown"), (trace, "--trace")):
        check_writable(file, option)
    write_all(folder, open_page=open_page, png=png, markdown=markdown, trace=trace)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or a run's folder: its newest whole one is taken.")],
    file: Annotated[Path, typer.Argument(help="The model's state_dict goes here; torch.load reads it.")],
) -> None:
    """Write the model of a checkpoint as a plain PyTorch state_dict, without optimizer and counters."""
    from paceline.run.checkpoint import export as export_model

    check_writable(file, "FILE")
    typer.echo(f"Wrote the model of {export_model(source, file)} to {file}")


@app.command()
def limit(
    speeds: SpeedsOption = None,
    noise_scale: Annotated[
        float | None, typer.Option(help="Of the gradients, in samples; a race measures it.", show_default=False)
    ] = None,
    comm_seconds: Annotated[float, typer.Option(help="Of one all-reduce; 0 is a free network.")] = 0.0,
    micro_batch_seconds: Annotated[float, typer.Option(help="Of a micro-batch at speed 1.")] = 0.02,
    micro_batch: Annotated[int, typer.Option(help="Samples in a micro-batch.", min=1)] = 32,
    json_file: JsonOption = None,
) -> None:
    """Print what no method can beat on a cluster, what binds it, and how near to it each kind of method can come."""
    from paceline.race.limit_of_cluster import show_limit

    check_writable(json_file)
    result = show_limit(
        parse_speeds(speeds),
        noise_scale=noise_scale,
        comm_seconds=comm_seconds,
        micro_batch_seconds=micro_batch_seconds,
        micro_batch=micro_batch,
    )
    write_json(json_file, result)


@app.command()
def topology(
    graph: Annotated[
        str | None,
        typer.Option(
            help="ring, torus, exponential, complete, star or erdos-renyi. Default: the cluster file's, or ring."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many. Default: the cluster file's.", min=1)] = None,
    budget: Annotated[float, typer.Option(help="Of MATCHA: the part of the matchings that a round uses.")] = 0.5,
    cluster: ClusterOption = None,
    parameters: Annotated[int, typer.Option(help="Of the model, 4 bytes each.", min=1)] = 1_000_000,
    probability: Annotated[
        float | None, typer.Option(help="Of each edge of an erdos-renyi. Default: 2 ln(n) / n.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of an erdos-renyi. Default: 0.", min=0)] = None,
    json_file: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw graph and matchings to this .svg or .png file.")] = None,
) -> None:
    """Print what a graph of workers is worth to decentralised training: matchings, mixing rates and bytes."""
    from paceline.race.topology_of_cluster import show_topology, topology_of
    from paceline.report.graph_picture import check_suffix

    check_writable(json_file)
    check_writable(plot, "--plot")
    if plot is not None:
        check_suffix(plot)
    described, number = topology_of(graph, workers, cluster, probability, seed)
    write_json(json_file, show_topology(described, number, budget=budget, parameters=parameters, plot=plot))


@app.command()
def doctor(
    workload: WorkloadOption = "digits",
    model: ModelOption = None,
    data: DataOption = None,
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks on the CPU, without a GPU. Default: one a core.", min=1, show_default=False),
    ] = None,
    peers: Annotated[
        str | None, typer.Option(help="Other machines, host:port, comma-separated; `--listen` there first.")
    ] = None,
    listen: Annotated[bool, typer.Option("--listen", help="Answer the doctors of other machines instead.")] = False,
    host: Annotated[str, typer.Option(help="With --listen: the address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --listen; 0 takes a free one.", min=0, max=65535)] = 0,
    secret_file: Annotated[
        Path | None,
        typer.Option(help="Of the secret that peers share. Default: PACELINE_SECRET, or ~/.config/paceline/secret."),
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Write what was measured as a cluster file.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Look at this machine and its peers: what works, how fast it is, and which strategy suits it."""
    from paceline.doctor import command
    from paceline.doctor.words import Speaker

    check_writable(json_file)
    check_writable(write, "--write")
    if listen and peers is not None:
        raise PacelineError("Give either --listen or --peers.", remedy="One machine listens, another one calls it.")
    settings = command.Settings(
        workload=workload, model=model, data=data, nproc=nproc, peers=peers, secret_file=secret_file, write=write
    )
    if listen:
        command.listen(settings, host, port, Speaker())
    result = command.examine(settings, Speaker())
    write_json(json_file, result)
    raise typer.Exit(1 if result["problems"] else 0)


@app.command()
def strategies() -> None:
    """List the strategies, their options and defaults."""
    from paceline.strategies import STRATEGIES, options

    width = max(map(len, STRATEGIES))
    for name, kind in STRATEGIES.items():
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        settings = ", ".join(f"{key}={value}" for key, value in options(kind).items())
        typer.echo(f"{name:{width}} {summary}\n{'':{width}} options: {settings or 'none'}")
    typer.echo("\nWith options: abs-sgd:delay_cure=none:min_micro_batches=2")


launching.add_to(app)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False) -> None:
    if show:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


def seed_of(given: int | None, cluster: Path | None) -> int:
    """The seed that was given, or the cluster file's."""
    if given is not None or cluster is None:
        return given or 0
    from paceline.simulator.cluster_file import read_cluster

    return read_cluster(cluster).seed


def parse_speeds(text: str | None) -> tuple[float, ...]:
    """`1,1,0.5` as numbers above zero."""
    if text is None:
        return ()
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise PacelineError(
            f"--speeds {text!r} is not a list of numbers.", remedy="For example --speeds 1,1,0.5,0.25."
        ) from None
    wrong = [speed for speed in speeds if not 0 < speed < float("inf")]
    if wrong:
        raise PacelineError(
            f"A worker cannot have the speed {wrong[0]:g}.",
            where=f"--speeds {text}",
            remedy="Give speeds above zero; leave out workers that do not work.",
        )
    return speeds


def check_writable(file: Path | None, option: str = "--json") -> None:
    """Protest before the work, not after it."""
    if file is not None and not file.absolute().parent.is_dir():
        raise PacelineError(
            f"The folder of {file} does not exist.", remedy=f"Make it, or give another file to {option}."
        )
    if file is not None and file.is_dir():
        raise PacelineError(f"{file} is a folder.", remedy=f"Give a file to {option}.")


def write_json(file: Path | None, result: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """The entry point: a user's mistake becomes one paragraph and exit code 2, never a traceback."""
    try:
        app()
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        raise SystemExit(130) from None
