"""An overlay is merged by Kubernetes' own keys."""

from copy import deepcopy

import pytest

from ddpjob.core.merge import MERGE_KEYS, merge

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


@pytest.mark.parametrize(
    ("overlay", "path", "expected"),
    [
        ({"nodeName": "x"}, ("nodeName",), "x"),
        (
            {"securityContext": {"fsGroup": 7}},
            ("securityContext",),
            {"fsGroup": 7, "runAsUser": 1000},
        ),
        ({"securityContext": {"fsGroup": None}}, ("securityContext",), {"runAsUser": 1000}),
        ({"securityContext": None}, ("securityContext",), None),
        ({"tolerations": [{"key": "b"}]}, ("tolerations",), [{"key": "b"}]),
        (trainer(image="b"), ("containers", 0, "image"), "b"),
        (
            trainer(env=[{"name": "B", "value": "3"}]),
            ("containers", 0, "env", 1),
            {"name": "B", "value": "3"},
        ),
        (
            trainer(env=[{"name": "C", "value": "3"}]),
            ("containers", 0, "env", 2),
            {"name": "C", "value": "3"},
        ),
        (
            trainer(volumeMounts=[{"name": "mine", "mountPath": "/dev/shm"}]),
            ("containers", 0, "volumeMounts"),
            [{"name": "mine", "mountPath": "/dev/shm"}],
        ),
        (
            {"containers": [{"name": "mesh", "image": "m"}]},
            ("containers", 1),
            {"name": "mesh", "image": "m"},
        ),
        (
            {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]},
            ("volumes", 0, "emptyDir"),
            {"medium": "Memory", "sizeLimit": "1Gi"},
        ),
        ({"dnsConfig": {"options": None, "searches": ["x"]}}, ("dnsConfig",), {"searches": ["x"]}),
    ],
)
def test_an_overlay_reaches(overlay, path, expected):
    value = merge(POD, overlay)
    for step in path:
        value = value.get(step) if isinstance(value, dict) else value[step]
    assert value == expected


def test_nothing_on_top_changes_nothing():
    assert merge(POD, {}) == POD


def test_neither_side_is_changed():
    base, overlay = deepcopy(POD), trainer(env=[{"name": "A", "value": "9"}], image=None)
    before = deepcopy(overlay)
    merge(base, overlay)
    assert base == POD
    assert overlay == before


@pytest.mark.parametrize("field", [field for field in MERGE_KEYS if field != "env"])
def test_lists_with_a_key_are_merged_by_it(field):
    key = MERGE_KEYS[field]
    base, overlay = [{key: "a", "x": {"p": 1}}, {key: "b"}], [{key: "c"}, {key: "a", "x": {"q": 2}}]
    merged = [{key: "a", "x": {"p": 1, "q": 2}}, {key: "b"}, {key: "c"}]
    assert merge({field: base}, {field: overlay}) == {field: merged}


@pytest.mark.parametrize(
    ("field", "old", "new"), [("env", "value", "valueFrom"), ("volumes", "emptyDir", "hostPath")]
)
def test_a_new_source_drops_the_old_one(field, old, new):
    base, overlay = [{"name": "a", old: {}}], [{"name": "a", new: {}}]
    assert merge({field: base}, {field: overlay}) == {field: [{"name": "a", new: {}}]}


def test_a_variable_replaces_its_namesake_whole_since_two_sources_of_one_value_are_invalid():
    old = {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    new = {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}
    assert merge({"env": [old, {"name": "B"}]}, {"env": [new]}) == {"env": [{"name": "B"}, new]}


def test_ports_are_told_apart_by_their_number():
    merged = merge({"ports": [{"containerPort": 29400}]}, {"ports": [{"containerPort": 8080}]})
    assert [port["containerPort"] for port in merged["ports"]] == [29400, 8080]
