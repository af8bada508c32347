"""The values of an object against a schema, with the sentences of the API server."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft4Validator, ValidationError, validators

# The names that the API server gives to the types of JSON.
TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


@dataclass(frozen=True)
class Problem:
    """A sentence of the API server. A problem of the shape keeps it from checking the rules."""

    sentence: str
    is_shape: bool = False


def problems(value: Any, schema: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the values of an object, in the order of their paths."""
    validator = VALIDATOR(_as_json_schema(schema))
    for error in sorted(validator.iter_errors(value), key=lambda error: list(map(str, error.path))):
        yield _problem(error)
    yield from _duplicates(value, schema, "")


def _is_integer(_: Any, value: Any) -> bool:
    """Return True for an integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


VALIDATOR = validators.extend(  # type: ignore[no-untyped-call]
    Draft4Validator, type_checker=Draft4Validator.TYPE_CHECKER.redefine("integer", _is_integer)
)


def path_of(parts: Any) -> str:
    """Return a path as the API server writes it, such as spec.env[0].name."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text


def _as_json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a structural schema without what JSON Schema does not know."""
    converted = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes")}
    if schema.get("x-kubernetes-int-or-string"):
        converted["type"] = ["integer", "string"]
    if "properties" in schema:
        properties = schema["properties"].items()
        converted["properties"] = {key: _as_json_schema(child) for key, child in properties}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            converted[key] = _as_json_schema(schema[key])
    return converted


def _problem(error: ValidationError) -> Problem:
    """Return an error of JSON Schema in the words of the API server."""
    where = path_of(error.absolute_path)
    found: Any = error.instance
    limit: Any = error.validator_value
    match error.validator:
        case "type":
            is_too_large = type(found) is int and not _is_integer(None, found)
            name = "number" if is_too_large else TYPES[type(found)]
            wanted = ",".join(limit) if isinstance(limit, list) else limit
            text = f'Invalid value: "{name}": {where} in body must be of type {wanted}: "{name}"'
            return Problem(f"{where}: {text}", is_shape=True)
        case "required":
            missing = error.message.split("'")[1]
            place = f"{where}.{missing}" if where else missing
            return Problem(f"{place}: Required value", is_shape=True)
        case "enum":
            values = ", ".join(_json(value) for value in limit)
            text = f"Unsupported value: {_json(found)}: supported values: {values}"
            return Problem(f"{where}: {text}", is_shape=True)
        case "maxLength":
            text = f"Too long: may not be more than {limit} bytes"
            return Problem(f"{where}: {text}", is_shape=True)
        case "maxItems" | "maxProperties":
            text = f"Too many: {len(found)}: must have at most {limit} items"
            return Problem(f"{where}: {text}", is_shape=True)
        case "minItems":
            wanted = f"should have at least {limit} items"
            return Problem(f"{where}: Invalid value: {len(found)}: {where} in body {wanted}")
        case "minimum":
            wanted = f"should be greater than or equal to {limit}"
        case "maximum":
            wanted = f"should be less than or equal to {limit}"
        case "minLength":
            wanted = f"should be at least {limit} chars long"
        case "pattern":
            wanted = f"should match '{limit}'"
        case _:
            wanted = error.message
    return Problem(f"{where}: Invalid value: {_json(found)}: {where} in body {wanted}")


def _duplicates(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Yield the items of lists whose keys another item has already."""
    if isinstance(value, dict):
        for key, child in value.items():
            child_schema = schema.get("properties", {}).get(key)
            if child_schema:
                yield from _duplicates(child, child_schema, f"{where}.{key}" if where else key)
    if not isinstance(value, list):
        return
    seen = set()
    keys = schema.get("x-kubernetes-list-map-keys", [])
    for index, item in enumerate(value):
        yield from _duplicates(item, schema.get("items", {}), f"{where}[{index}]")
        if keys and not isinstance(item, dict):
            text = f"Invalid value: {_json(item)}: must be an object for an array of list-type map"
            yield Problem(f"{where}[{index}]: {text}", is_shape=True)
        elif keys:
            found = {key: item[key] for key in keys if key in item}
            identity = json.dumps(found, sort_keys=True)
            if identity in seen:
                text = json.dumps(found, separators=(",", ":"))
                yield Problem(f"{where}[{index}]: Duplicate value: {text}", is_shape=True)
            seen.add(identity)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
