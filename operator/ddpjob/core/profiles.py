"""Accelerator profiles: what a node of a kind has and what its processes need. Rows of data in `profiles/*.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

Dict = Mapping[str, Any]


@dataclass(frozen=True)
class Profile:
    """One kind of node. `devices`: extended resources a pod requests, by name.

    Processes a node are either fixed (`processes`) or one for each device of the kind `process_per`. Where only some
    numbers of them can work together, `process_counts` lists those of a single node; of several nodes each has `processes`.
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


@cache
def catalog() -> Mapping[str, Profile]:
    """All profiles by name."""
    folder = resources.files(__package__) / "profiles"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    rows = [row for file in files for row in yaml.safe_load(file.read_text()).items()]
    return {name: _profile(name, row) for name, row in rows}


def _profile(name: str, row: Dict) -> Profile:
    return Profile(
        name=name,
        description=row["description"],
        processes=row.get("processes", 1),
        process_per=row.get("processPer", ""),
        process_counts=tuple(row.get("processCounts", ())),
        multi_node=row.get("multiNode", True),
        devices=row.get("devices", {}),
        instance_types=tuple(row.get("instanceTypes", ())),
        tolerations=tuple(row.get("tolerations", ())),
        env=row.get("env", {}),
        node_cache_variable=row.get("nodeCacheVariable", ""),
    )


def processes(name: str, asked: int | None, user_resources: Dict | None) -> int:
    """Processes a node: what was asked for, else what the profile's devices give."""
    profile = catalog()[name]
    if asked is not None:
        return asked
    return _limit(user_resources, profile.process_per) or profile.processes


def complaint(name: str, nodes: int, asked: int | None) -> str | None:
    """Why that many processes cannot work together on that many nodes of the kind, in a sentence; None where they can."""
    profile = catalog()[name]
    if nodes > 1 and not profile.multi_node:
        return f"spec.nodes must be 1 with accelerator {name}: such a node has no EFA to reach another one."
    counts = (profile.processes,) if nodes > 1 else profile.process_counts
    if not profile.process_counts or asked is None or asked in counts:
        return None
    allowed = ", ".join(str(count) for count in counts)
    where = "on one node" if nodes == 1 else "on each of several nodes"
    return (
        f"spec.nprocPerNode with accelerator {name} {where} must be {allowed} or auto, not {asked}."
    )


def devices(name: str, asked: int | None, user_resources: Dict | None) -> Mapping[str, int]:
    """Extended resources to request; where the profile counts processes by a device, as many as there are processes."""
    profile = catalog()[name]
    if not profile.process_per:
        return profile.devices
    count = _limit(user_resources, profile.process_per) or processes(name, asked, user_resources)
    return {**profile.devices, profile.process_per: count}


def _limit(user_resources: Dict | None, device: str) -> int | None:
    for kind in ("limits", "requests"):
        value = str(((user_resources or {}).get(kind) or {}).get(device, ""))
        if device and value.isascii() and value.isdecimal() and int(value):
            return int(value)
    return None
