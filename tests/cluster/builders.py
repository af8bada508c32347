"""Build the objects of the tests."""

from pathlib import Path
from typing import Any

from ddpjob.core.api.yaml_text import load_yaml

from .cluster import PLAIN, TRAINER
from .commands import ROOT, Object

MANAGED = {"matchLabels": {"app.kubernetes.io/managed-by": "ddpjob-operator"}}

# Spread the pods of a job over its possible nodes.
SPREAD = {
    "topologyKey": "kubernetes.io/hostname",
    "maxSkew": 1,
    "whenUnsatisfiable": "DoNotSchedule",
    "nodeTaintsPolicy": "Honor",
    "labelSelector": MANAGED,
    "matchLabelKeys": ["ddpjob.dev/job-uid"],
}

# Keep two pods off one node. SPREAD ignores a node that is not eligible. This waits for a second.
SEPARATE = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": MANAGED}
        ]
    }
}

# A label of nodes, given to the second worker only at the end, and the namespace of the job waiting
# for it.
LATE = "ddpjob.dev/test-late"
WAITING = "waiting"

# With one thread, every run of the same training has the same bits.
EARLY_CHECKPOINTS = ("--checkpoint-every", "25", "--threads", "1")


def job(name: str, *args: str, image: str = TRAINER, **spec: Any) -> Object:
    """Return a DDPJob of two nodes, spread over them, with `args` to run."""
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
    """Return a training job. An epoch takes about a third of a second."""
    return job(name, "-m", "ddp_trainer", "digits", "--epochs", str(epochs), **spec)


def digits_with_checkpoints(name: str, epochs: int, **spec: Any) -> Object:
    """Return a job with an early checkpoint. It needs the claim `checkpoints`."""
    manifest = digits(name, epochs, checkpoint={"claimName": "checkpoints"}, **spec)
    manifest["spec"]["args"] += EARLY_CHECKPOINTS
    return manifest


def unhurried_digits(name: str, epochs: int, **spec: Any) -> tuple[Object, Object]:
    """Return the ConfigMap of a script, and a job training with pauses.

    An epoch takes almost two seconds. The job writes a checkpoint early, and needs the claim
    `checkpoints`.
    """
    command = ("digits", "--epochs", str(epochs), *EARLY_CHECKPOINTS)
    checkpoint = {"claimName": "checkpoints"}
    source = script("unhurried.py")
    return script_job(name, source, *command, image=TRAINER, checkpoint=checkpoint, **spec)


def script_job(
    name: str, script: str, *args: str, image: str = PLAIN, **spec: Any
) -> tuple[Object, Object]:
    """Return a ConfigMap with a user's script, and a job to run it, in the plain image."""
    scripts = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-script"},
        "data": {"train.py": script},
    }
    mounted = job(
        name,
        "/scripts/train.py",
        *args,
        image=image,
        volumes=[{"name": "scripts", "configMap": {"name": f"{name}-script"}}],
        volumeMounts=[{"name": "scripts", "mountPath": "/scripts", "readOnly": True}],
        **spec,
    )
    return scripts, mounted


def example(file: str) -> Object:
    """Return the one object of a manifest in examples/."""
    manifest: Object = load_yaml((ROOT / "examples" / file).read_text())
    return manifest


def script(name: str) -> str:
    """Return the text of a script in the folder `scripts` of these tests."""
    return (Path(__file__).parent / "scripts" / name).read_text()
