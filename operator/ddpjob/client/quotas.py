"""Find the resources required of each container by a ResourceQuota.

If a quota limits CPU or memory, each container has to name them. Otherwise the API server refuses
the pod (`must specify requests.cpu`). A LimitRange of the namespace may set them by default.
"""

from collections.abc import Iterable, Sequence

from ddpjob.core.api.readers import Dict, child, children, strings_or_empty

# For each limit of a quota, the resource that each container has to name.
TO_NAME = {
    "cpu": "requests.cpu",
    "memory": "requests.memory",
    "requests.cpu": "requests.cpu",
    "requests.memory": "requests.memory",
    "limits.cpu": "limits.cpu",
    "limits.memory": "limits.memory",
}

# The fields of a LimitRange with defaults for containers, and the fields filled by them.
DEFAULTS = {"defaultRequest": "requests", "default": "limits"}

# The scope of pods without a deadline of their own, such as the pods of jobs. The other scopes of a
# pod depend on the job.
SCOPE = "NotTerminating"


def unnamed_resources(quota: Dict, limit_ranges: Iterable[Dict]) -> Sequence[str]:
    """Return the resources required of each container and not set by a LimitRange."""
    spec = child(quota, "spec")
    if any(scope != SCOPE for scope in _scopes(spec)):
        return ()
    limits = child(spec, "hard")
    wanted = {TO_NAME[key] for key in limits if key in TO_NAME}
    for limit_range in limit_ranges:
        wanted.difference_update(_defaults(limit_range))
    return sorted(wanted, reverse=True)


def _scopes(spec: Dict) -> Iterable[str]:
    yield from strings_or_empty(spec.get("scopes"))
    selector = child(spec, "scopeSelector")
    for expression in children(selector, "matchExpressions"):
        if expression.get("operator") in ("Exists", "In"):
            yield str(expression.get("scopeName"))
        else:
            yield ""


def _defaults(limit_range: Dict) -> Iterable[str]:
    spec = child(limit_range, "spec")
    for item in children(spec, "limits"):
        if item.get("type") != "Container":
            continue
        for field, kind in DEFAULTS.items():
            for resource in child(item, field):
                yield f"{kind}.{resource}"
                # Without a request, a container requests as much as its limit.
                yield f"requests.{resource}"
