"""The owner of an object: its controlling job."""

from collections.abc import Mapping
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.names import Identity
from ddpjob.core.api.readers import Dict, child, children


def owner_of(obj: Dict) -> Identity | None:
    """Return the DDPJob that controls an object, or None.

    An owner is in the namespace of what it owns. Anybody who may create a pod in any namespace can
    write any owner into it, so no part of an identity is left out of a comparison.
    """
    metadata = child(obj, "metadata")
    for owner in children(metadata, "ownerReferences"):
        kind = (owner.get("apiVersion"), owner.get("kind"))
        if owner.get("controller") and kind == (names.API_VERSION, names.KIND):
            namespace = str(metadata.get("namespace", ""))
            return Identity(namespace, str(owner.get("name", "")), str(owner.get("uid", "")))
    return None


def owned_metadata(
    owner: Identity,
    name: str,
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the metadata of an object controlled by a job."""
    reference = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
    }
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": {
            names.LABEL_MANAGED_BY: names.MANAGER,
            names.LABEL_JOB: owner.name,
            **(labels or {}),
        },
        "ownerReferences": [reference],
    }
