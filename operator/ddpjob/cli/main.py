"""`ddpjob`: options in, exit codes out. Heavy imports stay inside the commands, so that --help is quick."""

from pathlib import Path
from typing import Annotated

import typer

from ddpjob import __version__
from ddpjob.core import names

app = typer.Typer(
    name="ddpjob",
    help="Run PyTorch DistributedDataParallel jobs on Kubernetes, and the same manifest on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def init(
    workload: Annotated[
        str | None, typer.Argument(help="Its name; without one, all are listed.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="2, or 1 where nodes cannot reach each other",
            help="Pods, one torchrun agent each.",
        ),
    ] = None,
    accelerator: Annotated[
        str, typer.Option(help="cpu, gpu, trn1.32xlarge or trn1.2xlarge.")
    ] = "cpu",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a node, with --accelerator gpu.")
    ] = None,
) -> None:
    """Print the manifest of a workload of ours: `ddpjob init digits > job.yaml`."""
    from ddpjob.cli.init import IMAGES, manifest, workloads
    from ddpjob.core import profiles
    from ddpjob.core.readers import SpecError

    if workload is None:
        for name, row in workloads().items():
            typer.echo(f"{name:16}{row['title']}")
        return
    workload = workload.replace("_", "-")  # the trainer's spelling
    _one_of("WORKLOAD", workload, tuple(workloads()))
    _one_of("--accelerator", accelerator, tuple(IMAGES))
    if nodes is None:
        nodes = 2 if profiles.catalog()[accelerator].multi_node else 1
    try:
        profiles.check_size(accelerator, nodes, None)
    except SpecError as error:
        raise typer.BadParameter(str(error), param_hint="--nodes") from error
    each = workloads()[workload]["gpusPerProcess"]
    if gpus is not None and (accelerator != "gpu" or gpus % each):
        wanted = (
            "--accelerator gpu"
            if accelerator != "gpu"
            else f"a multiple of {each}, the GPUs of a process"
        )
        raise typer.BadParameter(f"needs {wanted}", param_hint="--gpus")
    typer.echo(
        manifest(workload, nodes=nodes, accelerator=accelerator, gpus=gpus or each), nl=False
    )


@app.command()
def run(
    manifest: Annotated[Path, typer.Argument(help="A file with one DDPJob.", show_default=False)],
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="On this machine, without a cluster: one process group a node."
        ),
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder that gets a folder for each job.")] = Path(
        "ddpjob-runs"
    ),
    claim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="Use FOLDER for the claim NAME (default: RUNS/<job>/claims/NAME); may be repeated.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Empty the job's own claim folders first: no checkpoint is resumed."
        ),
    ] = False,
) -> None:
    """Run a job. Exit code 0: Complete, 1: Failed, 2: the manifest cannot run here, 130: interrupted."""
    if not local:
        raise typer.BadParameter(
            "on a cluster a job is submitted with `kubectl apply -f`; to run it on this machine, add --local",
            param_hint="--local",
        )
    from ddpjob.cli.run_local import run_local

    raise typer.Exit(run_local(manifest, runs, _claims(claim or []), fresh))


def _claims(options: list[str]) -> dict[str, Path]:
    claims = {}
    for option in options:
        name, equals, folder = option.partition("=")
        if not (name and equals and Path(folder).is_dir()):
            raise typer.BadParameter(
                f"{option!r} is not NAME=FOLDER with a folder that exists", param_hint="--claim"
            )
        claims[name] = Path(folder).resolve()
    return claims


@app.command()
def plot(
    files: Annotated[
        list[str],
        typer.Argument(help="metrics.jsonl of local runs, logs of a job's node 0, or - for stdin."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the picture to this file too (png, pdf, svg).")
    ] = None,
) -> None:
    """Draw loss and accuracy of finished or running jobs in the terminal: `kubectl logs JOB-0-0 | ddpjob plot -`."""
    from ddpjob.cli.plot import NothingToPlot
    from ddpjob.cli.plot import plot as draw

    try:
        draw(files, out)
    except NothingToPlot as error:
        typer.echo(f"ddpjob plot: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def operator(
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="Watch this namespace only; may be repeated. Default: all."),
    ] = None,
    pod_security: Annotated[
        str,
        typer.Option(help="Make generated pods pass this Pod Security level: none or restricted."),
    ] = "none",
    lease_namespace: Annotated[
        str,
        typer.Option(
            envvar="POD_NAMESPACE",
            help="Namespace of the Lease that makes one operator the leader.",
        ),
    ] = "default",
    lease_name: Annotated[str, typer.Option(help="Name of that Lease.")] = names.MANAGER,
    http_port: Annotated[int, typer.Option(help="Port of /healthz, /readyz and /metrics.")] = 8080,
    log_format: Annotated[str, typer.Option(help="json or plain.")] = "json",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    kubeconfig: Annotated[
        Path | None,
        typer.Option(envvar="KUBECONFIG", help="Only outside a cluster.", show_default=False),
    ] = None,
) -> None:
    """Run the operator: in a cluster as its chart installs it, or here against a kubeconfig."""
    _one_of("--pod-security", pod_security, ("none", "restricted"))
    _one_of("--log-format", log_format, ("json", "plain"))
    _one_of("--log-level", log_level.lower(), ("debug", "info", "warning", "error"))
    from ddpjob.controller.main import Options, run, set_up_logging

    set_up_logging(log_format, log_level)
    options = Options(
        namespaces=namespace or (),
        restricted=pod_security == "restricted",
        lease_namespace=lease_namespace,
        lease_name=lease_name,
        http_port=http_port,
        kubeconfig=kubeconfig,
    )
    raise typer.Exit(run(options))


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}", param_hint=option)


if __name__ == "__main__":
    app()
