"""`ddpjob init WORKLOAD`: the manifest of a workload of ours, to be applied as it is or changed. Pure."""

from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

IMAGES = {"cpu": "ddpjob-trainer:cpu", "gpu": "ddpjob-trainer:cuda"}
"""The accelerators that the trainer can use, and the image that has what each needs."""

DEFAULTS = {
    "needs": None,
    "data": None,
    "checkpoint": False,
    "processes": None,
    "gpusPerProcess": 1,
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
    row = workloads()[workload]
    claims = [name for name, used in (("ddpjob-data", row["data"]), ("ddpjob-checkpoints", row["checkpoint"])) if used]
    environment = Environment(
        loader=PackageLoader("ddpjob.cli"), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("job.yaml.j2").render(
        row
        | {
            "name": workload,
            "file": f"{workload}.yaml",
            "args": ["-m", "ddp_trainer", *row["args"]],
            "claims": " and ".join(f"`{claim}`" for claim in claims),
            "nodes": nodes,
            "accelerator": accelerator,
            "image": IMAGES[accelerator],
            "gpus": gpus,
            "processes": row["processes"] if accelerator == "cpu" else _processes(gpus, row["gpusPerProcess"]),
        }
    )


def _processes(gpus: int, each: int) -> int | None:
    """Processes of a node where each needs several GPUs; None where it has one: the operator counts those itself."""
    return None if each == 1 else gpus // each
