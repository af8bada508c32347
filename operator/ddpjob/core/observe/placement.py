"""What a pod needs of the nodes: the names of resources, and rules for its placement."""

import hashlib
import json
from functools import lru_cache
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, child, children

# The field of an affinity with its required rules.
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def read_requests(pod_spec: Dict) -> frozenset[str]:
    """Return the resources needed by a pod. Each pod also uses one of its node's `pods`."""
    found = {"pods"}
    containers = (*children(pod_spec, "containers"), *children(pod_spec, "initContainers"))
    # A pod may have resources of its own, for all its containers together.
    for one in (pod_spec, *containers):
        resources = child(one, "resources")
        found.update(child(resources, "requests"))
        found.update(child(resources, "limits"))
    return _shared(frozenset(found))


def read_placement(pod_spec: Dict) -> str:
    """Return a digest of a pod's node selector, required affinity and tolerations.

    Rules for placing a job's pods near each other are left out: they name the job, and jobs with
    equal pods compete for the same nodes.
    """
    selector = child(pod_spec, "nodeSelector")
    required = _required_affinity(child(pod_spec, "affinity"))
    tolerations = sorted(children(pod_spec, "tolerations"), key=str)
    placement = [selector, required, tolerations]
    return _digest(json.dumps(placement, sort_keys=True, default=str))


def _required_affinity(affinity: Dict) -> Dict:
    required = {}
    for kind in affinity:
        rules = _of_others(child(affinity, kind).get(REQUIRED))
        if rules:
            required[kind] = rules
    return required


def _of_others(rules: Any) -> Any:
    """Return the rules of an affinity without the operator's own for a topology."""
    if not isinstance(rules, list):
        return rules
    return [rule for rule in rules if names.LABEL_JOB_UID not in _labels_of(rule)]


def _labels_of(rule: Any) -> Dict:
    selector = child(rule, "labelSelector")
    return child(selector, "matchLabels")


@lru_cache(maxsize=1024)
def _shared(names: frozenset[str]) -> frozenset[str]:
    """Return one object for equal sets: all pods of a job have equal ones."""
    return names


@lru_cache(maxsize=1024)
def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()[:16]
