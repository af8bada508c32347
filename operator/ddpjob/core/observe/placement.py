"""What a pod needs of the nodes: the names of resources, and which nodes it may be placed on."""

import hashlib
import json
from functools import lru_cache

from ddpjob.core.api.readers import Dict, child, children

# Where an affinity has the rules that must hold.
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def read_requests(pod_spec: Dict) -> frozenset[str]:
    """Return the resources that a pod needs. Each pod takes a place among those of its node."""
    found = {"pods"}
    for kind in ("containers", "initContainers"):
        for container in children(pod_spec, kind):
            resources = child(container, "resources")
            found |= {*child(resources, "requests"), *child(resources, "limits")}
    return _shared(frozenset(found))


def read_placement(pod_spec: Dict) -> str:
    """Return a digest of a pod's node selector, required affinity and tolerations."""
    affinity = child(pod_spec, "affinity")
    required = {kind: child(affinity, kind).get(REQUIRED) for kind in affinity}
    required = {kind: rules for kind, rules in required.items() if rules}
    tolerations = sorted(children(pod_spec, "tolerations"), key=str)
    rules = [child(pod_spec, "nodeSelector"), required, tolerations]
    return _digest(json.dumps(rules, sort_keys=True, default=str))


@lru_cache(maxsize=1024)
def _shared(names: frozenset[str]) -> frozenset[str]:
    """Return one object for equal sets: all pods of a job have equal ones."""
    return names


@lru_cache(maxsize=1024)
def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
