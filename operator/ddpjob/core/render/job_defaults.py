"""The administrator's defaults for the pods of all jobs: the chart's value `jobDefaults`."""

from typing import Any

from ddpjob.core.api.pod_fields import read_pod_fields
from ddpjob.core.api.readers import Dict, SpecError, children

# Fields of a pod's spec that may have a default.
FIELDS = ("imagePullSecrets", "nodeSelector", "priorityClassName", "tolerations")


def read_job_defaults(data: Any) -> Dict:
    """Return the defaults in `data`. Raises SpecError."""
    known = ", ".join(FIELDS)
    if not isinstance(data, dict):
        raise SpecError(f"must be an object with fields of {known}")
    for key in data:
        if key not in FIELDS:
            raise SpecError(f"{key}: unknown field; there are defaults for {known}")
    fields = read_pod_fields(data)
    return {key: value for key, value in fields.items() if value}


def add_job_defaults(pod_spec: dict[str, Any], defaults: Dict) -> None:
    """Add the defaults to a pod. What the job sets itself stays."""
    default_selector = defaults.get("nodeSelector", {})
    own_selector = pod_spec.get("nodeSelector") or {}
    selector = {**default_selector, **own_selector}
    if selector:
        pod_spec["nodeSelector"] = selector
    has_priority = bool(pod_spec.get("priorityClassName"))
    if "priorityClassName" in defaults and not has_priority:
        pod_spec["priorityClassName"] = defaults["priorityClassName"]
    for key in ("imagePullSecrets", "tolerations"):
        own = children(pod_spec, key)
        added = [item for item in defaults.get(key, ()) if item not in own]
        if own or added:
            pod_spec[key] = [*own, *added]
