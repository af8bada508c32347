"""Builders for tests of `ddpjob convert`: PyTorchJobs and scripts, and what becomes of them."""

from pathlib import Path

import yaml

from ddpjob.cli.first_attempt import problem_of
from ddpjob.convert.formats import convert_text

MANIFESTS = Path(__file__).parent / "manifests"


def convert(text, **options):
    """Return the conversion of the only job in a text."""
    given = {"runtime": "", "image": "", "name": "job", **options}
    (found,) = convert_text(text, **given)
    return found


def convert_file(path):
    image = "train:1" if path.suffix == ".sbatch" else ""
    return convert(path.read_text(), image=image, name=path.stem)


def spec_of(folder, name):
    return convert_file(MANIFESTS / folder / name).document["spec"]


def comments_of(folder, name):
    return convert_file(MANIFESTS / folder / name).comments()


def a_pytorchjob(command=(), *, worker=None, spec=None, **container):
    """Return the text of a PyTorchJob of two nodes."""
    own = {"name": "pytorch", "image": "i", "command": list(command) or ["torchrun", "a.py"]}
    roles = {}
    for role, more in (("Master", {}), ("Worker", worker or {})):
        pod = {"containers": [{**own, **container, **more}]}
        roles[role] = {"replicas": 1, "template": {"spec": pod}}
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "j"},
        "spec": {"pytorchReplicaSpecs": roles, **(spec or {})},
    }
    return yaml.safe_dump(manifest)


def converted(*command, **fields):
    """Return the spec and the comments of a PyTorchJob with a command."""
    found = convert(a_pytorchjob(command, **fields))
    assert problem_of(found.document) == ""
    return found.document["spec"], found.comments()


def a_script(*lines):
    return "\n".join(["#!/bin/bash", *lines])


def converted_script(*lines):
    found = convert(a_script(*lines), image="i")
    assert problem_of(found.document) == ""
    return found.document["spec"], found.comments()
