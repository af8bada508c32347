"""`ddpjob init`: the manifest of a workload of the trainer, or of a script."""

from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import typer
from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpjob.cli.options import require_choice
from ddpjob.cli.own_script import OwnScript, print_manifest
from ddpjob.cli.script_options import (
    Accelerator,
    Checkpoints,
    Code,
    Cpu,
    Env,
    Gpus,
    Image,
    Memory,
    Name,
    Nodes,
    Nproc,
    OwnOptions,
    Script,
    SecretEnv,
    Setup,
)
from ddpjob.cli.sizes import resolve_gpus, resolve_nodes
from ddpjob.core.api import profiles
from ddpjob.core.api.profiles import Profile
from ddpjob.core.api.readers import Dict
from ddpjob.core.api.yaml_text import load_yaml

# The optional fields of a row in workloads.yaml.
DEFAULTS: Dict = {
    "needs": None,
    "data": None,
    "checkpoint": False,
    "processes": None,
    "gpusPerProcess": 1,
    "onXla": [],
    "limit": None,
    "maxRestarts": None,
}


def command(
    workload: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
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
    env: Env = None,
    secret_env: SecretEnv = None,
    cpu: Cpu = None,
    memory: Memory = None,
    setup: Setup = None,
) -> None:
    """Print the manifest of an example workload or of a script, or list the workloads.

    Examples: ddpjob init digits > job.yaml;
    ddpjob init --script train.py --image IMAGE --nodes 4 -- --epochs 3 > job.yaml
    """
    words = workload or []
    options = OwnOptions(code, image, name, nproc, checkpoints, env, secret_env, cpu, memory, setup)
    if script:
        own = OwnScript(script, args=words, nodes=nodes, accelerator=accelerator, gpus=gpus)
        print_manifest(own.with_options(options).resolved())
        return
    require_choice("--accelerator", accelerator, profiles.catalog())
    size = resolve_nodes(accelerator, nodes)
    options.refuse()
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


@cache
def workloads() -> dict[str, Dict]:
    """Return the row of each workload in workloads.yaml, with all fields."""
    rows = load_yaml(files("ddpjob.cli").joinpath("workloads.yaml").read_text())
    return {name: {**DEFAULTS, **row} for name, row in rows.items()}


def manifest(workload: str, *, nodes: int, accelerator: str, gpus: int) -> str:
    """Return a manifest as YAML with comments.

    `workload` and `accelerator` must be known. `gpus` is the number of GPUs of a node.
    """
    row = workloads()[workload]
    profile = profiles.catalog()[accelerator]
    args = ["-m", "ddp_trainer", *row["args"]]
    if profile.backend == "xla":
        args += row["onXla"]
    context = {
        **row,
        "name": workload,
        "file": f"{workload}.yaml",
        "args": args,
        "claims": " and ".join(f"`{claim}`" for claim in _claims(row)),
        "nodes": nodes,
        "profile": profile,
        "default_accelerator": profiles.DEFAULT,
        "gpus": gpus,
        "processes": _processes(row, profile, gpus),
    }
    # StrictUndefined: a misspelled field in the template must not become an empty string.
    environment = Environment(
        loader=PackageLoader("ddpjob.cli"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("job.yaml.j2").render(context)


def _claims(row: Dict) -> list[str]:
    claims = []
    if row["data"]:
        claims.append("ddpjob-data")
    if row["checkpoint"]:
        claims.append("ddpjob-checkpoints")
    return claims


def _processes(row: Dict, profile: Profile, gpus: int) -> Any:
    """Return nprocPerNode, or None if the default for the accelerator is right."""
    if not profile.all_devices:
        return row["processes"]
    # By default a node has one process for each GPU.
    if profile.process_per and row["gpusPerProcess"] > 1:
        return gpus // row["gpusPerProcess"]
    return None
