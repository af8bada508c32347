"""`ddpjob operator`: run the operator."""

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpjob.cli.extras import require_extra
from ddpjob.cli.options import require_choice
from ddpjob.core.api import names
from ddpjob.core.api.readers import SpecError
from ddpjob.core.observe.observation import ApiState, ClusterPolicy
from ddpjob.core.render.job_defaults import read_job_defaults
from ddpjob.core.render.pod_context import Settings

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


QUEUES = {"on": ApiState.UNKNOWN, "off": ApiState.OFF, "refused": ApiState.REFUSED}


def command(
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
    queues: Annotated[
        str,
        typer.Option(
            help="What the label of a queue of Kueue does: on makes a job wait for room, off "
            "ignores the label, and with refused such a job does not start."
        ),
    ] = "on",
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
    require_choice("--queues", queues, QUEUES)
    require_choice("--log-format", log_format, ("json", "plain"))
    log_level = log_level.lower()
    require_choice("--log-level", log_level, ("debug", "info", "warning", "error"))
    # The dependencies of the controller are an extra. Other commands do not need it.
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
        queues=QUEUES[queues],
    )
    raise typer.Exit(run(options))


def _job_defaults(text: str) -> Mapping[str, Any]:
    """Read the option --job-defaults. Raises BadParameter."""
    try:
        return read_job_defaults(json.loads(text))
    except (ValueError, SpecError) as error:
        raise typer.BadParameter(str(error), param_hint="--job-defaults") from error
