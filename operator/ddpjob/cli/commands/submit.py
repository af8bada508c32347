"""`ddpjob submit`: apply manifests, and follow their jobs.

Modules needed only for the work are imported in functions, to keep `--help` quick.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ddpjob.cli.connection import Connection
from ddpjob.cli.options import Context, Kubeconfig, Namespace, Settings, Timeout, read_duration
from ddpjob.cli.script_options import (
    Accelerator,
    Checkpoints,
    Code,
    Cpu,
    Env,
    Gpus,
    Image,
    Memory,
    Name,
    Nodes,
    Nproc,
    OwnOptions,
    Script,
    SecretEnv,
    Setup,
)
from ddpjob.cli.session import REFUSED, Output, note
from ddpjob.cli.waiting import TimeLimit, place_of, wait_for_end
from ddpjob.client.errors import ClientError, NotFound, Rejected
from ddpjob.core.api import names, profiles
from ddpjob.core.api.readers import Dict, SpecError, child
from ddpjob.jobs.documents import Document, is_job

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient
    from ddpjob.client.apply import Applied
    from ddpjob.client.logs import LogLine
    from ddpjob.jobs.user_job import DDPJob
    from ddpjob.show.display import Display


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `ddpjob submit`. `namespace` is the value of --namespace."""

    dry_run: bool = False
    replace: bool = False
    follow: bool = False
    wait: bool = False
    namespace: str | None = None
    timeout: int | None = None


