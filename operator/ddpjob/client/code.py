"""Make jobs the owners of their code's ConfigMap: it is deleted with the last of them."""

from collections.abc import Iterator, Sequence
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, child
from ddpjob.jobs.documents import is_job
from ddpjob.jobs.user_job import DDPJob


def owned_code(bodies: Sequence[Dict]) -> Iterator[dict[str, Any]]:
    """Yield a patch for each ConfigMap of sent code, to make its jobs in `bodies` the owners."""
    for body in bodies:
        if body["kind"] != "ConfigMap" or names.LABEL_CODE not in child(body["metadata"], "labels"):
            continue
        place = (body["metadata"].get("namespace"), body["metadata"]["name"])
        owners = [_reference(job) for job in filter(is_job, bodies) if _place_of_code(job) == place]
        if owners:
            yield _with_owners(body, owners)


def _place_of_code(job: Dict) -> tuple[Any, Any]:
    return job["metadata"].get("namespace"), child(job["spec"], "code").get("configMap")


def released_code(body: Dict, job: DDPJob) -> dict[str, Any]:
    """Return the patch to remove a job from the owners of a ConfigMap of code."""
    return _with_owners(body, [{"$patch": "delete", "uid": job.uid}])


def _with_owners(body: Dict, owners: Sequence[Dict]) -> dict[str, Any]:
    metadata = {key: body["metadata"][key] for key in ("name", "namespace")}
    return {"metadata": {**metadata, "ownerReferences": list(owners)}}


def _reference(job: Dict) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
    }
