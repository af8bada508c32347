"""A rendered pod as a process of this machine: its command, environment and folders. Decides nothing, starts nothing."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob.core import names
from ddpjob.core.job import Job
from ddpjob.core.names import TRAINER
from ddpjob.core.readers import SpecError

Dict = Mapping[str, Any]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class LocalAddresses:
    """Every agent is at 127.0.0.1, spelt so that the spellings sort by index: c10d gives ranks by that order.

    `127.0.0.1 < 127.0.00.1 < 127.0.000.1` as texts, and all are the same address to getaddrinfo on
    Linux and macOS, which (unlike 127.0.0.2) needs no second loopback address. Node 0, whose
    spelling becomes MASTER_ADDR, has the plain one.
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
    """A process to start: `folders` have to exist, `files` to be written before. `cwd` None: the current folder."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    result: Path
    folders: tuple[Path, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    cwd: Path | None = None


def translate(
    pod: Dict, folders: Folders, config_maps: Mapping[str, Mapping[str, str]], hostname: str
) -> Command:
    """The trainer's container of a rendered pod; raises SpecError for a reference that nothing here answers."""
    container = next(c for c in pod["spec"]["containers"] if c["name"] == TRAINER)
    name = pod["metadata"]["name"]
    sources = {_text(v, "name", "A volume"): v for v in pod["spec"].get("volumes") or ()}
    mounts, files = _mounts(container, sources, folders, name, config_maps)
    placed = _placer(mounts)
    own = {
        "DDP_RESULT_FILE": str(folders.pod(name) / "result.json"),
        "DDP_HEARTBEAT_FILE": str(folders.pod(name) / "heartbeat.json"),
    }
    base = {key: placed(value) for key, value in _env_from(container, config_maps).items()}
    env = {
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        **_env(container, pod, config_maps, hostname, own, placed, base),
    }
    words = [*container["command"], *container["args"]]
    cwd = _working_folder(container.get("workingDir"), placed)
    wanted = (folders.pod(name), *mounts.values(), *([cwd] if cwd else ()))
    return Command(
        argv=tuple(_expand(placed(word), env) for word in words),
        env=env,
        result=Path(env["DDP_RESULT_FILE"]),
        folders=tuple(folder for folder in dict.fromkeys(wanted) if folder not in files),
        files=files,
        cwd=cwd,
    )


def _text(item: Dict, key: str, what: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise SpecError(f"{what} needs a {key}, a text that is not empty; it is {dict(item)!r}.")
    return value


def _working_folder(given: str | None, placed: Callable[[str], str]) -> Path | None:
    """The container's workingDir where this machine has it: below a mount, or as a folder of its own."""
    if not given:
        return None
    folder = placed(given)
    return Path(folder) if folder != given or Path(folder).is_dir() else None


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
    for mount in container.get("volumeMounts") or ():
        path, volume = (
            _text(mount, "mountPath", "A volumeMount").rstrip("/"),
            sources.get(str(mount.get("name"))),
        )
        if volume is None:
            raise SpecError(
                f"volumeMounts names the volume {mount.get('name')!r}, which volumes does not define."
            )
        if path == "/dev/shm":
            continue
        if not path.startswith("/") or "subPathExpr" in mount:
            raise SpecError(
                f"The volumeMount at {mount['mountPath']} cannot be had here: a mountPath must be an absolute path "
                "other than /, and a folder below the volume be given as subPath, not subPathExpr."
            )
        folder = _folder(volume, folders, pod)
        files |= {
            _below(folder, name): text for name, text in _config_files(volume, config_maps).items()
        }
        mounts[path] = _below(folder, mount["subPath"]) if mount.get("subPath") else folder
        if "hostPath" in volume and not mounts[path].exists():
            raise SpecError(
                f"The hostPath {mounts[path]} of the volume {mount['name']} is not on this machine."
            )
    return mounts, files


def _folder(volume: Dict, folders: Folders, pod: str) -> Path:
    if "persistentVolumeClaim" in volume:
        return folders.claim(
            _text(volume["persistentVolumeClaim"], "claimName", f"The volume {volume['name']}")
        )
    if "hostPath" in volume:
        return Path(_text(volume["hostPath"], "path", f"hostPath of the volume {volume['name']}"))
    return folders.pod(pod) / "volumes" / str(volume["name"])


def _below(folder: Path, relative: str) -> Path:
    if Path(relative).is_absolute() or ".." in Path(relative).parts:
        raise SpecError(f"A path in a volume must be relative and without '..', not {relative!r}.")
    return folder / relative


def _config_files(volume: Dict, config_maps: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """Texts by their path in the volume, of the one ConfigMap or of those that are projected into it."""
    projected = (volume.get("projected") or {}).get("sources") or ()
    files: dict[str, str] = {}
    for source in (s["configMap"] for s in (volume, *projected) if s.get("configMap")):
        data = _config_map(str(source.get("name")), config_maps, bool(source.get("optional")))
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        files |= {item["path"]: data[item["key"]] for item in items if item["key"] in data}
    return files


def _config_map(
    name: str, config_maps: Mapping[str, Mapping[str, str]], optional: bool
) -> Mapping[str, str]:
    if name not in config_maps and not optional:
        raise SpecError(
            f"The ConfigMap {name!r} is not in the manifest; add it to the same file, behind a line `---`."
        )
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
    for source in container.get("envFrom") or ():
        reference = source.get("configMapRef") or {}
        data = _config_map(str(reference.get("name")), config_maps, bool(reference.get("optional")))
        found |= {(source.get("prefix") or "") + key: value for key, value in data.items()}
    return found


def _env(
    container: Dict,
    pod: Dict,
    config_maps: Mapping[str, Mapping[str, str]],
    hostname: str,
    own: Mapping[str, str],
    placed: Callable[[str], str],
    base: Mapping[str, str],
) -> dict[str, str]:
    """The container's variables, over those of `base`. A reference is expanded to what stands there, placed already."""
    env = dict(base)
    for item in container.get("env") or ():
        name, value = _text(item, "name", "An env entry"), item.get("value")
        if not isinstance(value, str | None):
            raise SpecError(
                f"The value of env {name} must be a text (numbers in quotes), not {value!r}."
            )
        in_pod = (names.RESULT_FILE, names.HEARTBEAT_FILE)
        if name in own and value in in_pod:
            env[name] = own[name]
        elif item.get("valueFrom"):
            env[name] = placed(_value_from(item, pod, config_maps, hostname))
        else:
            env[name] = _expand(placed(value or ""), env)
    if env.get("NCCL_SOCKET_IFNAME", "").startswith(
        "^"
    ):  # loopback is all that these processes share
        env["NCCL_SOCKET_IFNAME"] = LOOPBACK
    return env


def _value_from(
    item: Dict, pod: Dict, config_maps: Mapping[str, Mapping[str, str]], hostname: str
) -> str:
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
