"""`ddpjob submit`: apply manifests, and follow their jobs."""

import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from ddpjob.cli.own_script import OwnScript
from ddpjob.cli.session import note, output
from ddpjob.client import AsyncClient, ClientError
from ddpjob.client.code import SUBMITTED_BYTES
from ddpjob.client.documents import Document, is_job, read_documents, require_jobs, set_fields
from ddpjob.client.errors import Rejected
from ddpjob.client.logs import LogLine
from ddpjob.core.readers import SpecError, child
from ddpjob.core.run_metrics import RunMetrics, parse_metric
from ddpjob.core.user_job import DDPJob
from ddpjob.local.run import AGENT_LINE, exit_code
from ddpjob.show.display import Display

STDIN = "-"


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `ddpjob submit`. `settings` are changes such as `spec.nodes=4`."""

    settings: Sequence[str] = ()
    dry_run: bool = False
    replace: bool = False
    follow: bool = False
    wait: bool = False


def file_documents(files: Sequence[str], settings: Sequence[str]) -> list[Document]:
    """Return the documents of manifests, with changes of the jobs. Raises BadParameter."""
    if not files:
        raise typer.BadParameter("give a manifest, or --script", param_hint="FILE")
    documents: list[Document] = []
    for file in files:
        try:
            found = read_documents(_read(file))
            require_jobs(found)
        except SpecError as error:
            raise typer.BadParameter(f"{file}: {error}", param_hint="FILE") from error
        documents += found
    return _changed(documents, settings)


def script_documents(own: OwnScript, settings: Sequence[str]) -> list[Document]:
    """Return the documents of a user's script, with changes of the job. Raises BadParameter."""
    try:
        documents = own.documents(SUBMITTED_BYTES)
    except SpecError as error:
        raise typer.BadParameter(str(error), param_hint="--script") from error
    return _changed(documents, settings)


def _changed(documents: Sequence[Document], settings: Sequence[str]) -> list[Document]:
    try:
        return [set_fields(one, settings) if is_job(one) else one for one in documents]
    except SpecError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error


def _read(file: str) -> str:
    if file == STDIN:
        return sys.stdin.read()
    try:
        return Path(file).read_text()
    except OSError as error:
        raise SpecError(f"cannot read the file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError("is no text") from error


async def submit(client: AsyncClient, documents: Sequence[Document], options: SubmitOptions) -> int:
    """Apply documents, print what became of each, and return the exit code."""
    documents = [_in_namespace(client, document) for document in documents]
    jobs = [DDPJob.from_manifest(document) for document in documents if is_job(document)]
    console = output()
    if options.replace and not options.dry_run:
        await _delete_existing(client, documents, jobs)
    try:
        applied = await client.apply(documents, dry_run=options.dry_run)
    except Rejected as error:
        raise _explained(error, jobs) from error
    for one in applied:
        console.print(f"{one.name} {one.action}{' (dry run)' if options.dry_run else ''}")
    names = [one.body["metadata"]["name"] for one in applied if is_job(one.body)]
    if options.dry_run:
        return 0
    if not (options.follow or options.wait):
        for name in names:
            note(f"ddpjob logs {name} -f follows it, ddpjob status {name} shows it")
        return 0
    codes = [await _finish(client, name, options) for name in names]
    return max(codes)


def _in_namespace(client: AsyncClient, document: Document) -> Document:
    """Return a job with its namespace. Raises SpecError if the user chose another one."""
    metadata = child(document, "metadata")
    if not is_job(document) or metadata.get("namespace"):
        return document
    return {**document, "metadata": {**metadata, "namespace": client.namespace}}


async def _delete_existing(
    client: AsyncClient, documents: Sequence[Document], jobs: Sequence[DDPJob]
) -> None:
    """Delete jobs that have the names of new ones, once the API server would take the new ones."""
    for job in jobs:
        existing = {found.name for found in await client.list(namespace=job.namespace)}
        if job.name not in existing:
            continue
        # Under another name, so that immutable fields of the existing job do not matter.
        trial = replace(job, name=f"{job.name[:40]}-{int(time.time())}")
        await client.apply([trial.manifest()], dry_run=True)
        note(f"deleting the existing job {job.name}; its checkpoints stay")
        await client.delete(job.name, namespace=job.namespace)


def _explained(error: Rejected, jobs: Sequence[DDPJob]) -> ClientError | SpecError:
    """Return the sentence of this program for a refusal, if it has one, else the API server's."""
    if "immutable" in str(error):
        return Rejected(f"{error}\nddpjob submit --replace does both, and keeps the checkpoints")
    for job in jobs:
        try:
            job.check()
        except SpecError as explained:
            return SpecError(f"{job.name}: {explained}")
    return error


async def _finish(client: AsyncClient, name: str, options: SubmitOptions) -> int:
    """Wait for the end of a job, and return 0 if it is Complete, else 1."""
    if options.follow:
        return await follow(client, name)
    job = await client.wait(name)
    output().print(f"{name} {job.phase}: {job.message}")
    return exit_code(job.status)


async def follow(client: AsyncClient, name: str) -> int:
    """Show a job until it has finished, as `ddpjob run --local` does. Return the exit code."""
    metrics = RunMetrics(start_time=time.time())
    job = await client.get(name)
    with Display(output(), metrics) as display:
        async with aclosing(client.follow(name)) as items:
            async for item in items:
                if isinstance(item, DDPJob):
                    job = item
                    display.status(job.status)
                else:
                    _show(display, item)
    metrics.end_time = time.time()
    display.summary(job.status, {"Checkpoints": job.checkpoint} if job.checkpoint else {})
    return exit_code(job.status)


def _show(display: Display, line: LogLine) -> None:
    event = parse_metric(line.text)
    if event:
        display.metric(event)
    elif not line.text.startswith(AGENT_LINE):
        display.line(line.index, line.text)
