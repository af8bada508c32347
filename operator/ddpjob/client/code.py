"""Make jobs the owners of their code's ConfigMap: it is deleted with the last of them."""

from collections.abc import Iterator, Sequence
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, child
from ddpjob.jobs.documents import is_job
from ddpjob.jobs.user_job import DDPJob


def owned_code(bodies: Sequence[Dict]) -> Iterator[dict[str, Any]]:
    """Yield a patch for each ConfigMap of sent code, to make its jobs in `bodies` the owners."""
    jobs = list(filter(is_job, bodies))
    for body in bodies:
        if not _is_code(body):
            continue
        owners = [_reference(job) for job in jobs if _uses(job, body)]
        if owners:
            yield _with_owners(body, owners)


def _is_code(body: Dict) -> bool:
    if body["kind"] != "ConfigMap":
        return False
    labels = child(body["metadata"], "labels")
    return names.LABEL_CODE in labels


def _uses(job: Dict, config_map: Dict) -> bool:
    """Return True if a ConfigMap has the code of a job."""
    namespace = job["metadata"].get("namespace")
    name = child(job["spec"], "code").get("configMap")
    found = config_map["metadata"]
    return (namespace, name) == (found.get("namespace"), found["name"])


def released_code(body: Dict, job: DDPJob) -> dict[str, Any]:
    """Return the patch to remove a job from the owners of a ConfigMap of code."""
    removed = {"$patch": "delete", "uid": job.uid}
    return _with_owners(body, [removed])


def _with_owners(body: Dict, owners: Sequence[Dict]) -> dict[str, Any]:
    metadata = {
        "name": body["metadata"]["name"],
        "namespace": body["metadata"]["namespace"],
        "ownerReferences": list(owners),
    }
    return {"metadata": metadata}


def _reference(job: Dict) -> dict[str, Any]:
    metadata = job["metadata"]
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
