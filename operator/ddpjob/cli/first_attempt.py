"""The objects of a job's first attempt, for `ddpjob render` and `validate`."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ddpjob.core.api.job import Job
from ddpjob.core.api.readers import SpecError
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import observe
from ddpjob.core.plan import Owned
from ddpjob.core.render import objects
from ddpjob.core.render.pod_context import Settings
from ddpjob.jobs.documents import Document
from ddpjob.jobs.user_job import DDPJob

# The API server gives each object its own.
UID = "00000000-0000-0000-0000-000000000000"


def problem_of(document: Document) -> str:
    """Return why a job or its pods cannot be created, or an empty string without a problem."""
    try:
        for _ in objects_of(document, 0, Settings()):
            pass
    except SpecError as error:
        return str(error)
    return ""


def objects_of(
    document: Document, node: int | None, settings: Settings
) -> Iterator[dict[str, Any]]:
    """Yield the objects of the operator for the first attempt. Raises SpecError."""
    DDPJob.from_manifest(document).check()
    # A suspended job has no pods before it is resumed.
    resumed = {**document, "spec": {**document["spec"], "suspend": False}}
    job = replace(Job.from_dict(resumed), uid=UID)
    status = decide(observe(job, ()), datetime.now(UTC)).status
    job = replace(job, status=status)
    nodes = range(status.pods.desired)
    if node is not None:
        if node not in nodes:
            raise SpecError(f"--node {node}: job {job.name} has {len(nodes)} nodes, from 0 on")
        nodes = range(node, node + 1)
    for kind in Owned:
        yield from objects.rendered(job, kind, nodes, settings)
