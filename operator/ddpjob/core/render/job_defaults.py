"""The administrator's defaults for the pods of all jobs: the chart's value `jobDefaults`."""

from typing import Any

from ddpjob.core.api.pod_fields import read_pod_fields
from ddpjob.core.api.readers import Dict, SpecError, children

# Fields of a pod's spec that may have a default.
FIELDS = ("imagePullSecrets", "nodeSelector", "priorityClassName", "tolerations")


def read_job_defaults(data: Any) -> Dict:
    """Return the defaults in `data`. Raises SpecError."""
    if not isinstance(data, dict):
        raise SpecError(f"must be an object with fields of {', '.join(FIELDS)}")
    for key in data:
        if key not in FIELDS:
            raise SpecError(f"{key}: unknown field; there are defaults for {', '.join(FIELDS)}")
    return {key: value for key, value in read_pod_fields(data).items() if value}


def add_job_defaults(pod_spec: dict[str, Any], defaults: Dict) -> None:
    """Add the defaults to a pod. What the job sets itself stays."""
    selector = {**defaults.get("nodeSelector", {}), **(pod_spec.get("nodeSelector") or {})}
    if selector:
        pod_spec["nodeSelector"] = selector
    if "priorityClassName" in defaults and not pod_spec.get("priorityClassName"):
        pod_spec["priorityClassName"] = defaults["priorityClassName"]
    for key in ("imagePullSecrets", "tolerations"):
        own = list(children(pod_spec, key))
        items = own + [item for item in defaults.get(key, ()) if item not in own]
        if items:
            pod_spec[key] = items
