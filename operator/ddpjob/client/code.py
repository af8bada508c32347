"""A user's script or folder as a ConfigMap that a job mounts, so that no image has to be built."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, SpecError, child, children
from ddpjob.jobs.documents import is_job
from ddpjob.jobs.user_job import DDPJob

# Bytes of code in a manifest. A client-side `kubectl apply` keeps a copy of it in an annotation,
# which has at most 256 KiB. Otherwise a ConfigMap has at most 1 MiB.
PRINTED_BYTES = 200_000
SUBMITTED_BYTES = 2**20 - 2**14

# Folders that are no code, and a file that makes a folder a virtual environment.
LEFT_OUT = ("__pycache__", "node_modules")
ENVIRONMENT = "pyvenv.cfg"

# The characters of a key of a ConfigMap, and the slash.
KEY = re.compile(r"[-._a-zA-Z0-9/]+")

# A key of a ConfigMap has no `/`, so it is replaced in the paths of a folder.
SLASH = "__"


def read_code(script: Path, folder: Path | None, limit: int) -> dict[str, str]:
    """Return the text of a script, or of all files of the folder that it is in, by their paths.

    Hidden files and byte code are left out. Raises SpecError, also if there are more than `limit`
    bytes.
    """
    if folder is None:
        paths, root = [script], script.parent
    else:
        paths, root = sorted(_files(folder)), folder
        if script.resolve() not in [path.resolve() for path in paths]:
            raise SpecError(f"{script}: is not in the folder {folder}")
    # A folder may have data by mistake, so the sizes come before the texts.
    size = sum(path.stat().st_size for path in paths)
    if size > limit:
        raise SpecError(
            f"{folder or script}: has {size:,} bytes of code, and a ConfigMap takes {limit:,}; put "
            "data into a volume, or build an image"
        )
    for path in paths:
        if not KEY.fullmatch(path.relative_to(root).as_posix()):
            message = "rename it: a path of code has letters, digits, '-', '_', '.' and '/' only"
            raise SpecError(f"{path}: {message}")
    return {path.relative_to(root).as_posix(): _read_text(path) for path in paths}


def _files(folder: Path) -> Iterator[Path]:
    environments = {path.parent for path in folder.rglob(ENVIRONMENT)}
    for path in folder.rglob("*"):
        if environments.intersection(path.parents):
            continue
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") or part in LEFT_OUT for part in parts)
        if path.is_file() and not is_hidden and path.suffix != ".pyc":
            yield path


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise SpecError(f"{path}: cannot read the file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        message = f"{path}: is no text; leave it out of the folder, and put data into a volume"
        raise SpecError(message) from error


def with_code(
    job: DDPJob, code: Mapping[str, str], script: str, args: Sequence[str]
) -> tuple[dict[str, Any], DDPJob]:
    """Return the ConfigMap of the code, and the job that runs a script of it.

    `script` is the path of one of the files. The name of the ConfigMap has the hash of its content,
    and the ConfigMap is immutable: all attempts of a job run the same code. Raises SpecError.
    """
    keys = {path: path.replace("/", SLASH) for path in code}
    if len(set(keys.values())) < len(keys):
        raise SpecError(f"rename a file of the code: '/' and '{SLASH}' in its path look the same")
    data = {keys[path]: text for path, text in code.items()}
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:10]
    metadata = {"name": f"{job.name}-{digest}", "labels": {names.LABEL_CODE: job.name}}
    if job.namespace:
        metadata["namespace"] = job.namespace
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": data,
    }
    # Without items, each key is a file of the volume.
    source: dict[str, Any] = {"name": metadata["name"]}
    if any("/" in path for path in code):
        source["items"] = [{"key": key, "path": path} for path, key in keys.items()]
    volume = {"name": names.CODE_VOLUME, "configMap": source}
    mount = {"name": names.CODE_VOLUME, "mountPath": names.CODE_FOLDER, "readOnly": True}
    spec = {
        **job.spec,
        "args": [f"{names.CODE_FOLDER}/{script}", *args],
        "volumes": [*job.spec.get("volumes", []), volume],
        "volumeMounts": [*job.spec.get("volumeMounts", []), mount],
    }
    return config_map, replace(job, spec=spec)


def mounts_code(job: DDPJob) -> bool:
    """Return True if a job has the volume of its own code."""
    volumes = children(job.spec, "volumes")
    return any(one.get("name") == names.CODE_VOLUME and one.get("configMap") for one in volumes)


def owned_code(bodies: Sequence[Dict]) -> Iterator[dict[str, Any]]:
    """Yield the patch of each ConfigMap of code that makes its job in `bodies` its owner."""
    jobs = {_key(body, body["metadata"]["name"]): body for body in bodies if is_job(body)}
    for body in bodies:
        label = child(body["metadata"], "labels").get(names.LABEL_CODE)
        owner = jobs.get(_key(body, label))
        if body["kind"] == "ConfigMap" and owner:
            reference = {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"],
            }
            metadata = {key: body["metadata"][key] for key in ("name", "namespace")}
            yield {"metadata": {**metadata, "ownerReferences": [reference]}}


def _key(body: Dict, name: Any) -> tuple[Any, Any]:
    return body["metadata"].get("namespace"), name
