"""The documents of manifests, and changes of their fields."""

import sys

import pytest

from ddpjob.core.api.readers import SpecError
from ddpjob.jobs.documents import read_documents, require_jobs, set_fields

JOB = """
apiVersion: ddpjob.dev/v1alpha1
kind: DDPJob
metadata: {name: j}
spec: {image: i, args: [a], env: [{name: A, value: "1"}]}
"""
CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: c}
"""


def test_several_documents_and_lists_are_read():
    claims = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: ConfigMap}\n"
    kinds = [one["kind"] for one in read_documents(f"{JOB}---\n---\n{CLAIM}---\n{claims}")]
    assert kinds == ["DDPJob", "PersistentVolumeClaim", "ConfigMap"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("a: 1\nb: {c: 2,\n  c: 3}", 'at line 3, column 3: line 2 has the key "c" too; keep one'),
        ("just words", 'document 1: must be an object, got "just words"'),
        (JOB + "---\n{kind: X}", "document 2: apiVersion is required"),
        ("{apiVersion: v1}", "document 1: kind is required"),
        ("{apiVersion: v1, kind: List, items: [x]}", 'document 1: must be an object, got "x"'),
        ("[" * 2_000, "has too many lists or objects within each other"),
        ("a: &a [*a]", "document 1: has a value that JSON does not have: Circular reference"),
        ("a: !!set {b}", "document 1: has a value that JSON does not have: Object of type set"),
        ("a: .nan", "document 1: has a value that JSON does not have: Out of range float"),
        ('a: "\\ud800"', "document 1: has a value that JSON does not have: 'utf-8' codec"),
        (
            "{a: 1}\n---\n!!timestamp 2026-01-01: b",
            "document 2: has a value that JSON does not have: keys must be str, int, float, bool",
        ),
    ],
)
def test_what_is_no_manifest_is_refused(text, message):
    with pytest.raises(SpecError) as refused:
        read_documents(text)
    assert message in str(refused.value)


def test_a_key_overrides_that_of_a_merge():
    (document,) = read_documents("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\napiVersion: v1\nkind: X")
    assert document["b"] == {"x": 1, "y": 3}


def test_a_date_is_a_string_as_in_kubernetes():
    (document,) = read_documents("{apiVersion: v1, kind: X, day: 2026-13-45, at: 2026-01-01}")
    assert (document["day"], document["at"]) == ("2026-13-45", "2026-01-01")


@pytest.mark.parametrize("text", ["1:30", "-1:30", "190:20:30.15", "01:30:00"])
def test_a_time_of_day_is_a_string_as_in_kubernetes(text):
    (document,) = read_documents(f"{{apiVersion: v1, kind: X, at: {text}}}")
    assert document["at"] == text


def test_numbers_are_read_as_in_kubernetes():
    (document,) = read_documents("{apiVersion: v1, kind: X, a: 0x10, b: 010, c: 1_000, d: 2.5}")
    assert [document[key] for key in "abcd"] == [16, 8, 1000, 2.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "it is empty"), (CLAIM, "it has v1 PersistentVolumeClaim")],
)
def test_a_manifest_without_a_job_is_refused(text, message):
    with pytest.raises(SpecError, match=message):
        require_jobs(read_documents(text))


@pytest.mark.parametrize(
    ("setting", "place", "value"),
    [
        ("spec.nodes=4", ("spec", "nodes"), 4),
        ("spec.suspend=true", ("spec", "suspend"), True),
        ("spec.failurePolicy.maxRestarts=0", ("spec", "failurePolicy", "maxRestarts"), 0),
        ("spec.args.0=b=c", ("spec", "args", 0), "b=c"),
        ("spec.args.1=--x", ("spec", "args", 1), "--x"),
        ("spec.env.0.value='2'", ("spec", "env", 0, "value"), "2"),
        ("spec.env.1.name=B", ("spec", "env", 1, "name"), "B"),
        ("spec.args=[m, n]", ("spec", "args"), ["m", "n"]),
        ("spec.env.0.value=2026-01-01", ("spec", "env", 0, "value"), "2026-01-01"),
    ],
)
def test_a_field_is_set(setting, place, value):
    job = read_documents(JOB)[0]
    found = set_fields(job, [setting])
    for key in place:
        found = found[key]
    assert found == value
    assert job == read_documents(JOB)[0]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("spec.nodes", "must be PATH=VALUE"),
        ("=4", "must be PATH=VALUE"),
        ("spec.image.tag=1", 'spec.image: is "i", which has no fields'),
        ("spec.args.5=x", "must be an index from 0 to 1"),
        ("spec.args.x=x", "must be an index from 0 to 1"),
        ("spec.nodes=[", "is not YAML"),
        ("spec.args=!!set {a}", "spec.args: has a value that JSON does not have"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting, message):
    with pytest.raises(SpecError) as refused:
        set_fields(read_documents(JOB)[0], [setting])
    assert message in str(refused.value)


def test_the_depth_of_a_manifest_is_limited_whatever_the_interpreter_allows():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        with pytest.raises(SpecError, match="has too many lists or objects"):
            read_documents("[" * 20_000)
        deep = JOB + "extra: " + "[" * 90 + "]" * 90
        assert len(read_documents(deep)) == 1
    finally:
        sys.setrecursionlimit(limit)
