"""`ddpjob plot`: the curves of runs, read from the JSON lines of their trainers."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ddpjob.cli.connection import Connection
from ddpjob.cli.extras import require_extra
from ddpjob.cli.options import Context, Kubeconfig, Namespace
from ddpjob.client.errors import ClientError
from ddpjob.core.api.readers import Dict
from ddpjob.jobs.run_metrics import RunMetrics, parse_metric
from ddpjob.show.curves import save_figure

STDIN = "-"

PICTURE = Path("curves.png")

# The events in the folder of a local run.
METRICS_FILE = "metrics.jsonl"


# An example of a line with figures. Such lines are recognised in the output of any script.
HOW_TO_PRINT = 'print lines such as {"step": 50, "steps": 1500, "loss": 0.1} on rank 0'


class PlotError(ValueError):
    """The curves cannot be read or drawn. The message says what to do."""


def command(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB|FOLDER|FILE…",
            help="Jobs in a cluster, folders of local runs, their metrics.jsonl, logs of node 0, "
            "or - for stdin.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="The file of the picture (.png, .pdf or .svg).")
    ] = PICTURE,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Draw the loss and accuracy of jobs, or their message speeds, as a picture.

    A name that is no file is that of a job in a cluster.

    Example: ddpjob plot digits ddpjob-runs/digits
    """
    try:
        with require_extra("local"):
            plot_jobs(jobs, out, Connection(namespace, context, kubeconfig))
    except PlotError as error:
        typer.echo(f"ddpjob plot: {error}", err=True)
        raise typer.Exit(2) from error


def plot_jobs(names: list[str], out: Path, connection: Connection) -> None:
    """Draw the curves into the picture `out`. Raises PlotError."""
    runs = {}
    for path in names:
        name = _run_name(path)
        # Two files of the same name are told apart by their paths.
        if name in runs:
            name = path
        runs[name] = _read_run(path, connection)
    try:
        is_drawn = save_figure(runs, ", ".join(runs), out)
    # matplotlib raises ValueError for an unknown suffix.
    except (OSError, ValueError) as error:
        raise PlotError(f"--out {out}: cannot write the picture: {error}") from error
    if not is_drawn:
        raise PlotError(
            f"{', '.join(names)}: no losses, accuracies or speeds found; the trainer has not "
            f"printed any, or the pods with its output are deleted; {HOW_TO_PRINT}"
        )
    print(out)


def _run_name(path: str) -> str:
    """Return the name of a local run's folder, or the name of another file without its suffix."""
    file = Path(path)
    if file.name == METRICS_FILE:
        return file.resolve().parent.name
    if file.is_dir():
        return file.resolve().name
    return file.stem


def _read_run(name: str, connection: Connection) -> RunMetrics:
    """Return the events of a file, of the folder of a local run, or of a job in a cluster."""
    if name == STDIN or Path(name).is_file():
        return RunMetrics(events=_read_events(name))
    if Path(name).is_dir():
        if not (Path(name) / METRICS_FILE).exists():
            raise PlotError(f"{name}: the run has printed no figures; {HOW_TO_PRINT}")
        return RunMetrics(events=_read_events(str(Path(name) / METRICS_FILE)))
    if "/" in name or "." in name:
        raise PlotError(f"{name}: the file does not exist")
    try:
        return asyncio.run(_read_job(name, connection))
    except ClientError as error:
        raise PlotError(f"{name}: no such file, and {error}") from error


async def _read_job(name: str, connection: Connection) -> RunMetrics:
    async with await connection.connect() as client:
        return await client.metrics(name)


def _read_events(path: str) -> list[Dict]:
    try:
        if path == STDIN:
            text = sys.stdin.buffer.read().decode(errors="replace")
        else:
            text = Path(path).read_text(errors="replace")
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise PlotError(f"{path}: cannot read the file: {reason}") from error
    events = [parse_metric(line) for line in text.splitlines()]
    return [event for event in events if event is not None]
