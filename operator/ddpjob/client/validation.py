"""What the API server would say of a new DDPJob, without one: from the CRD's schema and rules."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from celpy import Environment, Runner, celtypes
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError, CELFunction

from ddpjob.client.crd import schema
from ddpjob.client.structure import unknown_fields, with_defaults
from ddpjob.client.values import problems
from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, child, quoted

Schema = Mapping[str, Any]


def validate(manifest: Dict) -> list[str]:
    """Return the sentences with which the API server would refuse to create a job.

    The list is empty for a job that it would accept. Names in the metadata other than `name` are
    not checked.
    """
    version = manifest.get("apiVersion")
    if version != names.API_VERSION:
        return [f"apiVersion: the cluster has {names.API_VERSION}, got {quoted(version)}"]
    unknown = list(unknown_fields(manifest, schema()))
    if unknown:
        return unknown
    body = with_defaults(manifest, schema())
    metadata = child(body, "metadata")
    if not metadata.get("name") and not metadata.get("generateName"):
        return ["metadata.name: Required value: name or generateName is required"]
    # The API server makes a name from generateName before it looks at the rules.
    body["metadata"] = {"name": f"{metadata.get('generateName')}12345", **metadata}
    found = list(problems(body, schema()))
    sentences = [problem.sentence for problem in found]
    if not any(problem.is_shape for problem in found):
        # Skip a rule that cannot be evaluated because a value is wrong.
        sentences += _broken_rules(body, schema(), "", otherwise=bool(found))
    return sentences


def _broken_rules(value: Any, level: Schema, where: str, *, otherwise: bool) -> Iterator[str]:
    """Yield the sentences of the CEL rules that a value and its fields break.

    `otherwise` is the value of a rule that cannot be evaluated.
    """
    for rule in level.get("x-kubernetes-validations", ()):
        # A rule with oldSelf is about a change of an object.
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value, otherwise):
            yield _sentence(rule, value, where)
    if isinstance(value, dict):
        for key, child in value.items():
            child_level = level.get("properties", {}).get(key) or level.get("additionalProperties")
            if isinstance(child_level, Mapping):
                place = f"{where}.{key}" if where else key
                yield from _broken_rules(child, child_level, place, otherwise=otherwise)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            place = f"{where}[{index}]"
            yield from _broken_rules(item, level.get("items", {}), place, otherwise=otherwise)


def _sentence(rule: Schema, value: Any, where: str) -> str:
    place = (where + rule.get("fieldPath", "")).lstrip(".")
    # The API server quotes a value that is no object and no list.
    quoted = "" if isinstance(value, dict | list) else f"{json.dumps(value, ensure_ascii=False)}: "
    return f"{place}: Invalid value: {quoted}{rule['message']}"


def _holds(rule: str, value: Any, otherwise: bool) -> bool:
    """Return True if a rule holds, or `otherwise` if it cannot be evaluated."""
    try:
        return bool(_program(rule).evaluate({"self": json_to_cel(value)}))
    except CELEvalError:
        return otherwise


@cache
def _program(rule: str) -> Runner:
    environment = Environment()
    return environment.program(environment.compile(rule), functions=FUNCTIONS)


def _split(text: celtypes.StringType, separator: celtypes.StringType) -> celtypes.ListType:
    return celtypes.ListType([celtypes.StringType(part) for part in text.split(separator)])


def _replace(
    text: celtypes.StringType, old: celtypes.StringType, new: celtypes.StringType
) -> celtypes.StringType:
    return celtypes.StringType(text.replace(old, new))


def _join(words: celtypes.ListType, separator: celtypes.StringType) -> celtypes.StringType:
    return celtypes.StringType(separator.join(str(word) for word in words))


# Functions that Kubernetes adds to CEL.
FUNCTIONS: dict[str, CELFunction] = {"split": _split, "replace": _replace, "join": _join}
