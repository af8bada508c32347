"""`ddpjob wait`, `suspend`, `resume`, `scale`, `restart` and `delete`."""

from pathlib import Path

import yaml

from ddpjob.cli.session import note, output, print_error
from ddpjob.client import AsyncClient, ClientError, WaitTimeout
from ddpjob.core.user_job import DDPJob
from ddpjob.local.run import exit_code

# The exit code of the command `timeout`.
TIMED_OUT = 124


async def wait(client: AsyncClient, name: str, timeout: float | None) -> int:
    """Return 0 once a job is Complete, 1 if it Failed, or 124 after the time-out."""
    try:
        job = await client.wait(name, timeout=timeout)
    except WaitTimeout as error:
        print_error(str(error))
        return TIMED_OUT
    output().print(f"{name} {job.phase}: {job.message}")
    return exit_code(job.status)


async def suspend(client: AsyncClient, name: str) -> int:
    await client.suspend(name)
    output().print(f"{name} suspended; ddpjob resume {name} continues it")
    return 0


async def resume(client: AsyncClient, name: str) -> int:
    job = await client.resume(name)
    place = "its last checkpoint" if job.checkpoint else "the beginning: it has no spec.checkpoint"
    output().print(f"{name} resumed from {place}")
    return 0


async def scale(client: AsyncClient, name: str, nodes: int) -> int:
    before = await client.get(name)
    await client.scale(name, nodes)
    output().print(f"{name} scaled from {before.spec.get('nodes', 1)} to {nodes} nodes")
    return 0


async def restart(client: AsyncClient, name: str) -> int:
    job = await client.get(name)
    note(f"{name} is {job.phase}: " + ("running it again" if job.finished else "suspending it"))
    try:
        await client.restart(name)
    except ClientError:
        await _keep_manifest(client, job)
        raise
    output().print(f"{name} restarted{_from_checkpoints(job)}")
    return 0


async def _keep_manifest(client: AsyncClient, job: DDPJob) -> None:
    """Write the manifest of a job that was deleted and could not be created again."""
    jobs = await client.list(namespace=job.namespace)
    if job.name in [found.name for found in jobs]:
        return
    file = Path(f"{job.name}.yaml")
    number = 1
    while file.exists():
        file = Path(f"{job.name}-{number}.yaml")
        number += 1
    file.write_text(yaml.safe_dump(job.manifest(), sort_keys=False))
    note(f"the job is deleted; its manifest is in {file}; ddpjob submit {file} creates it again")


async def delete(client: AsyncClient, names: list[str], wait_until_gone: bool) -> int:
    for name in names:
        job = await client.delete(name, wait=wait_until_gone)
        output().print(f"{name} deleted{_kept_checkpoints(job)}")
    return 0


def _kept_checkpoints(job: DDPJob) -> str:
    return f"; its checkpoints stay: {job.checkpoint}" if job.checkpoint else ""


def _from_checkpoints(job: DDPJob) -> str:
    return f", from the checkpoints in {job.checkpoint}" if job.checkpoint else ""
