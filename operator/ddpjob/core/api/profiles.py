"""Accelerator profiles: the devices of a kind of node, and the needs of its processes.

The profiles are rows of data in `profiles/*.yaml`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from ddpjob.core.api.readers import Dict, SpecError, child


@dataclass(frozen=True)
class Profile:
    """One kind of node. `devices` are the extended resources that a pod requests, by name.

    The number of processes per node is fixed (`processes`), or it is the number of devices of the
    kind `process_per`. If a node supports only some numbers of processes, `process_counts` lists
    them. With several nodes, each node then has `processes`. `fast_start` is the default of
    `spec.fastStart`.
    """

    name: str
    description: str
    processes: int = 1
    process_per: str = ""
    process_counts: tuple[int, ...] = ()
    multi_node: bool = True
    devices: Mapping[str, int] = field(default_factory=dict)
    instance_types: tuple[str, ...] = ()
    tolerations: tuple[Dict, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    node_cache_variable: str = ""
    fast_start: bool = False


@cache
def catalog() -> Mapping[str, Profile]:
    """Return all profiles by name."""
    folder = resources.files(__package__) / "profiles"
    found = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            for name, row in yaml.safe_load(file.read_text()).items():
                found[name] = _read_profile(name, row)
    return found


def _read_profile(name: str, row: Dict) -> Profile:
    return Profile(
        name=name,
        description=row["description"],
        processes=row.get("processes", Profile.processes),
        process_per=row.get("processPer", ""),
        process_counts=tuple(row.get("processCounts", ())),
        multi_node=row.get("multiNode", True),
        devices=row.get("devices", {}),
        instance_types=tuple(row.get("instanceTypes", ())),
        tolerations=tuple(row.get("tolerations", ())),
        env=row.get("env", {}),
        node_cache_variable=row.get("nodeCacheVariable", ""),
        fast_start=row.get("fastStart", False),
    )


def check_size(name: str, nodes: int, requested: int | None) -> None:
    """Raise SpecError if the profile does not support this number of nodes or processes.

    `requested` is the number of processes per node, or None for the profile's own.
    """
    profile = catalog()[name]
    if nodes > 1 and not profile.multi_node:
        raise SpecError(
            f"spec.nodes: must be 1 with accelerator {name}, which has no EFA to reach another "
            f"node, got {nodes}"
        )
    if not profile.process_counts or requested is None:
        return
    allowed = profile.process_counts
    where = "on one node"
    if nodes > 1:
        allowed = (profile.processes,)
        where = "on each of several nodes"
    if requested not in allowed:
        numbers = ", ".join(str(count) for count in allowed)
        raise SpecError(
            f"spec.nprocPerNode: must be {numbers} or auto with accelerator {name} {where}, "
            f"got {requested}"
        )


def resolve_processes(name: str, requested: int | None, user_resources: Dict) -> int:
    """Return the processes per node: the requested number, else the one of the devices."""
    profile = catalog()[name]
    if requested is not None:
        return requested
    return _requested_devices(user_resources, profile.process_per) or profile.processes


def resolve_devices(name: str, requested: int | None, user_resources: Dict) -> Mapping[str, int]:
    """Return the extended resources of a pod, by name.

    If the profile has one process per device, a pod gets as many devices as processes.
    """
    profile = catalog()[name]
    if not profile.process_per:
        return profile.devices
    count = _requested_devices(user_resources, profile.process_per)
    if count is None:
        count = resolve_processes(name, requested, user_resources)
    return {**profile.devices, profile.process_per: count}


def unused_devices(name: str, user_resources: Dict) -> tuple[str, ...]:
    """Return the devices in the user's resources that only other profiles use, sorted by name."""
    used = _devices_of(catalog()[name])
    known = frozenset().union(*map(_devices_of, catalog().values()))
    return tuple(
        device
        for device in sorted(known - used)
        if _requested_devices(user_resources, device) is not None
    )


def _devices_of(profile: Profile) -> frozenset[str]:
    return frozenset(filter(None, (*profile.devices, profile.process_per)))


def profiles_with(device: str) -> tuple[str, ...]:
    """Return the names of the profiles that use a device."""
    return tuple(name for name, one in catalog().items() if device in _devices_of(one))


def _requested_devices(user_resources: Dict, device: str) -> int | None:
    """Return the number of devices of a kind in the user's resources, or None."""
    if not device:
        return None
    for kind in ("limits", "requests"):
        quantity: Any = child(user_resources, kind).get(device, "")
        text = str(quantity)
        if text.isascii() and text.isdecimal() and int(text):
            return int(text)
    return None
