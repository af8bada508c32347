"""A rendered pod as a process of this machine: its command, environment and folders. Decides nothing, starts nothing."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob.core import names
from ddpjob.core.api import Job, SpecError
from ddpjob.core.names import TRAINER

Dict = Mapping[str, Any]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class LocalAddresses:
    """Every agent is at 127.0.0.1, spelt so that the spellings sort by index: c10d gives ranks by that order.

    `127.0.0.1 < 127.0.00.1 < 127.0.000.1` as texts, and all are the same address to getaddrinfo on Linux and macOS,
    which (unlike 127.0.0.2) needs no second loopback address. Node 0, whose spelling becomes MASTER_ADDR, has the plain one.
    """

    def __init__(self, free_port: Callable[[], int]) -> None:
        self._free_port = free_port
        self._ports: dict[int, int] = {}

    def endpoint(self, job: Job, attempt: int) -> str:
        if attempt not in self._ports:
            self._ports[attempt] = self._free_port()
        return f"127.0.0.1:{self._ports[attempt]}"

    def local(self, job: Job, attempt: int, index: int) -> str:
        return f"127.0.{'0' * (index + 1)}.1"


@dataclass(frozen=True)
class Folders:
    """Where a run keeps things. `claims`: folders that stand for claims, by name, where the user chose them."""

    run: Path
    claims: Mapping[str, Path] = field(default_factory=dict)

    def claim(self, name: str) -> Path:
        return self.claims.get(name, self.run / "claims" / name)

    def pod(self, name: str) -> Path:
        return self.run / "pods" / name

    def log(self, pod: str) -> Path:
        return self.run / "logs" / f"{pod}.log"


@dataclass(frozen=True)
class Command:
    """A process to start: `folders` have to exist, `files` to be written before."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    result: Path
    folders: tuple[Path, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)


def translate(pod: Dict, folders: Folders, config_maps: Mapping[str, Mapping[str, str]], hostname: str) -> Command:
    """The trainer's container of a rendered pod; raises SpecError for a reference that nothing here answers."""
    container = next(c for c in pod["spec"]["containers"] if c["name"] == TRAINER)
    name = pod["metadata"]["name"]
    sources = {v["name"]: v for v in pod["spec"].get("volumes", ())}
    mounts, files = _mounts(container, sources, folders, name, config_maps)
    placed = _placer(mounts)
    own = {
        "DDP_RESULT_FILE": str(folders.pod(name) / "result.json"),
        "DDP_HEARTBEAT_FILE": str(folders.pod(name) / "heartbeat.json"),
    }
    env = {
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        **_env_from(container, config_maps),
        **_env(container, pod, config_maps, hostname, own, placed),
    }
    words = [*container["command"], *container["args"]]
    return Command(
        argv=tuple(placed(_expand(word, env)) for word in words),
        env=env,
        result=Path(env["DDP_RESULT_FILE"]),
        folders=(folders.pod(name), *dict.fromkeys(mounts.values())),
        files=files,
    )


def _mounts(
    container: Dict,
    sources: Mapping[str, Dict],
    folders: Folders,
    pod: str,
    config_maps: Mapping[str, Mapping[str, str]],
) -> tuple[dict[str, Path], dict[Path, str]]:
    """Folders of this machine by mount path, and files to write into them. /dev/shm is this machine's own."""
    mounts: dict[str, Path] = {}
    files: dict[Path, str] = {}
    for mount in container.get("volumeMounts", ()):
        path, volume = mount["mountPath"], sources.get(mount["name"])
        if volume is None:
            raise SpecError(f"volumeMounts names the volume {mount['name']!r}, which volumes does not define.")
        if path == "/dev/shm":
            continue
        folder = _folder(volume, folders, pod)
        if "configMap" in volume:
            files |= {folder / name: text for name, text in _config_files(volume, config_maps).items()}
        mounts[path.rstrip("/")] = folder / mount["subPath"] if "subPath" in mount else folder
    return mounts, files


def _folder(volume: Dict, folders: Folders, pod: str) -> Path:
    if "persistentVolumeClaim" in volume:
        return folders.claim(volume["persistentVolumeClaim"]["claimName"])
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    return folders.pod(pod) / "volumes" / str(volume["name"])


def _config_files(volume: Dict, config_maps: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    source = volume["configMap"]
    data = _config_map(str(source.get("name")), config_maps, bool(source.get("optional")))
    if "items" not in source:
        return data
    return {item["path"]: data[item["key"]] for item in source["items"] if item["key"] in data}


def _config_map(name: str, config_maps: Mapping[str, Mapping[str, str]], optional: bool) -> Mapping[str, str]:
    if name not in config_maps and not optional:
        raise SpecError(f"The ConfigMap {name!r} is not in the manifest; add it to the same file, behind a line `---`.")
    return config_maps.get(name, {})


def _placer(mounts: Mapping[str, Path]) -> Callable[[str], str]:
    """Rewrites paths below a mount to this machine's folders, wherever they begin a word or follow a '=', ':' or ','."""
    if not mounts:
        return lambda text: text
    paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
    pattern = re.compile(rf"(?<![^\s=:,'\"])({paths})(?=/|$|[\s:,'\"])")
    return lambda text: pattern.sub(lambda found: str(mounts[found[1]]), text)


def _env_from(container: Dict, config_maps: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        reference = source.get("configMapRef") or {}
        data = _config_map(str(reference.get("name")), config_maps, bool(reference.get("optional")))
        found |= {source.get("prefix", "") + key: value for key, value in data.items()}
    return found


def _env(
    container: Dict,
    pod: Dict,
    config_maps: Mapping[str, Mapping[str, str]],
    hostname: str,
    own: Mapping[str, str],
    placed: Callable[[str], str],
) -> dict[str, str]:
    env: dict[str, str] = {}
    for item in container.get("env", ()):
        name, value = item["name"], item.get("value", "")
        if "valueFrom" in item:
            value = _value_from(item, pod, config_maps, hostname)
        in_pod = (names.RESULT_FILE, names.HEARTBEAT_FILE)
        env[name] = own[name] if name in own and value in in_pod else placed(_expand(value, env))
    if env.get("NCCL_SOCKET_IFNAME", "").startswith("^"):  # loopback is all that these processes share
        env["NCCL_SOCKET_IFNAME"] = LOOPBACK
    return env


def _value_from(item: Dict, pod: Dict, config_maps: Mapping[str, Mapping[str, str]], hostname: str) -> str:
    source = item["valueFrom"]
    if "configMapKeyRef" in source:
        reference = source["configMapKeyRef"]
        data = _config_map(str(reference.get("name")), config_maps, bool(reference.get("optional")))
        return str(data.get(reference.get("key"), ""))
    path = (source.get("fieldRef") or {}).get("fieldPath", "")
    here = {"spec.nodeName": hostname, "status.podIP": "127.0.0.1", "status.hostIP": "127.0.0.1"}
    metadata = {f"metadata.{key}": str(value) for key, value in pod["metadata"].items()}
    known = here | metadata
    if path in known:
        return known[path]
    raise SpecError(
        f"env {item['name']} takes {path or 'a value'} from the pod, which a run on this machine does not have."
    )


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Kubernetes' $(NAME); `$$` is a plain dollar sign, an unknown name stays as it is."""
    return REFERENCE.sub(lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), text)
