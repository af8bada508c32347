"""`ddpjob wait`, `suspend`, `resume`, `retry`, `scale`, `restart` and `delete`."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from ddpjob.cli.session import REFUSED, Output, note, print_error
from ddpjob.client import AsyncClient, ClientError, NotFound, Rejected, WaitTimeout
from ddpjob.core.api.names import Phase
from ddpjob.core.plan import counted
from ddpjob.jobs.user_job import DDPJob

# The exit code of the command `timeout`.
TIMED_OUT = 124


async def wait(client: AsyncClient, name: str, timeout: float | None) -> int:
    """Return 0 once a job is Complete, 1 if it Failed, or 124 after the time-out."""
    try:
        job = await client.wait(name, timeout=timeout)
    except WaitTimeout as error:
        print_error(str(error))
        return TIMED_OUT
    Output().print(f"{name} {job.phase}: {job.message}")
    return job.status.exit_code


async def suspend(client: AsyncClient, name: str) -> int:
    await client.suspend(name)
    Output().print(f"{name} suspended; ddpjob resume {name} continues it")
    return 0


async def resume(client: AsyncClient, name: str) -> int:
    before = await client.get(name)
    if not before.spec.get("suspend"):
        Output().print(_why_not_resumed(before))
        return 0
    job = await client.resume(name)
    Output().print(f"{name} resumed from {_beginning(job)}")
    return 0


def _why_not_resumed(job: DDPJob) -> str:
    """Return the sentence about a job whose spec.suspend is not set."""
    if job.phase == Phase.SUSPENDED:
        return f"{job.name} is being resumed already"
    text = f"{job.name} is not suspended, but {job.phase}: nothing to resume"
    if job.phase == Phase.FAILED:
        text += f"; ddpjob retry {job.name} takes it up again"
    elif job.phase == Phase.COMPLETE:
        text += f"; ddpjob restart {job.name} runs it again"
    return text


async def retry(client: AsyncClient, name: str) -> int:
    job = await client.retry(name)
    Output().print(f"{name} taken up again from {_beginning(job)}")
    return 0


def _beginning(job: DDPJob) -> str:
    return "its last checkpoint" if job.checkpoint else "the beginning: it has no spec.checkpoint"


async def scale(client: AsyncClient, name: str, nodes: int) -> int:
    before = (await client.get(name)).spec.get("nodes", 1)
    if before == nodes:
        Output().print(f"{name} has {counted(nodes, 'node')} already: nothing to scale")
        return 0
    await client.scale(name, nodes)
    Output().print(f"{name} scaled from {before} to {counted(nodes, 'node')}")
    return 0


async def restart(client: AsyncClient, name: str) -> int:
    job = await client.get(name)
    if job.finished:
        note(f"{name} is {job.phase}: running it again")
        with kept_manifest(job):
            await client.restart(name)
    else:
        note(f"{name} is {job.phase}: suspending it, then resuming it")
        try:
            await client.restart(name)
        except (asyncio.CancelledError, ClientError):
            note(f"the job may be suspended; ddpjob resume {name} continues it")
            raise
    Output().print(f"{name} restarted{_from_checkpoints(job)}")
    return 0


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


async def delete(client: AsyncClient, names: list[str], wait_until_gone: bool) -> int:
    code = 0
    for name in names:
        try:
            job = await client.delete(name, wait=wait_until_gone)
        except NotFound as error:
            print_error(str(error))
            code = REFUSED
        else:
            Output().print(f"{name} deleted{_kept_checkpoints(job)}")
    return code


def _kept_checkpoints(job: DDPJob) -> str:
    return f"; its checkpoints stay: {job.checkpoint}" if job.checkpoint else ""


def _from_checkpoints(job: DDPJob) -> str:
    return f", from the checkpoints in {job.checkpoint}" if job.checkpoint else ""
