"""The volume mounts of a pod as folders and files of this machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ddpjob.core.agent_files import agent_files, config_map_name
from ddpjob.core.api import names
from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    children,
    normal_path,
    refuse,
    require_string,
)
from ddpjob.local.config_maps import volume_files
from ddpjob.local.downward import downward_files
from ddpjob.local.run_files import RunFiles

# A path begins a word, or follows one of these characters: --out=/data, a:/data, 'a,/data'.
PATH_START = r"(?<![^\s=:,'\"])"
PATH_END = r"(?=/|$|[\s:,'\"])"


@dataclass(frozen=True)
class Mounts:
    """The folders and files at the paths of a pod.

    - `paths`: the path on this machine, by the path in the pod.
    - `files`: the content of files to be written first, by their path on this machine.
    """

    paths: Mapping[str, Path]
    files: Mapping[Path, str | bytes]

    def place(self, text: str) -> str:
        """Return a text with every path below a mount replaced by a path of this machine."""
        return self._pattern.sub(lambda found: str(self.paths[found[1]]), text)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # The longest path comes first, so a mount inside another mount wins.
        ordered = sorted(self.paths, key=len, reverse=True)
        alternatives = "|".join(re.escape(path) for path in ordered)
        return re.compile(f"{PATH_START}({alternatives}){PATH_END}")


def read_mounts(pod: Dict, container: Dict, files: RunFiles) -> Mounts:
    """Return the mounts of a rendered pod. Raises SpecError for one not possible here."""
    pod_folder = files.pod(pod["metadata"]["name"])
    volumes = {volume["name"]: volume for volume in children(child(pod, "spec"), "volumes")}
    # A kubelet provides this file.
    paths = {names.MESSAGE_FILE: pod_folder / "report.json"}
    contents: dict[Path, str | bytes] = {}
    config_maps = {**files.config_maps, config_map_name(): agent_files()}
    for mount in children(container, "volumeMounts"):
        path = _read_mount_path(mount)
        name = mount["name"]
        volume = volumes[name]
        if path == names.SHARED_MEMORY:
            # Processes of this machine use its own shared memory.
            continue
        # Fill the volume, then mount it or a path below it.
        folder = _volume_folder(volume, pod_folder, files)
        texts = {**volume_files(volume, config_maps), **downward_files(volume, pod)}
        for path_below, content in texts.items():
            contents[_below(folder, path_below, "items[].path")] = content
        paths[path] = _below(folder, mount.get("subPath") or "", "volumeMounts[].subPath")
        if "hostPath" in volume:
            _require_host_path(paths[path], volume)
    return Mounts(paths, contents)


def _read_mount_path(mount: Dict) -> str:
    where = "volumeMounts[].mountPath"
    given = mount["mountPath"]
    path = normal_path(given)
    # A mount at / would rewrite every path.
    if not given.startswith("/") or path == "/":
        raise refuse(where, "an absolute path other than '/'", given)
    if "subPathExpr" in mount:
        raise SpecError(
            f"volumeMounts[].subPathExpr: is not supported on this machine, at {given}; use subPath"
        )
    return path


def _volume_folder(volume: Dict, pod_folder: Path, files: RunFiles) -> Path:
    where = f"volume {volume['name']}"
    if "persistentVolumeClaim" in volume:
        claim = volume["persistentVolumeClaim"]
        return files.claim(require_string(claim.get("claimName"), f"{where}: claimName"))
    if "hostPath" in volume:
        host_path = volume["hostPath"]
        return Path(require_string(host_path.get("path"), f"{where}: hostPath.path"))
    # An emptyDir, a volume of ConfigMaps, or a kind found only in a cluster (notes.py reports it).
    return pod_folder / "volumes" / str(volume["name"])


def _below(folder: Path, relative: str, where: str) -> Path:
    parts = Path(relative)
    if parts.is_absolute() or ".." in parts.parts:
        raise refuse(where, "a relative path without '..'", relative)
    return folder / parts


def _require_host_path(path: Path, volume: Dict) -> None:
    where = f"volume {volume['name']}: hostPath {path}"
    try:
        exists = path.exists()
    except OSError as error:
        raise SpecError(f"{where}: {error.strerror}") from error
    if not exists:
        raise SpecError(f"{where}: does not exist on this machine; create it or use another path")
