"""The options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from ddpjob.cli.connection import Connection
from ddpjob.core.api import profiles
from ddpjob.core.api.readers import either


def chosen(context: typer.Context) -> Connection:
    """Return the connection that the options before the cursor choose."""
    found = context.params
    return Connection(found.get("namespace"), found.get("context"), found.get("kubeconfig"))


# typer passes the context by its type.
def complete_namespaces(context: typer.Context, incomplete: str) -> list[str]:
    from ddpjob.cli.complete import namespaces

    return namespaces(chosen(context), incomplete)


def complete_jobs(context: typer.Context, incomplete: str) -> list[str]:
    from ddpjob.cli.complete import jobs

    return jobs(chosen(context), incomplete)


Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace of the jobs.",
        show_default="that of the kubeconfig's context",
        autocompletion=complete_namespaces,
        rich_help_panel="Cluster",
    ),
]
AllNamespaces = Annotated[
    bool,
    typer.Option("--all-namespaces", "-A", help="All namespaces.", rich_help_panel="Cluster"),
]
Context = Annotated[
    str | None,
    typer.Option(
        help="Context of the kubeconfig.", show_default="current", rich_help_panel="Cluster"
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        help="Kubeconfig file.",
        show_default="$KUBECONFIG, else ~/.kube/config",
        rich_help_panel="Cluster",
    ),
]
JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=complete_jobs)
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a field of the jobs, such as spec.nodes=4. May be repeated.",
    ),
]

# Options for a script of one's own.
OWN = "A script of your own"
Script = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Script that the job runs. It travels in a ConfigMap, so no image has to be built. "
        "Arguments of the script follow after --.",
        rich_help_panel=OWN,
    ),
]
Code = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder that travels with the script, which is a file in it.",
        show_default="only the script",
        rich_help_panel=OWN,
    ),
]
Image = Annotated[
    str | None,
    typer.Option(
        help="Image with Python, torch and what the script imports.",
        show_default="the trainer's image for the accelerator",
        rich_help_panel=OWN,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(help="Name of the job.", show_default="that of the script", rich_help_panel=OWN),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of processes of each node.",
        show_default="one for each device, or one",
        rich_help_panel=OWN,
    ),
]
Checkpoints = Annotated[
    str | None,
    typer.Option(
        metavar="CLAIM",
        help="PersistentVolumeClaim for checkpoints. The script finds its folder in "
        "$DDP_CHECKPOINT_DIR.",
        rich_help_panel=OWN,
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="2, or 1 if the accelerator has no network between nodes",
        help="Number of nodes. Each node is one pod with one torchrun agent.",
    ),
]
Accelerator = Annotated[
    str, typer.Option(help=f"Accelerator of the nodes: {either(profiles.catalog())}.")
]
Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="the GPUs of one process",
        help="Number of GPUs of each node. Requires --accelerator "
        f"{either(profiles.profiles_per_device())}.",
    ),
]


def refuse_without_script(**options: object) -> None:
    """Raise BadParameter for an option that has no effect without --script."""
    for option, value in options.items():
        if value is not None:
            message = (
                "requires --script; to change a manifest use --set, such as --set spec.nodes=4"
            )
            raise typer.BadParameter(message, param_hint=f"--{option}")
