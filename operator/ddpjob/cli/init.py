"""`ddpjob init WORKLOAD`: the manifest of a workload of ours, to be applied as it is or changed. Pure."""

from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

IMAGES = {
    "cpu": "ddpjob-trainer:cpu",
    "gpu": "ddpjob-trainer:cuda",
    "trn1.32xlarge": "ddpjob-trainer:neuron",
    "trn1.2xlarge": "ddpjob-trainer:neuron",
}
"""The accelerators that the trainer can use, and the image that has what each needs."""

DEFAULTS: dict[str, Any] = {
    "needs": None,
    "data": None,
    "checkpoint": False,
    "processes": None,
    "gpusPerProcess": 1,
    "onTrainium": [],
    "limit": None,
    "maxRestarts": None,
}


@cache
def workloads() -> dict[str, dict[str, Any]]:
    """Each workload's row of workloads.yaml, with every field."""
    rows = yaml.safe_load(files("ddpjob.cli").joinpath("workloads.yaml").read_text())
    return {name: DEFAULTS | row for name, row in rows.items()}


def manifest(workload: str, *, nodes: int, accelerator: str, gpus: int) -> str:
    """The manifest as YAML with comments; `gpus` is what a node has. `workload` and `accelerator` must be known."""
    row, trainium = workloads()[workload], accelerator.startswith("trn")
    claims = [
        name
        for name, used in (("ddpjob-data", row["data"]), ("ddpjob-checkpoints", row["checkpoint"]))
        if used
    ]
    environment = Environment(
        loader=PackageLoader("ddpjob.cli"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("job.yaml.j2").render(
        row
        | {
            "name": workload,
            "file": f"{workload}.yaml",
            "args": ["-m", "ddp_trainer", *row["args"], *(row["onTrainium"] if trainium else [])],
            "claims": " and ".join(f"`{claim}`" for claim in claims),
            "nodes": nodes,
            "accelerator": accelerator,
            "image": IMAGES[accelerator],
            "gpus": gpus,
            "trainium": trainium,
            "processes": _processes(row, accelerator, gpus),
        }
    )


def _processes(row: dict[str, Any], accelerator: str, gpus: int) -> int | None:
    """What the manifest says of a node's processes; None where the operator counts them itself, by the devices."""
    if accelerator == "cpu":
        return row["processes"]  # type: ignore[no-any-return]
    each: int = row["gpusPerProcess"]
    return gpus // each if accelerator == "gpu" and each > 1 else None
