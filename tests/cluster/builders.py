"""Small builders for the objects of the tests."""

from pathlib import Path
from typing import Any

import yaml

from .harness import PLAIN, ROOT, TRAINER, Object

SPREAD = {
    "topologyKey": "kubernetes.io/hostname",
    "maxSkew": 1,
    "whenUnsatisfiable": "DoNotSchedule",
    "nodeTaintsPolicy": "Honor",
    "labelSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "ddpjob-operator"}},
    "matchLabelKeys": ["ddpjob.dev/job-uid"],
}
SEPARATE = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {
                    "matchLabels": {"app.kubernetes.io/managed-by": "ddpjob-operator"}
                },
            }
        ]
    }
}
"""Unlike SPREAD, which leaves a node that is not eligible out of account, this waits until there is a second one."""


LATE = "ddpjob.dev/test-late"
"""A label of nodes, which the second worker gets in the end only."""


def job(name: str, *args: str, image: str = TRAINER, **spec: Any) -> Object:
    """A DDPJob of two nodes, spread over them, that runs `args`."""
    return {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": 2,
            "image": image,
            "args": list(args),
            "topologySpreadConstraints": [SPREAD],
            **spec,
        },
    }


def digits(name: str, epochs: int, **spec: Any) -> Object:
    """A job that trains for about a third of a second an epoch."""
    return job(name, "-m", "ddp_trainer", "digits", "--epochs", str(epochs), **spec)


def digits_with_checkpoints(name: str, **spec: Any) -> Object:
    """A job long enough to be hit in the middle; it needs the claim `checkpoints`."""
    settled = digits(name, 80, checkpoint={"claimName": "checkpoints"}, **spec)
    settled["spec"]["args"] += ["--checkpoint-every", "25"]
    return settled


def script_job(name: str, script: str, **spec: Any) -> tuple[Object, Object]:
    """A script of a user's own in a ConfigMap, and a job that runs it in the plain image."""
    scripts = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-script"},
        "data": {"train.py": script},
    }
    mounted = job(
        name,
        "/scripts/train.py",
        image=PLAIN,
        volumes=[{"name": "scripts", "configMap": {"name": f"{name}-script"}}],
        volumeMounts=[{"name": "scripts", "mountPath": "/scripts", "readOnly": True}],
        **spec,
    )
    return scripts, mounted


def example(file: str) -> Object:
    """The one object of a manifest in examples/."""
    manifest: Object = yaml.safe_load((ROOT / "examples" / file).read_text())
    return manifest


def script(name: str) -> str:
    """The text of a script that lies beside the tests."""
    return (Path(__file__).parent / "scripts" / name).read_text()
