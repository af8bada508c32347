"""Kubernetes' strategic merge of an overlay into a pod.

Objects are merged by field, lists by their merge key, and null removes a field.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddpjob.core.api.readers import normal_path

# `patchMergeKey` of the pod types in core/v1. Every other list is replaced as a whole, as kubectl
# does.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
}

# Lists of items with one source out of many (`patchStrategy: retainKeys`). A new source removes the
# old one.
RETAIN_KEYS = ("volumes",)


def merge(base: Any, overlay: Any, field: str = "") -> Any:
    """Return `base` with `overlay` on top. Neither is changed. `field` is their own key."""
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        return _merge_objects(base, overlay)
    if isinstance(base, list) and isinstance(overlay, list):
        return _merge_lists(base, overlay, field)
    return overlay


def _merge_lists(base: list[Any], overlay: list[Any], field: str) -> list[Any]:
    if field == "env":
        return replace_by("name", base, overlay)
    if field not in MERGE_KEYS:
        return overlay
    return merge_by(
        MERGE_KEYS[field],
        base,
        overlay,
        retain_keys=field in RETAIN_KEYS,
    )


def _merge_objects(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        if key in base:
            merged[key] = merge(base[key], value, key)
        else:
            # Merging into an empty object removes nulls below a new key too.
            merged[key] = merge({}, value)
    return {key: value for key, value in merged.items() if value is not None}


def merge_by(
    key: str,
    base: Sequence[Any],
    overlay: Sequence[Any],
    *,
    retain_keys: bool = False,
) -> list[Any]:
    """Merge each item of `overlay` into the item of `base` with the same `key`.

    New items come last. With `retain_keys`, an item of `base` keeps only the fields that its
    overlay has too.
    """
    overlays = {_key(item, key): item for item in overlay}
    known = {_key(item, key) for item in base}
    merged = []
    for item in base:
        value = _key(item, key)
        if value in overlays:
            item = _merge_item(item, overlays[value], retain_keys)
        merged.append(item)
    for value, item in overlays.items():
        if value not in known:
            merged.append(item)
    return merged


def replace_by(key: str, base: Sequence[Any], overlay: Sequence[Any]) -> list[Any]:
    """Return the items of `base` whose `key` is not in `overlay`, then those of `overlay`.

    Variables are replaced as a whole: a `value` beside a `valueFrom`, or two sources in one
    `valueFrom`, would make the pod invalid.
    """
    replaced = {_key(item, key) for item in overlay}
    kept = [item for item in base if _key(item, key) not in replaced]
    return [*kept, *overlay]


def _merge_item(old: Any, new: Any, retain_keys: bool) -> Any:
    if retain_keys and isinstance(old, Mapping) and isinstance(new, Mapping):
        old = {field: value for field, value in old.items() if field in new}
    return merge(old, new)


def _key(item: Any, key: str) -> str:
    value = item.get(key) if isinstance(item, Mapping) else item
    return str(value)


def one_for_each_path(mounts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last mount at each path, so a user's comes instead of the operator's."""
    by_path = {normal_path(str(mount.get("mountPath"))): mount for mount in mounts}
    return list(by_path.values())
