"""The file of the fields of all kinds within a pod, from Kubernetes' client for Python."""

import re
from collections.abc import Iterator, Mapping

from ddpjob.core.api.kubernetes import NEWEST

HEAD = f"""\
# The fields of the kinds within a pod in Kubernetes {NEWEST}, and their kinds. A field without a
# kind, such as a number or labels, has no fields. `make generate` writes this file from the client
# of Kubernetes for Python.
"""


def kinds_text() -> str:
    """Return the file: each kind reached from a pod's spec, with a line for each field."""
    lines = [HEAD]
    for kind, fields in sorted(_kinds("PodSpec").items()):
        lines.append(f"{kind}:\n")
        lines += [f"  {name}: {inner}".rstrip() + "\n" for name, inner in sorted(fields.items())]
    return "".join(lines)


def _kinds(root: str) -> Mapping[str, Mapping[str, str]]:
    found: dict[str, dict[str, str]] = {}
    waiting = [root]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found[kind] = dict(_fields(kind))
            waiting += filter(None, found[kind].values())
    return found


def _fields(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each field of a kind with its kind, or with an empty string."""
    # It imports all models of Kubernetes.
    from kubernetes.client import models

    model = getattr(models, f"CoreV1{kind}", None) or getattr(models, f"V1{kind}")
    for attribute, name in model.attribute_map.items():
        inner = re.search(r"V1(\w+)", model.openapi_types[attribute])
        yield name, inner[1] if inner else ""
