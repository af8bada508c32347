"""What the checks of `ddpjob doctor` find, and how they read a cluster with few rights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpjob.client.async_client import AsyncClient
from ddpjob.client.errors import Rejected, client_errors
from ddpjob.jobs.user_job import DDPJob
from ddpjob.kube.kinds import JOBS, Kind
from ddpjob.kube.request import ReadDocument
from ddpjob.kube.watch import list_objects


@dataclass(frozen=True)
class Finding:
    """What a check found.

    - `advice`: what to do; empty if all is well. `page`: where it is described, below docs/.
    - `is_unknown`: the check could not find out whether something is to be done.
    """

    subject: str
    found: str
    advice: str = ""
    page: str = ""
    is_unknown: bool = False

    @property
    def is_problem(self) -> bool:
        """True if something is to be done."""
        return bool(self.advice) and not self.is_unknown


async def list_all(
    client: AsyncClient,
    kind: Kind,
    namespace: str | None = None,
    labels: str = "",
) -> list[dict[str, Any]]:
    """Return the objects of a namespace, or of all. Raises ClientError."""
    query = {"labelSelector": labels} if labels else {}
    with client_errors():
        found, _ = await list_objects(client.api, kind, namespace, query)
    return found


async def list_if_allowed(
    client: AsyncClient,
    kind: Kind,
    namespace: str | None = None,
    labels: str = "",
) -> list[dict[str, Any]] | None:
    """Return the objects of a namespace, or of all. Return None if the user may not list them."""
    try:
        return await list_all(client, kind, namespace, labels)
    except Rejected as error:
        if not is_forbidden(error):
            raise
    return None


async def jobs_of_namespace(client: AsyncClient) -> Sequence[DDPJob]:
    """Return the jobs of the user's namespace, as far as they can be read.

    There are none without the right to list them, and in a cluster without DDPJobs.
    """
    with client_errors():
        is_served = await client.api.read(ReadDocument(JOBS.api))
    if not is_served:
        return ()
    found = await list_if_allowed(client, JOBS, client.namespace)
    if found is None:
        return ()
    return list(map(DDPJob.from_manifest, found))


def is_forbidden(error: Exception) -> bool:
    """Return True if the API server does not let this user do what was asked."""
    return isinstance(error, Rejected) and error.status == 403
