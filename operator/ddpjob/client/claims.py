"""Check the PersistentVolumeClaims of jobs before the jobs are created."""

from collections.abc import Iterable, Sequence, Set

from ddpjob.client.errors import Rejected, client_errors
from ddpjob.client.reader import JobReader
from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, child, did_you_mean
from ddpjob.jobs.documents import is_job
from ddpjob.jobs.user_job import DDPJob
from ddpjob.kube.kinds import CLAIMS
from ddpjob.kube.watch import list_objects


async def check_claims(client: JobReader, documents: Sequence[Dict]) -> None:
    """Raise Rejected for a job with a missing claim. Its pods would wait for the claim.

    A claim among the documents counts as existing. Without the right to read claims, nothing is
    checked.
    """
    for job in _jobs_that_start(documents):
        namespace = job.namespace or client.namespace
        given = _claims_in(documents, namespace, client.namespace)
        wanted = set(job.claims) - given
        if wanted:
            await _require(client, job, namespace, wanted)


async def _require(
    client: JobReader,
    job: DDPJob,
    namespace: str,
    wanted: Set[str],
) -> None:
    try:
        with client_errors():
            found, _ = await list_objects(client.api, CLAIMS, namespace, {})
    except Rejected:
        # The API server accepts the job even if a claim is missing. The job's status then names it.
        return
    known = {claim["metadata"]["name"] for claim in found}
    missing = sorted(wanted - known)
    if missing:
        name = missing[0]
        hint = did_you_mean(name, known)
        raise Rejected(
            f'job {job.name}: PersistentVolumeClaim "{name}" does not exist in namespace '
            f"{namespace}{hint}; create the claim first, or in the same manifest. Nothing was "
            "created"
        )


def _jobs_that_start(documents: Iterable[Dict]) -> Iterable[DDPJob]:
    """Yield the jobs started at once in this cluster: neither suspended nor managed elsewhere."""
    for document in documents:
        if not is_job(document):
            continue
        spec = child(document, "spec")
        manager = spec.get("managedBy", names.CONTROLLER)
        if manager == names.CONTROLLER and not spec.get("suspend"):
            yield DDPJob.from_manifest(document)


def _claims_in(documents: Iterable[Dict], namespace: str, default: str) -> set[str]:
    """Return the names of the claims among the documents for a namespace."""
    found = set()
    for document in documents:
        if document.get("kind") != "PersistentVolumeClaim":
            continue
        metadata = child(document, "metadata")
        place = metadata.get("namespace") or default
        if place == namespace:
            found.add(str(metadata.get("name")))
    return found
