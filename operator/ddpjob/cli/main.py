"""The commands of `ddpjob` and their options.

Slow imports stay inside the commands, so that `--help` is quick.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpjob.cli import checks, cluster
from ddpjob.cli.app import CLUSTER, HERE, MANIFESTS, OPERATOR, app, require_choice
from ddpjob.cli.connection import Connection
from ddpjob.cli.options import (
    Accelerator,
    Checkpoints,
    Code,
    Context,
    Gpus,
    Image,
    Kubeconfig,
    Name,
    Namespace,
    Nodes,
    Nproc,
    Script,
    refuse_without_script,
)
from ddpjob.core.api import names, profiles
from ddpjob.core.api.readers import quoted

__all__ = ["app", "checks", "cluster"]

# A section of the help of `ddpjob run`.
SIZE = "Instead of what the manifest says"


@app.command(short_help="Print a manifest.", rich_help_panel=MANIFESTS)
def init(
    workload: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="Name of an example workload. Without it, list all workloads. With --script, the "
            "arguments of the script.",
        ),
    ] = None,
    nodes: Nodes = None,
    accelerator: Accelerator = profiles.DEFAULT,
    gpus: Gpus = None,
    script: Script = None,
    code: Code = None,
    image: Image = None,
    name: Name = None,
    nproc: Nproc = None,
    checkpoints: Checkpoints = None,
) -> None:
    """Print the manifest of an example workload or of a script, or list the workloads.

    Examples: ddpjob init digits > job.yaml;
    ddpjob init --script train.py --image IMAGE --nodes 4 -- --epochs 3 > job.yaml
    """
    from ddpjob.cli.init import manifest, workloads
    from ddpjob.cli.own_script import OwnScript, print_manifest
    from ddpjob.cli.sizes import resolve_gpus, resolve_nodes

    words = workload or []
    if script:
        own = OwnScript(
            script, image, code, words, name, nodes, nproc, accelerator, gpus, checkpoints
        )
        print_manifest(own.resolved())
        return
    require_choice("--accelerator", accelerator, profiles.catalog())
    size = resolve_nodes(accelerator, nodes)
    refuse_without_script(code=code, image=image, name=name, nproc=nproc, checkpoints=checkpoints)
    if not words:
        for known, row in workloads().items():
            typer.echo(f"{known:16}{row['title']}")
        return
    if len(words) > 1:
        raise typer.BadParameter(f"expected one name, got {' '.join(words)}", param_hint="WORKLOAD")
    # The trainer spells some workloads with an underscore.
    chosen = words[0].replace("_", "-")
    require_choice("WORKLOAD", chosen, workloads())
    gpus = resolve_gpus(accelerator, gpus, workloads()[chosen]["gpusPerProcess"])
    typer.echo(manifest(chosen, nodes=size, accelerator=accelerator, gpus=gpus), nl=False)


@app.command(short_help="Run a job on this machine.", rich_help_panel=HERE)
def run(
    manifest: Annotated[
        Path, typer.Argument(metavar="FILE", help="Manifest with one DDPJob and its ConfigMaps.")
    ],
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="Run on this machine. Required, since `ddpjob submit` runs jobs in a cluster.",
        ),
    ] = False,
    runs: Annotated[
        Path, typer.Option(help="Folder of all runs. Each job gets a folder of its own in it.")
    ] = Path("ddpjob-runs"),
    claim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            show_default="RUNS/JOB/claims/NAME",
            help="Use FOLDER as the PersistentVolumeClaim NAME. May be repeated.",
        ),
    ] = None,
    config_map: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="Use a file, or the files of a folder, as the ConfigMap NAME, as `kubectl create "
            "configmap NAME --from-file PATH` does. May be repeated.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Delete the job's claims first, with their checkpoints."),
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="that of the manifest",
            help="Number of nodes.",
            rich_help_panel=SIZE,
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="that of the manifest, or what fits this machine",
            help="Number of processes of each node.",
            rich_help_panel=SIZE,
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default="that of the manifest, or 0",
            help="Number of restarts after failures. A cluster gives a job 3 by default.",
            rich_help_panel=SIZE,
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Variable of the processes. May be repeated.",
            rich_help_panel=SIZE,
        ),
    ] = None,
) -> None:
    """Run a job on this machine, without a cluster. Each node is one group of processes.

    Exit codes:
    0: the job is Complete
    1: the job Failed
    2: the manifest or an option was refused
    128 + N: signal N ended the run
    """
    if not local:
        raise typer.BadParameter(
            "is required to run a job on this machine; to run it in a cluster, use `ddpjob submit`",
            param_hint="--local",
        )
    from ddpjob.cli.extras import require_extra
    from ddpjob.local.sizes import Overrides

    with require_extra("local"):
        from ddpjob.cli.run_local import RunOptions, run_local

    claims = _read_places(claim or [], "--claim", "NAME=FOLDER")
    for name, folder in claims.items():
        if not folder.is_dir():
            raise typer.BadParameter(
                f"{name}={folder}: folder {folder} does not exist", param_hint="--claim"
            )
    config_maps = _read_places(config_map or [], "--config-map", "NAME=PATH")
    overrides = Overrides(nodes, nproc, max_restarts, _read_pairs(env or [], "--env", "NAME=VALUE"))
    options = RunOptions(fresh, overrides)
    raise typer.Exit(run_local(manifest, runs, claims, config_maps, options))


def _read_places(options: Iterable[str], hint: str, form: str) -> dict[str, Path]:
    """Return the paths of options such as --claim NAME=FOLDER by their names."""
    return {name: Path(path) for name, path in _read_pairs(options, hint, form).items()}


def _read_pairs(options: Iterable[str], hint: str, form: str) -> dict[str, str]:
    """Return the values of options such as --env NAME=VALUE by their names."""
    pairs = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"must be {form}, got {quoted(option)}", param_hint=hint)
        pairs[name] = value
    return pairs


@app.command(short_help="Draw the curves of jobs in the terminal.", rich_help_panel=CLUSTER)
def plot(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB|FOLDER|FILE…",
            help="Jobs in a cluster, folders of local runs, their metrics.jsonl, logs of node 0, "
            "or - for stdin.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Write the curves to this file too (.png, .pdf or .svg)."),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Draw the loss and accuracy of jobs, or their message speeds, in the terminal.

    A name that is no file is that of a job in a cluster.

    Example: ddpjob plot digits ddpjob-runs/digits
    """
    from ddpjob.cli.extras import require_extra
    from ddpjob.cli.plot import PlotError, plot_jobs

    try:
        with require_extra("local"):
            plot_jobs(jobs, out, Connection(namespace, context, kubeconfig))
    except PlotError as error:
        typer.echo(f"ddpjob plot: {error}", err=True)
        raise typer.Exit(2) from error


