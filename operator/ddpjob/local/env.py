"""The environment variables of a pod's container, with values of this machine."""

import re
import sys
from collections.abc import Mapping

from ddpjob.core.api.launcher import REFERENCE
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    children,
    quoted,
    require_object,
)
from ddpjob.local.config_maps import find_config_map, texts_of
from ddpjob.local.downward import pod_fields
from ddpjob.local.mounts import Mounts
from ddpjob.local.run_files import RunFiles

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def read_env(pod: Dict, container: Dict, mounts: Mounts, files: RunFiles) -> dict[str, str]:
    """Return the variables of a container: those of envFrom, then those of env.

    A reference expands to the value of a variable above it. Raises SpecError for a value not
    available on this machine.
    """
    # gloo and NCCL would choose an interface by the host name, but the name may not resolve.
    env = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    for source in children(container, "envFrom"):
        env |= _read_source(source, mounts, files)
    for item in children(container, "env"):
        name = item["name"]
        if item.get("valueFrom"):
            # Kubernetes does not expand `$(…)` in a value from elsewhere.
            env[name] = mounts.place(_read_value_from(item, pod, files))
        else:
            env[name] = expand(mounts.place(item.get("value") or ""), env)
    # The profile gpu excludes the loopback interface, but the processes share no other one.
    if env["NCCL_SOCKET_IFNAME"].startswith("^"):
        env["NCCL_SOCKET_IFNAME"] = LOOPBACK
    return env


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expand references as Kubernetes does. A reference to an unknown variable stays as it is."""

    def value_of(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return env.get(found[1], found[0])

    return REFERENCE.sub(value_of, text)


def _read_source(source: Dict, mounts: Mounts, files: RunFiles) -> dict[str, str]:
    reference = child(source, "configMapRef")
    where = "envFrom[].configMapRef"
    data = texts_of(find_config_map(reference, files.config_maps, where))
    prefix = str(source.get("prefix") or "")
    return {prefix + key: mounts.place(value) for key, value in data.items()}


def _read_value_from(item: Dict, pod: Dict, files: RunFiles) -> str:
    where = f"env {item['name']}"
    source = item["valueFrom"]
    if "configMapKeyRef" in source:
        reference = require_object(source["configMapKeyRef"], f"{where}: configMapKeyRef")
        data = texts_of(find_config_map(reference, files.config_maps, where))
        return data.get(str(reference.get("key")), "")
    path = str(child(source, "fieldRef").get("fieldPath", ""))
    fields = pod_fields(pod)
    if path not in fields:
        what = f"field {quoted(path)}" if path else f"source {', '.join(source)}"
        raise SpecError(f"{where}: {what} is not available on this machine; set a value instead")
    return fields[path]
