"""The options of commands for a new manifest. Their help names the accelerators."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ddpjob.core.api import profiles
from ddpjob.core.api.readers import either

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
        help="Image with Python, torch and what the script imports. Required in a cluster.",
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
Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Variable of the processes. May be repeated.",
        rich_help_panel=OWN,
    ),
]
SecretEnv = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=SECRET[:KEY]",
        help="Variable with the value of a key of a Secret that exists. Without KEY, the key has "
        "the name of the variable. May be repeated.",
        rich_help_panel=OWN,
    ),
]
Cpu = Annotated[
    str | None,
    typer.Option(help="CPU request of each pod, such as 4 or 500m.", rich_help_panel=OWN),
]
Memory = Annotated[
    str | None,
    typer.Option(help="Memory request and limit of each pod, such as 16Gi.", rich_help_panel=OWN),
]
Setup = Annotated[
    str | None,
    typer.Option(
        metavar="COMMANDS",
        help="Shell text that each pod runs once before the script, such as "
        "'pip install -r requirements.txt'.",
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


@dataclass(frozen=True)
class OwnOptions:
    """The options with an effect only together with --script. None means not given."""

    code: Path | None = None
    image: str | None = None
    name: str | None = None
    nproc: int | None = None
    checkpoints: str | None = None
    env: list[str] | None = None
    secret_env: list[str] | None = None
    cpu: str | None = None
    memory: str | None = None
    setup: str | None = None

    def refuse(self, accelerator: str = profiles.DEFAULT, **others: object) -> None:
        """Raise BadParameter for an option given without --script, also of `others`."""
        chosen = None if accelerator == profiles.DEFAULT else accelerator
        for option, value in {**vars(self), **others, "accelerator": chosen}.items():
            if value is not None:
                message = (
                    "requires --script; to change a manifest use --set, such as --set spec.nodes=4"
                )
                raise typer.BadParameter(message, param_hint=f"--{option.replace('_', '-')}")