def _job_defaults(text: str) -> Mapping[str, Any]:
    """Read the option --job-defaults. Raises BadParameter."""
    from ddpjob.core.api.readers import SpecError
    from ddpjob.core.render.job_defaults import read_job_defaults

    try:
        return read_job_defaults(json.loads(text))
    except (ValueError, SpecError) as error:
        raise typer.BadParameter(str(error), param_hint="--job-defaults") from error


DeadNodeSeconds = Annotated[
    int,
    typer.Option(
        min=0,
        help="Seconds after which pods on an unreachable node are deleted by force. 0: never.",
    ),
]
GangTimeoutSeconds = Annotated[
    int,
    typer.Option(
        min=1,
        help="Seconds after which a gang that fits only in part gives way to an older one.",
    ),
]
DisruptionTaints = Annotated[
    list[str] | None,
    typer.Option(
        show_default="none",
        help="Key of a taint that announces the end of a node. May be repeated.",
    ),
]


@app.command(short_help="Run the operator.", rich_help_panel=OPERATOR)
def operator(
    namespace: Annotated[
        list[str] | None,
        typer.Option(show_default="all namespaces", help="Namespace to watch. May be repeated."),
    ] = None,
    exclude_namespace: Annotated[
        list[str] | None,
        typer.Option(show_default="none", help="Namespace to do nothing in. May be repeated."),
    ] = None,
    pod_security: Annotated[
        str,
        typer.Option(help="Pod Security level of the generated pods: none or restricted."),
    ] = "none",
    job_defaults: Annotated[
        str,
        typer.Option(help="Fields of the pods for jobs that do not set them, as a JSON object."),
    ] = "{}",
    dead_node_seconds: DeadNodeSeconds = 30,
    gang_timeout_seconds: GangTimeoutSeconds = 600,
    disruption_taint: DisruptionTaints = None,
    lease_namespace: Annotated[
        str,
        typer.Option(envvar="POD_NAMESPACE", help="Namespace of the Lease for leader election."),
    ] = "default",
    lease_name: Annotated[
        str, typer.Option(help="Name of the Lease for leader election.")
    ] = names.MANAGER,
    http_port: Annotated[int, typer.Option(help="Port of /healthz, /readyz and /metrics.")] = 8080,
    job_metrics: Annotated[
        bool, typer.Option(help="Give metrics of each job, with its namespace and name.")
    ] = True,
    log_format: Annotated[str, typer.Option(help="Format of log lines: json or plain.")] = "json",
    log_level: Annotated[
        str, typer.Option(help="Lowest level to log: debug, info, warning or error.")
    ] = "info",
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            envvar="KUBECONFIG",
            help="Kubeconfig file. Only used outside a cluster.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the operator, in a cluster or against the cluster of a kubeconfig.

    Of several operators with the same Lease, one is active at a time.
    """
    if namespace and exclude_namespace:
        message = "cannot be combined with --namespace: only the namespaces given there are watched"
        raise typer.BadParameter(message, param_hint="--exclude-namespace")
    require_choice("--pod-security", pod_security, ("none", "restricted"))
    require_choice("--log-format", log_format, ("json", "plain"))
    log_level = log_level.lower()
    require_choice("--log-level", log_level, ("debug", "info", "warning", "error"))
    # The dependencies of the controller are an extra, which other commands do not need.
    from ddpjob.cli.extras import require_extra
    from ddpjob.core.observe.observation import ClusterPolicy
    from ddpjob.core.render.pod_context import Settings

    with require_extra("controller"):
        from ddpjob.controller.main import Options, run, set_up_logging

    defaults = _job_defaults(job_defaults)
    set_up_logging(log_format, log_level)
    options = Options(
        namespaces=namespace or (),
        excluded=frozenset(exclude_namespace or ()),
        settings=Settings(restricted=pod_security == "restricted", defaults=defaults),
        policy=ClusterPolicy(
            dead_node_time=timedelta(seconds=dead_node_seconds) if dead_node_seconds else None,
            gang_timeout=timedelta(seconds=gang_timeout_seconds),
            disruption_taints=tuple(disruption_taint or ()),
        ),
        lease_namespace=lease_namespace,
        lease_name=lease_name,
        http_port=http_port,
        kubeconfig=kubeconfig,
        job_metrics=job_metrics,
    )
    raise typer.Exit(run(options))


if __name__ == "__main__":
    app()
