"""`ddpjob init`: the manifest of a workload of the trainer, to apply as it is or to change."""

from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpjob.core.api import profiles
from ddpjob.core.api.profiles import Profile
from ddpjob.core.api.readers import Dict

# The fields of a row of workloads.yaml that may be absent.
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


@cache
def workloads() -> dict[str, Dict]:
    """Return the row of each workload in workloads.yaml, with all fields."""
    rows = yaml.safe_load(files("ddpjob.cli").joinpath("workloads.yaml").read_text())
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
    # StrictUndefined: a field that the template misspells must not become an empty string.
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
