"""A manifest for a user's own script, which travels in a ConfigMap."""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import typer
import yaml

from ddpjob.cli.options import read_pairs, require_choice
from ddpjob.cli.script_options import OwnOptions
from ddpjob.cli.session import note
from ddpjob.cli.sizes import resolve_gpus, resolve_nodes
from ddpjob.client.code import PRINTED_BYTES, read_code, with_code
from ddpjob.core.api import names, profiles
from ddpjob.core.api.job import require_job_name
from ddpjob.core.api.readers import Dict, SpecError
from ddpjob.jobs.user_job import DDPJob

HEADER = """\
# {script} as a job. The ConfigMap has the script, so that no image has to be built.
#
#     ddpjob submit {file} --follow        in a cluster; kubectl apply -f works too
#     ddpjob run --local {file}            on this machine, without a cluster
#
# {image}
"""
OWN_IMAGE = "The image needs Python, torch and what the script imports."
TRAINER_IMAGE = "No --image was given. images/README.md says how to build the trainer's image."

# Longest first line of a script that Linux reads, in characters.
MAX_FIRST_LINE = 256

SHELL_SUFFIXES = (".sh", ".bash", ".zsh", ".ksh")
SHELL = re.compile(r"\b(ba|da|k|z)?sh\b")


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
        # A limit of the CPU would slow a training down that could use a core of its node.
        limits = {**devices, "memory": self.memory}
        both = {"requests": _given(requests), "limits": _given(limits)}
        return {kind: quantities for kind, quantities in both.items() if quantities}


def _given(quantities: Dict) -> dict[str, Any]:
    return {name: quantity for name, quantity in quantities.items() if quantity is not None}


@dataclass(frozen=True)
class OwnScript:
    """A script, the folder that travels with it, its arguments, and the job that runs it.

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
    container: Container = Container()

    def with_options(self, options: OwnOptions) -> Self:
        """Return the script with what only a script's options can choose."""
        return replace(
            self,
            image=options.image,
            folder=options.code,
            name=options.name,
            nproc=options.nproc,
            claim=options.checkpoints,
            container=Container(
                options.env or (), options.secret_env or (), options.cpu, options.memory
            ),
        )

    def resolved(self) -> Self:
        """Return the script with its number of nodes and GPUs. Raises BadParameter."""
        require_choice("--accelerator", self.accelerator, profiles.catalog())
        nodes = resolve_nodes(self.accelerator, self.nodes)
        return replace(self, nodes=nodes, gpus=resolve_gpus(self.accelerator, self.gpus, 1))

    def documents(self, limit: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the ConfigMap and the DDPJob. Raises SpecError, also for more bytes of code.

        Print a note about code that is large.
        """
        self._check_script()
        code = read_code(self.script, self.folder)
        path = self.script.name if self.folder is None else self._path_in(self.folder, code.files)
        place = self.folder or self.script
        job = self._job({"args": [path, *self.args]})
        config_map, job, advice = with_code(job, code, place, limit)
        if advice:
            note(advice)
        job.check()
        return config_map, job.manifest()

    def local_document(self) -> dict[str, Any]:
        """Return the DDPJob for a run on this machine, in which the script runs where it is.

        Raises SpecError.
        """
        self._check_script()
        path = self.script
        if self.folder is not None:
            path = Path(os.path.relpath(path, self.folder))
            if path.is_absolute() or ".." in path.parts:
                raise SpecError(f"{self.script}: is not in the folder {self.folder}")
        return self._job({"args": [str(path), *self.args]}).manifest()

    def _check_script(self) -> None:
        if not self.script.is_file():
            what = "is a folder" if self.script.is_dir() else "does not exist"
            raise SpecError(f"{self.script}: the file {what}; give the script that torchrun starts")
        _require_python(self.script)

    def _job(self, fields: Dict) -> DDPJob:
        name = require_job_name(self.name or job_name(self.script))
        return DDPJob(name, {**self._spec(), **fields})

    def _path_in(self, folder: Path, code: Iterable[str]) -> str:
        """Return the path of the script among the files of a folder. It may be a link."""
        script = self.script.resolve()
        return next(path for path in code if (folder / path).resolve() == script)

    def _spec(self) -> dict[str, Any]:
        profile = profiles.catalog()[self.accelerator]
        image = self.image or profile.trainer_image
        spec: dict[str, Any] = {"nodes": self.nodes, "image": image}
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

    def manifest(self, limit: int) -> str:
        """Return the documents as YAML with comments. Raises SpecError."""
        documents = self.documents(limit)
        name = documents[1]["metadata"]["name"]
        image = OWN_IMAGE if self.image else TRAINER_IMAGE
        header = HEADER.format(script=self.script.name, file=f"{name}.yaml", image=image)
        return header + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False)


def _require_python(script: Path) -> None:
    """Raise SpecError for a script that torchrun cannot start with Python."""
    if script.suffix == ".py":
        return
    if script.suffix.lower() == ".ipynb":
        raise SpecError(
            f"{script}: is a notebook, and torchrun starts Python scripts; to make one of it: "
            f"jupyter nbconvert --to script {script.name}"
        )
    first_line = _first_line(script)
    words = first_line.removeprefix("#!") if first_line.startswith("#!") else ""
    if script.suffix.lower() in SHELL_SUFFIXES or SHELL.search(words):
        raise SpecError(
            f"{script}: is a shell script, and torchrun starts Python scripts; give the Python "
            "script that it starts, with its arguments"
        )
    if words and "python" not in words:
        message = f"{first_line} is not the first line of a Python script"
        raise SpecError(f"{script}: {message}; give the script that torchrun is to start")


def _first_line(script: Path) -> str:
    # A file that cannot be read is refused when its text is needed.
    with suppress(OSError), script.open(errors="replace") as file:
        return file.readline(MAX_FIRST_LINE).strip()
    return ""


def print_manifest(own: OwnScript) -> None:
    """Print the documents of a script. Raises BadParameter."""
    try:
        typer.echo(own.manifest(PRINTED_BYTES), nl=False)
    except SpecError as error:
        raise typer.BadParameter(str(error), param_hint="--script") from error


def job_name(script: Path) -> str:
    """Return the name of a script as the name of a job."""
    name = re.sub(r"[^a-z0-9]+", "-", script.stem.lower()).strip("-")
    if not name or not name[0].isalpha():
        name = f"job-{name}".rstrip("-")
    return name[: names.MAX_JOB_NAME].rstrip("-")


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
