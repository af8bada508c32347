"""An overlay is merged into a pod as Kubernetes merges it."""

from copy import deepcopy

import pytest

from ddpjob.core.api.merge import MERGE_KEYS, merge

POD = {
    "containers": [
        {
            "name": "trainer",
            "image": "a",
            "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
    ],
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    "tolerations": [{"key": "a"}],
    "securityContext": {"fsGroup": 1000, "runAsUser": 1000},
}


def trainer(**fields):
    return {"containers": [{"name": "trainer", **fields}]}


def value_at(data, path):
    """Return the value at a path of keys and positions, or None if a key is absent."""
    for step in path:
        data = data.get(step) if isinstance(data, dict) else data[step]
    return data


# name: (overlay, path in the merged pod, expected value there)
OVERLAYS = {
    "a new field": ({"nodeName": "x"}, ("nodeName",), "x"),
    "a field of an object": (
        {"securityContext": {"fsGroup": 7}},
        ("securityContext",),
        {"fsGroup": 7, "runAsUser": 1000},
    ),
    "null removes a field of an object": (
        {"securityContext": {"fsGroup": None}},
        ("securityContext",),
        {"runAsUser": 1000},
    ),
    "null removes an object": ({"securityContext": None}, ("securityContext",), None),
    "a list without a merge key": (
        {"tolerations": [{"key": "b"}]},
        ("tolerations",),
        [{"key": "b"}],
    ),
    "a field of a container": (trainer(image="b"), ("containers", 0, "image"), "b"),
    "a variable that exists": (
        trainer(env=[{"name": "B", "value": "3"}]),
        ("containers", 0, "env", 1),
        {"name": "B", "value": "3"},
    ),
    "a new variable": (
        trainer(env=[{"name": "C", "value": "3"}]),
        ("containers", 0, "env", 2),
        {"name": "C", "value": "3"},
    ),
    "a mount at the same path": (
        trainer(volumeMounts=[{"name": "mine", "mountPath": "/dev/shm"}]),
        ("containers", 0, "volumeMounts"),
        [{"name": "mine", "mountPath": "/dev/shm"}],
    ),
    "a new container": (
        {"containers": [{"name": "mesh", "image": "m"}]},
        ("containers", 1),
        {"name": "mesh", "image": "m"},
    ),
    "a field of a volume's source": (
        {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]},
        ("volumes", 0, "emptyDir"),
        {"medium": "Memory", "sizeLimit": "1Gi"},
    ),
    "null in a new object": (
        {"dnsConfig": {"options": None, "searches": ["x"]}},
        ("dnsConfig",),
        {"searches": ["x"]},
    ),
}


@pytest.mark.parametrize(("overlay", "path", "expected"), OVERLAYS.values(), ids=OVERLAYS)
def test_an_overlay_sets(overlay, path, expected):
    assert value_at(merge(POD, overlay), path) == expected


def test_an_empty_overlay_changes_nothing():
    assert merge(POD, {}) == POD


def test_neither_argument_is_changed():
    base = deepcopy(POD)
    overlay = trainer(env=[{"name": "A", "value": "9"}], image=None)
    before = deepcopy(overlay)
    merge(base, overlay)
    assert base == POD
    assert overlay == before


@pytest.mark.parametrize("field", [field for field in MERGE_KEYS if field != "env"])
def test_lists_with_a_merge_key_are_merged_by_it(field):
    key = MERGE_KEYS[field]
    base = [{key: "a", "x": {"p": 1}}, {key: "b"}]
    overlay = [{key: "c"}, {key: "a", "x": {"q": 2}}]
    merged = [{key: "a", "x": {"p": 1, "q": 2}}, {key: "b"}, {key: "c"}]
    assert merge({field: base}, {field: overlay}) == {field: merged}


@pytest.mark.parametrize(
    ("field", "old", "new"), [("env", "value", "valueFrom"), ("volumes", "emptyDir", "hostPath")]
)
def test_a_new_source_removes_the_old_one(field, old, new):
    base = [{"name": "a", old: {}}]
    overlay = [{"name": "a", new: {}}]
    assert merge({field: base}, {field: overlay}) == {field: [{"name": "a", new: {}}]}


def test_a_variable_is_replaced_as_a_whole():
    # A variable with two sources would make the pod invalid.
    old = {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    new = {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}
    assert merge({"env": [old, {"name": "B"}]}, {"env": [new]}) == {"env": [{"name": "B"}, new]}


def test_ports_are_distinguished_by_their_number():
    merged = merge({"ports": [{"containerPort": 29400}]}, {"ports": [{"containerPort": 8080}]})
    assert [port["containerPort"] for port in merged["ports"]] == [29400, 8080]