def command(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE…",
            help="Manifests, or - for stdin. With --script, the arguments of the script.",
        ),
    ] = None,
    settings: Settings = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the API server check all, and create nothing.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Delete existing jobs of the same names first."),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show progress and output until the end.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of the jobs.")] = False,
    timeout: Timeout = None,
    queue: Annotated[
        str,
        typer.Option(
            help="LocalQueue of Kueue in which the jobs wait for room.", show_default="none"
        ),
    ] = "",
    priority_class: Annotated[
        str,
        typer.Option(help="WorkloadPriorityClass of the jobs in their queue.", show_default="none"),
    ] = "",
    script: Script = None,
    code: Code = None,
    image: Image = None,
    name: Name = None,
    nodes: Nodes = None,
    nproc: Nproc = None,
    accelerator: Accelerator = profiles.DEFAULT,
    gpus: Gpus = None,
    checkpoints: Checkpoints = None,
    env: Env = None,
    secret_env: SecretEnv = None,
    cpu: Cpu = None,
    memory: Memory = None,
    setup: Setup = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Submit the jobs of manifests, and the other objects in them, by server-side apply.

    All documents are tried before the first is created.

    Examples: ddpjob submit job.yaml --follow;
    ddpjob submit --script train.py --image IMAGE --nodes 4 -- --epochs 3

    Exit codes, with --follow or --wait:
    0: the jobs are Complete
    1: a job Failed
    2: the cluster or this command refused something
    124: the time of --timeout is over, and the job goes on
    """
    from ddpjob.cli.manifests import file_documents, in_queue, script_documents
    from ddpjob.cli.own_script import OwnScript

    words = files or []
    seconds = read_duration(timeout, "--timeout")
    if seconds is not None and not (follow or wait):
        raise typer.BadParameter("requires --follow or --wait", param_hint="--timeout")
    options = SubmitOptions(dry_run, replace, follow, wait, namespace, seconds)
    script_options = OwnOptions(
        code, image, name, nproc, checkpoints, env, secret_env, cpu, memory, setup
    )
    if script:
        own = OwnScript(script, args=words, nodes=nodes, accelerator=accelerator, gpus=gpus)
        own = own.with_options(script_options).resolved()
        documents = script_documents(own, settings or [])
    else:
        script_options.refuse(accelerator, nodes=nodes, gpus=gpus)
        documents = file_documents(words, settings or [])
    documents = in_queue(documents, queue, priority_class)
    Connection(namespace, context, kubeconfig).run(
        lambda client: submit(client, documents, options)
    )


async def submit(
    client: "AsyncClient", documents: Sequence[Document], options: SubmitOptions
) -> int:
    """Apply documents, and print whether each was created, configured or unchanged."""
    from ddpjob.client.claims import check_claims

    documents = [_in_namespace(client, document, options.namespace) for document in documents]
    jobs = _jobs_of(documents)
    await check_claims(client, documents)
    console = Output()
    try:
        if options.replace:
            await client.apply(_trials(documents), dry_run=True)
            if options.dry_run:
                for job in jobs:
                    console.print(f"ddpjob/{job.name} can be created (dry run)")
                return 0
            applied = await _replace_all(client, documents, jobs)
        else:
            applied = await client.apply(documents, dry_run=options.dry_run)
    except Rejected as error:
        raise _explained(error, jobs) from error
    for one in applied:
        console.print(f"{one.name} {one.action}{' (dry run)' if options.dry_run else ''}")
    for job in jobs:
        _advise(job)
    if options.dry_run:
        return 0
    submitted = _jobs_of(one.body for one in applied)
    limit = TimeLimit(options.timeout)
    codes = [await _finish(client, job, options, limit) for job in submitted]
    return max(codes)


def _jobs_of(documents: Iterable[Dict]) -> "list[DDPJob]":
    from ddpjob.jobs.user_job import DDPJob

    return [DDPJob.from_manifest(document) for document in documents if is_job(document)]


def _in_namespace(client: "AsyncClient", document: Document, chosen: str | None) -> Document:
    """Return a job with its namespace. Raises SpecError if the user chose another one."""
    metadata = child(document, "metadata")
    own = metadata.get("namespace")
    if own and chosen and own != chosen:
        raise SpecError(
            f"{document['kind']} {metadata.get('name')} is for namespace {own}, and --namespace is "
            f"{chosen}; leave one of them out"
        )
    if not is_job(document) or own:
        return document
    return {**document, "metadata": {**metadata, "namespace": client.namespace}}


def _trials(documents: Sequence[Document]) -> list[Document]:
    """Return the documents with other names for the jobs, so existing jobs do not matter."""
    trials = []
    for document in documents:
        jobs = _jobs_of([document])
        trials += [job.renamed_for_trial().manifest() for job in jobs] or [document]
    return trials


async def _replace_all(
    client: "AsyncClient", documents: Sequence[Document], jobs: "Sequence[DDPJob]"
) -> Sequence["Applied"]:
    """Delete the existing jobs with the new names, then apply. The API server has tried all."""
    from ddpjob.cli.manifests import kept_manifest

    code: list[Dict] = []
    with ExitStack() as kept:
        for job in jobs:
            try:
                existing = await client.get(job.name, namespace=job.namespace)
            except NotFound:
                continue
            note(f"deleting the existing job {job.name}; its checkpoints stay")
            kept.enter_context(kept_manifest(existing))
            code += await client.remove(existing, keeps_code=existing.code == job.code)
        applied = await client.apply(documents)
    # The documents may name code without having it.
    await client.own_code([*code, *(one.body for one in applied)])
    return applied


def _explained(error: Rejected, jobs: "Sequence[DDPJob]") -> ClientError | SpecError:
    """Return this program's explanation of a refusal, or without one the API server's."""
    if "immutable" in str(error) and str(error).startswith(names.KIND):
        return Rejected(
            f"{error}\nddpjob submit --replace deletes the job and creates it again; checkpoints "
            "stay"
        )
    for job in jobs:
        try:
            job.check()
        except SpecError as explained:
            return SpecError(f"{job.name}: {explained}")
    return error


def _advise(job: "DDPJob") -> None:
    """Print whether pods stay for the next attempt, and warn of probable mistakes."""
    if job.recovery:
        note(f"{job.name}: recovery: {job.recovery}")
    for advice in job.advice:
        note(f"{job.name}: {advice}")


async def _finish(
    client: "AsyncClient", job: "DDPJob", options: SubmitOptions, limit: TimeLimit
) -> int:
    """Wait for the end of a job if requested. Return 0 if it is Complete, 1 if it Failed.

    Return 2 for a job finished before, because it did not run.
    """
    place = place_of(client, job)
    if job.finished:
        note(
            f"{job.name} has finished already, {job.phase}; ddpjob restart {job.name}{place} runs "
            "it again"
        )
        return REFUSED if options.follow or options.wait else 0
    if options.follow:
        return await limit.apply(client, job, follow(client, job, place))
    if options.wait:
        return await limit.apply(client, job, wait_for_end(client, job))
    note(f"ddpjob logs {job.name}{place} -f follows it, ddpjob status {job.name}{place} shows it")
    return 0


async def follow(client: "AsyncClient", job: "DDPJob", place: str) -> int:
    """Show a job until it has finished, as `ddpjob run --local` does. Return the exit code."""
    from ddpjob.client.logs import ALL_LINES, MAX_STREAMS, LogChoice
    from ddpjob.jobs.run_metrics import RunMetrics
    from ddpjob.jobs.user_job import DDPJob
    from ddpjob.show.advice import next_commands
    from ddpjob.show.display import Display

    metrics = RunMetrics(start_time=time.time())
    choice = ALL_LINES
    nodes = int(job.spec.get("nodes", 1))
    if nodes > MAX_STREAMS:
        choice = LogChoice(nodes=frozenset(range(MAX_STREAMS)))
        note(f"showing the output of nodes 0 to {MAX_STREAMS - 1} of {nodes}")
    with Display(Output(), metrics) as display:
        async with aclosing(client.follow(job.name, choice, namespace=job.namespace)) as items:
            async for item in items:
                if isinstance(item, DDPJob):
                    job = item
                    display.status(job.status)
                else:
                    _show(display, item)
    metrics.end_time = time.time()
    display.summary(job.status, {"Checkpoints": job.checkpoint} if job.checkpoint else {})
    display.next(next_commands(job, place))
    return job.status.exit_code


def _show(display: "Display", line: "LogLine") -> None:
    from ddpjob.jobs.run_metrics import is_for_people, parse_metric

    if line.text.startswith(names.AGENT_LINE):
        return
    # The events of a training come from rank 0.
    event = parse_metric(line.text) if line.index == 0 else None
    is_printed = event is None or is_for_people(line.text)
    if is_printed:
        display.line(line.index, line.text)
    if event:
        display.metric(event, is_printed=is_printed)
