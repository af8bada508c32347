"""`ddpjob convert`: a PyTorchJob, a TrainJob or an sbatch script as a DDPJob."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ddpjob.cli.first_attempt import problem_of
from ddpjob.cli.manifests import STDIN, read_text
from ddpjob.cli.session import note, print_error
from ddpjob.convert.draft import Conversion
from ddpjob.convert.formats import UnknownKind, convert_text
from ddpjob.core.api.readers import SpecError

INVALID = 1


def command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="PyTorchJob, TrainJob or script for sbatch, or - for stdin."
        ),
    ],
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Manifest of a TrainJob's runtime: a ClusterTrainingRuntime or a TrainingRuntime.",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Image of the pods. Required for a script that names no image."),
    ] = None,
) -> None:
    """Print a manifest of another operator, or a script for Slurm, as a DDPJob.

    Nothing is run, and no cluster is asked. Comments at the head of the manifest say what was
    dropped and why, and what to look at. The manifest is checked as by ddpjob validate.

    Examples: ddpjob convert pytorchjob.yaml > job.yaml;
    ddpjob convert trainjob.yaml --runtime runtime.yaml > job.yaml;
    ddpjob convert train.sbatch --image IMAGE > job.yaml

    Exit codes:
    0: the job is printed
    1: it would not be valid
    2: a file cannot be read, or is not one of these
    """
    text = _read(file, "FILE")
    runtimes = _read(runtime, "--runtime") if runtime else ""
    name = "job" if file == STDIN else Path(file).stem
    try:
        found = convert_text(text, runtimes, image or "", name)
    except SpecError as error:
        problem = f"{file}: {error}{_by_hand(error)}"
        raise typer.BadParameter(problem, param_hint="FILE") from error
    raise typer.Exit(show(found))


def show(conversions: Sequence[Conversion]) -> int:
    """Print DDPJobs with their comments. Return 1 if one of them would not be valid, else 0."""
    for one in conversions:
        problem = problem_of(one.document)
        if problem:
            print_error(
                f"{one.source}: the DDPJob would not be valid: {problem}; correct that in the file"
            )
            return INVALID
    for number, one in enumerate(conversions):
        sys.stdout.write(("---\n" if number else "") + one.comments() + as_yaml(one.document))
        note(summary(one))
    return 0


def summary(conversion: Conversion) -> str:
    """Return one line about a conversion."""
    count = conversion.dropped
    notes = len(conversion.remarks) - count
    things = "1 thing was" if count == 1 else f"{count} things were"
    if not count:
        things = "nothing was"
    about = f", {notes} to look at" if notes else ""
    where = ", see the comments" if conversion.remarks else ""
    return f"converted {conversion.source}: {things} dropped{about}{where}"


def as_yaml(document: dict[str, Any]) -> str:
    """Return a document as YAML, with texts of several lines as readable blocks."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as a block. Each value is written in full, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _by_hand(error: SpecError) -> str:
    """Return where the move of other kinds is described, or an empty string."""
    if not isinstance(error, UnknownKind):
        return ""
    from ddpjob.show.advice import address_of

    page = address_of(error.page) or f"docs/{error.page}"
    return f"; how MPIJob, Job, JobSet and others are moved by hand: {page}"


def _read(file: str, hint: str) -> str:
    try:
        return read_text(file)
    except SpecError as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint=hint) from error
