"""Make a manifest for a user's own script. The script is sent in a ConfigMap."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import typer
import yaml

from ddpjob.cli.options import read_pairs, require_choice
from ddpjob.cli.script_options import OwnOptions
from ddpjob.cli.session import note
from ddpjob.cli.sizes import resolve_gpus, resolve_nodes
from ddpjob.core.api import profiles
from ddpjob.core.api.job import require_job_name
from ddpjob.core.api.readers import Dict, SpecError
from ddpjob.jobs.user_job import DDPJob
from ddpjob.sources.code import PRINTED_BYTES, check_size
from ddpjob.sources.script import check_script, job_name

HEADER = """\
# {script} as a job. The ConfigMap has the script, so that no image has to be built.
#
#     ddpjob submit {file} --follow        in a cluster; kubectl apply -f works too
#     ddpjob run --local {file}            on this machine, without a cluster
#
# The image needs Python, torch and what the script imports, unless spec.setup installs it.
"""

NO_IMAGE = (
    "is required; give an image with Python, torch and what the script imports, such as "
    "pytorch/pytorch, with the tag of your versions. With accelerator {accelerator}, the image of "
    "the examples is {trainer}, if it has been built"
)


@dataclass(frozen=True)
class Container:
    """Variables and resources of the pods of a script, as the options of a command.

    `env` has items such as NAME=VALUE, `secret_env` such as NAME=SECRET:KEY.
    """

    env: Sequence[str] = ()
    secret_env: Sequence[str] = ()
    cpu: str | None = None
    memory: str | None = None

    def variables(self) -> list[dict[str, Any]]:
        """Return the variables as fields of a container. Raises BadParameter."""
        found: list[dict[str, Any]] = []
        for name, value in read_pairs(self.env, "--env", "NAME=VALUE"):
            found.append({"name": name, "value": value})
        for name, place in read_pairs(self.secret_env, "--secret-env", "NAME=SECRET[:KEY]"):
            secret, _, key = place.partition(":")
            reference = {"name": secret, "key": key or name}
            found.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
        return found

    def resources(self, devices: Dict) -> dict[str, Any]:
        """Return requests and limits, with the limits of devices."""
        requests = {"cpu": self.cpu, "memory": self.memory}
        # A CPU limit would slow down a training even with idle cores on its node.
        limits = {**devices, "memory": self.memory}
        both = {"requests": _given(requests), "limits": _given(limits)}
        return {kind: quantities for kind, quantities in both.items() if quantities}


def _given(quantities: Dict) -> dict[str, Any]:
    return {name: quantity for name, quantity in quantities.items() if quantity is not None}


@dataclass(frozen=True)
class OwnScript:
    """A script with its folder and arguments, and the fields of its job.

    `nodes` is None until `resolved` has chosen the default.
    """

    script: Path
    image: str | None = None
    folder: Path | None = None
    args: Sequence[str] = ()
    name: str | None = None
    nodes: int | None = 1
    nproc: int | None = None
    accelerator: str = profiles.DEFAULT
    gpus: int | None = None
    claim: str | None = None
    setup: str | None = None
    container: Container = Container()

    def with_options(self, options: OwnOptions) -> Self:
        """Return the script with the values of the options for scripts."""
        return replace(
            self,
            image=options.image,
            folder=options.code,
            name=options.name,
            nproc=options.nproc,
            claim=options.checkpoints,
            setup=options.setup,
            container=Container(
                options.env or (), options.secret_env or (), options.cpu, options.memory
            ),
        )

    def resolved(self) -> Self:
        """Return the script with its number of nodes and GPUs. Raises BadParameter."""
        require_choice("--accelerator", self.accelerator, profiles.catalog())
        nodes = resolve_nodes(self.accelerator, self.nodes)
        return replace(self, nodes=nodes, gpus=resolve_gpus(self.accelerator, self.gpus, 1))

    def job(self) -> DDPJob:
        """Return the job with its code. Raises SpecError, or BadParameter without an image."""
        check_script(self.script)
        if self.image is None:
            trainer = profiles.catalog()[self.accelerator].trainer_image
            message = NO_IMAGE.format(accelerator=self.accelerator, trainer=trainer)
            raise typer.BadParameter(message, param_hint="--image")
        return DDPJob.from_script(
            self.script,
            self.args,
            folder=self.folder,
            name=self.name or "",
            **self._spec(self.image),
        )

    def local_document(self) -> dict[str, Any]:
        """Return the DDPJob for a run of the script on this machine, without a copy of its files.

        Raises SpecError.
        """
        check_script(self.script)
        path = self.script
        if self.folder is not None:
            if not self.folder.is_dir():
                raise SpecError(f"{self.folder}: the folder does not exist")
            path = Path(os.path.relpath(path, self.folder))
            if path.is_absolute() or ".." in path.parts:
                raise SpecError(f"{self.script}: is not in the folder {self.folder}")
        # A local run uses no image, but the field is required.
        image = self.image or profiles.catalog()[self.accelerator].trainer_image
        spec = {**self._spec(image), "args": [str(path), *self.args]}
        return DDPJob(require_job_name(self.name or job_name(self.script)), spec).manifest()

    def _spec(self, image: str) -> Any:
        profile = profiles.catalog()[self.accelerator]
        spec: dict[str, Any] = {"nodes": self.nodes, "image": image}
        if self.setup is not None:
            spec["setup"] = self.setup
        if self.nproc is not None:
            spec["nprocPerNode"] = self.nproc
        if self.accelerator != profiles.DEFAULT:
            spec["accelerator"] = self.accelerator
        devices = {profile.process_per: str(self.gpus or 1)} if profile.process_per else {}
        fields = {
            "resources": self.container.resources(devices),
            "env": self.container.variables(),
        }
        spec |= {name: field for name, field in fields.items() if field}
        if self.claim:
            spec["checkpoint"] = {"claimName": self.claim}
        return spec

    def manifest(self) -> str:
        """Return the documents as YAML with comments, and print advice. Raises SpecError."""
        job = self.job()
        check_size(job.needs[0], self.folder or self.script, PRINTED_BYTES)
        for text in job.advice:
            note(text)
        header = HEADER.format(script=self.script.name, file=f"{job.name}.yaml")
        return header + yaml.dump_all(job.documents, Dumper=_Dumper, sort_keys=False)


def print_manifest(own: OwnScript) -> None:
    """Print the documents of a script. Raises BadParameter."""
    try:
        typer.echo(own.manifest(), nl=False)
    except SpecError as error:
        raise typer.BadParameter(str(error)) from error


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
