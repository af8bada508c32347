"""Read the documents of a user's manifests and scripts, and keep manifests in files."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
import yaml

from ddpjob.cli.own_script import OwnScript
from ddpjob.cli.session import note
from ddpjob.client.errors import Rejected
from ddpjob.core.api.queue import LABEL_PRIORITY, LABEL_QUEUE
from ddpjob.core.api.readers import Dict, SpecError, child
from ddpjob.jobs.documents import (
    Document,
    decode,
    is_job,
    read_documents,
    refuse_script,
    require_jobs,
    set_fields,
)
from ddpjob.jobs.user_job import DDPJob

STDIN = "-"


def file_documents(files: Sequence[str], settings: Sequence[str]) -> list[Document]:
    """Return the documents of manifests, with changes of the jobs. Raises BadParameter."""
    if not files:
        raise typer.BadParameter("give a manifest, or --script", param_hint="FILE")
    documents: list[Document] = []
    for file in files:
        try:
            found = read_documents(read_text(file))
            require_jobs(found)
        except SpecError as error:
            raise typer.BadParameter(f"{file}: {error}", param_hint="FILE") from error
        documents += found
    return _changed(documents, settings)


def script_documents(own: OwnScript, settings: Sequence[str]) -> list[Document]:
    """Return the documents of a user's script, with changes of the job. Raises BadParameter."""
    try:
        job = own.job()
    except SpecError as error:
        raise typer.BadParameter(str(error)) from error
    # The rest of the advice is about the spec. It is printed for any manifest.
    for text in job.notes:
        note(text)
    return _changed(job.documents, settings)


def in_queue(documents: Sequence[Document], queue: str, priority: str) -> list[Document]:
    """Return the documents with a queue and a priority for the jobs. Raises BadParameter.

    An empty text keeps the job's own value.
    """
    labels = {LABEL_QUEUE: queue, LABEL_PRIORITY: priority}
    chosen = {label: value for label, value in labels.items() if value}
    return [_with_labels(one, chosen) if is_job(one) else one for one in documents]


def _with_labels(document: Document, labels: Dict) -> Document:
    metadata = child(document, "metadata")
    found = {**child(metadata, "labels"), **labels}
    if labels and not found.get(LABEL_QUEUE):
        message = "has an effect only in a queue: give --queue too"
        raise typer.BadParameter(message, param_hint="--priority-class")
    return {**document, "metadata": {**metadata, "labels": found}} if labels else document


def _changed(documents: Sequence[Document], settings: Sequence[str]) -> list[Document]:
    try:
        return [set_fields(one, settings) if is_job(one) else one for one in documents]
    except SpecError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error


def read_text(file: str) -> str:
    """Return the text of a file, or of stdin. Raises SpecError."""
    if file == STDIN:
        return decode(sys.stdin.buffer.read())
    refuse_script(file)
    try:
        return decode(Path(file).read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read the file: {error.strerror}") from error


@contextmanager
def kept_manifest(job: DDPJob) -> Iterator[None]:
    """Keep the manifest of a job in a file until the job exists again.

    Raises Rejected if the file cannot be written.
    """
    file = Path(f"{job.name}.yaml")
    number = 1
    while file.exists():
        file = Path(f"{job.name}-{number}.yaml")
        number += 1
    try:
        file.write_text(yaml.safe_dump(job.manifest(), sort_keys=False))
    except OSError as error:
        message = f"cannot keep the manifest of the job in {file}: {error.strerror}"
        raise Rejected(f"{message}; use another working folder") from error
    try:
        yield
    except BaseException:
        note(f"the manifest of the job is in {file}; ddpjob submit {file} creates it again")
        raise
    file.unlink()
