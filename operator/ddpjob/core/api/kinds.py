"""The fields of Kubernetes' kinds within a pod, in any depth."""

from collections.abc import Mapping
from functools import cache
from importlib import resources

from ddpjob.core.api.yaml_text import load_yaml

FILE = "pod_kinds.yaml"

NO_FIELDS: Mapping[str, str] = {}


@cache
def kinds() -> Mapping[str, Mapping[str, str]]:
    """Return the kinds reached from a pod's spec, with the kind of each field."""
    text = resources.files(__package__).joinpath(FILE).read_text()
    return {
        kind: {name: inner or "" for name, inner in fields.items()}
        for kind, fields in load_yaml(text).items()
    }


def fields_of(kind: str) -> Mapping[str, str]:
    """Return the fields of a kind, such as `Container`, and the kind of each.

    A value without fields of its own, such as a number or labels, has the kind "".
    """
    return kinds().get(kind, NO_FIELDS)


def kind_of_pod_field(name: str) -> str:
    """Return the kind of a field of a pod's spec, or of a container."""
    return fields_of("PodSpec").get(name) or fields_of("Container").get(name, "")
