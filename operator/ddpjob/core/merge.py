"""Kubernetes' strategic merge of a pod overlay: objects by field, lists by their merge key, null removes."""

from collections.abc import Mapping
from typing import Any

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
"""patchMergeKey of core/v1's pod types; every other list is replaced whole, as kubectl does."""


RETAIN_KEYS = ("volumes",)
"""Lists whose items have one source out of many (patchStrategy retainKeys): a new source drops the old one."""


def merge(base: Any, overlay: Any, field: str = "") -> Any:
    """`base` with `overlay` on top; neither is changed."""
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        merged = {
            key: merge(value, overlay[key], key) if key in overlay else value
            for key, value in base.items()
        }
        merged.update({key: merge({}, value) for key, value in overlay.items() if key not in base})
        return {key: value for key, value in merged.items() if value is not None}
    if isinstance(base, list) and isinstance(overlay, list) and field == "env":
        return replace_by("name", base, overlay)
    if isinstance(base, list) and isinstance(overlay, list) and field in MERGE_KEYS:
        return merge_by(MERGE_KEYS[field], base, overlay, retain_keys=field in RETAIN_KEYS)
    return overlay


def merge_by(
    key: str, base: list[Any], overlay: list[Any], *, retain_keys: bool = False
) -> list[Any]:
    """Items of `overlay` merged into those of `base` with the same `key`; new ones at the end.

    With `retain_keys`, an item of `base` keeps only the fields that its overlay has too.
    """
    by_key = {_key(item, key): item for item in overlay}
    known = {_key(item, key) for item in base}
    merged = [
        _together(item, by_key[_key(item, key)], retain_keys) if _key(item, key) in by_key else item
        for item in base
    ]
    return [*merged, *(item for k, item in by_key.items() if k not in known)]


def replace_by(key: str, base: list[Any], overlay: list[Any]) -> list[Any]:
    """Items of `base` that `overlay` has no namesake for, then those of `overlay`, whole.

    For variables: a `value` and a `valueFrom`, or two sources in one `valueFrom`, would make the pod invalid.
    """
    theirs = {_key(item, key) for item in overlay}
    return [*(item for item in base if _key(item, key) not in theirs), *overlay]


def _together(old: Any, new: Any, retain_keys: bool) -> Any:
    if retain_keys and isinstance(old, Mapping) and isinstance(new, Mapping):
        old = {field: value for field, value in old.items() if field in new}
    return merge(old, new)


def _key(item: Any, key: str) -> str:
    return str(item.get(key)) if isinstance(item, Mapping) else str(item)
