"""Accelerator profiles: the devices of a kind of node, and the needs of its processes.

The profiles are rows of data in `profiles/*.yaml`. An accelerator is described only in its row.
`make generate` copies its name, sizes and description into other files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from ddpjob.core.api.readers import Dict, SpecError, child
from ddpjob.core.api.yaml_text import load_yaml

# The accelerator of a job that names none.
DEFAULT = "cpu"


@dataclass(frozen=True)
class Profile:
    """One kind of node. A row of a profile file has these fields with names in camel case."""

    name: str
    description: str

    # The backend of torch.distributed: gloo, nccl or xla.
    backend: str

    # The trainer's image for these nodes. `ddpjob init` writes it into manifests.
    trainer_image: str

    # Extended resources requested by a pod, by name.
    devices: Mapping[str, int] = field(default_factory=dict)

    # The number of processes per node, or the kind of device with one process for each.
    processes: int = 1
    process_per: str = ""

    # Supported numbers of processes on one node, if not all. Each of several nodes has `processes`.
    process_counts: tuple[int, ...] = ()

    # Why a job has only one node, as the end of a sentence: "has no network". Empty: it can have
    # several.
    one_node: str = ""

    # Values of the node label of the instance type, if only some nodes with the devices are right.
    instance_types: tuple[str, ...] = ()
    tolerations: tuple[Dict, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    # The variable of a folder for compiled programs. Each node has its own beside the checkpoints.
    node_cache_variable: str = ""

    # The default of `spec.fastStart`.
    fast_start: bool = False

    @property
    def all_devices(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.process_per, *self.devices)))


@cache
def catalog() -> Mapping[str, Profile]:
    """Return all profiles by name."""
    folder = resources.files(__package__) / "profiles"
    found = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            for name, row in load_yaml(file.read_text()).items():
                found[name] = _read_profile(name, row)
    return found


def _read_profile(name: str, row: Dict) -> Profile:
    """Return the profile of a row. Raises TypeError for a missing or unknown field."""
    fields: dict[str, Any] = {}
    for key, value in row.items():
        attribute = re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key)
        fields[attribute] = tuple(value) if isinstance(value, list) else value
    return Profile(name, **fields)


def check_size(name: str, nodes: int, requested: int | None) -> None:
    """Raise SpecError if the profile does not support this number of nodes or processes.

    `requested` is the number of processes per node, or None for the profile's own.
    """
    profile = catalog()[name]
    if nodes > 1 and profile.one_node:
        raise SpecError(
            f"spec.nodes: must be 1 with accelerator {name}, which {profile.one_node}, got {nodes}"
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


# Devices for the network between nodes. They work beside any accelerator.
NETWORK_DEVICES = ("vpc.amazonaws.com/efa",)


def unused_devices(name: str, user_resources: Dict) -> tuple[str, ...]:
    """Return the devices in the user's resources that only other profiles use, sorted by name."""
    used = {*catalog()[name].all_devices, *NETWORK_DEVICES}
    return tuple(
        device
        for device in sorted(set(all_devices()) - used)
        if _requested_devices(user_resources, device) is not None
    )


def all_devices() -> Sequence[str]:
    """Return the devices of all profiles, each once."""
    return tuple(dict.fromkeys(name for one in catalog().values() for name in one.all_devices))


def profiles_with(device: str) -> tuple[str, ...]:
    """Return the names of the profiles that use a device."""
    return tuple(name for name, one in catalog().items() if device in one.all_devices)


def profiles_per_device() -> tuple[str, ...]:
    """Return the names of the profiles with one process for each device."""
    return tuple(name for name, one in catalog().items() if one.process_per)


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
