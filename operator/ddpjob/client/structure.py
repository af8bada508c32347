"""What the API server does with a new object before it looks at its values.

A structural schema says which fields there are, what is absent, and what the defaults are.

Source: https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob.core.api.kubernetes import UNKNOWN_TO_CRD, is_shape_of_pods
from ddpjob.core.api.readers import did_you_mean

# Fields of every object, which no schema describes.
OBJECT_FIELDS = ("apiVersion", "kind", "metadata")


def with_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a value without nulls, and with the defaults of absent fields."""
    if isinstance(value, dict):
        filled = {}
        properties = schema.get("properties", {})
        for key, child in value.items():
            child_schema = _child_schema(schema, key)
            if child is None and child_schema is not None and not child_schema.get("nullable"):
                continue
            filled[key] = with_defaults(child, child_schema or {})
        for key, child_schema in properties.items():
            if key not in filled and "default" in child_schema:
                default = copy.deepcopy(child_schema["default"])
                filled[key] = with_defaults(default, child_schema)
        return filled
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    return value


def unknown_fields(value: Any, schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield a sentence for each field that the schema does not have."""
    if isinstance(value, dict):
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return
        for key, child in value.items():
            if not path and key in OBJECT_FIELDS:
                continue
            child_schema = _child_schema(schema, key)
            where = f"{path}.{key}" if path else key
            if child_schema is None:
                hint = did_you_mean(key, schema.get("properties", {}))
                if not hint and is_shape_of_pods(where):
                    hint = UNKNOWN_TO_CRD
                yield f'unknown field "{where}"{hint}'
            else:
                yield from unknown_fields(child, child_schema, where)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, schema.get("items", {}), f"{path}[{index}]")


def _child_schema(schema: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Return the schema of a field, or None if it is unknown."""
    found = schema.get("properties", {}).get(key)
    if found is None:
        found = schema.get("additionalProperties")
    return found if isinstance(found, Mapping) else None
