"""The ConfigMaps of a local run: those in the same file as the job, and files of this machine."""

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddpjob.core.api.readers import (
    Dict,
    SpecError,
    child,
    children,
    quoted,
    refuse,
    require_object,
    require_objects,
    require_string,
)

# The files of ConfigMaps, by the ConfigMap's name. Those of binaryData are bytes.
Files = Mapping[str, str | bytes]
ConfigMaps = Mapping[str, Files]


def read_config_maps(documents: Iterable[Dict]) -> ConfigMaps:
    """Return the ConfigMaps among the documents of a file. Raises SpecError."""
    found = {}
    for document in documents:
        if document.get("kind") == "ConfigMap":
            name = require_string(
                child(document, "metadata").get("name"), "ConfigMap metadata.name"
            )
            found[name] = _read_files(name, document)
    return found


def _read_files(name: str, config_map: Dict) -> Files:
    files: dict[str, str | bytes] = {}
    files |= _read_data(config_map.get("data"), f"ConfigMap {name} data")
    packed = _read_data(config_map.get("binaryData"), f"ConfigMap {name} binaryData")
    return files | {key: _decode(name, key, text) for key, text in packed.items()}


def texts_of(files: Files) -> dict[str, str]:
    """Return the files usable as values of variables. Bytes are not."""
    return {key: content for key, content in files.items() if isinstance(content, str)}


def _decode(name: str, key: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise SpecError(f"ConfigMap {name} binaryData.{key}: is not base64: {error}") from error


def read_files(place: Path) -> Files:
    """Return the content of a file, or of each file in a folder, by its name. Raises SpecError.

    As with kubectl, folders in the folder are left out, and so are files with a dot at the start of
    their names.
    """
    paths = [place]
    if place.is_dir():
        files = (path for path in place.iterdir() if path.is_file())
        paths = sorted(path for path in files if not path.name.startswith("."))
    try:
        return {path.name: _text_or_bytes(path.read_bytes()) for path in paths}
    except OSError as error:
        raise SpecError(f"cannot read {error.filename}: {error.strerror}") from error


def _text_or_bytes(content: bytes) -> str | bytes:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


def _read_data(value: Any, where: str) -> Mapping[str, str]:
    data = require_object(value, where)
    for key, text in data.items():
        if not isinstance(text, str):
            raise refuse(f"{where}.{key}", "a string (put numbers in quotes)", text)
    return {str(key): text for key, text in data.items()}


def find_config_map(reference: Dict, config_maps: ConfigMaps, where: str) -> Files:
    """Return the data of the ConfigMap named by `reference`.

    A missing optional ConfigMap is empty. Raises SpecError for any other missing one.
    """
    name = require_string(reference.get("name"), f"{where}.name")
    if name not in config_maps and not reference.get("optional"):
        raise SpecError(
            f"{where}: ConfigMap {quoted(name)} not found in the manifest; add it to the same "
            f"file, after a line ---, or give its files by --config-map {name}=PATH"
        )
    return config_maps.get(name, {})


def volume_files(volume: Dict, config_maps: ConfigMaps) -> dict[str, str | bytes]:
    """Return the content of a volume's files by their path in the volume.

    The volume is one ConfigMap, or several of them are projected into it.
    """
    sources = [volume, *children(child(volume, "projected"), "sources")]
    files: dict[str, str | bytes] = {}
    for source in sources:
        # A projected volume may also have sources of other kinds. notes.py reports those.
        if source.get("configMap"):
            where = f"volume {volume.get('name')}: configMap"
            reference = require_object(source["configMap"], where)
            files |= _projected_files(reference, config_maps, where)
    return files


def _projected_files(reference: Dict, config_maps: ConfigMaps, where: str) -> Files:
    data = find_config_map(reference, config_maps, where)
    items = require_objects(reference.get("items"), f"{where}.items")
    # Without items, each key is a file.
    if not items:
        return dict(data)
    files: dict[str, str | bytes] = {}
    for item in items:
        key = require_string(item.get("key"), f"{where}.items[].key")
        path = require_string(item.get("path"), f"{where}.items[].path")
        # A missing key is allowed if the ConfigMap is optional.
        if key in data:
            files[path] = data[key]
    return files
