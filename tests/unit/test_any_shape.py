"""Any object that an API server can hold is read and decided on without an exception."""

from contextlib import suppress

import pytest
from builders.containers import failed, running
from builders.jobs import FULL_STATUS, a_job, a_manifest, a_spec
from builders.messages import torchrun_summary
from builders.pods import a_pod, read_pods
from builders.times import NOW, at
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpjob.core.api.job import Job
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.spec import MAX_NODES, known_fields
from ddpjob.core.api.status import Status
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.nodes import read_node
from ddpjob.core.observe.observation import NodeHealth, observe
from ddpjob.core.observe.pods import read_pod
from ddpjob.core.observe.termination import read_result
from ddpjob.core.observe.torchrun_log import is_follower, parse_summary

words = st.sampled_from(
    [
        "phase",
        "state",
        "terminated",
        "running",
        "waiting",
        "containerStatuses",
        "name",
        "trainer",
        "exitCode",
        "Failed",
        "Running",
        "Succeeded",
        "conditions",
        "type",
        "status",
        "True",
        "DisruptionTarget",
        "finishedAt",
        "reason",
        "message",
        "PodScheduled",
        "lastTransitionTime",
        "2026-11-21T12:00:00Z",
        "0001-01-01T00:00:00+14:00",
    ]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | words
keys = words | st.text(max_size=4)


def containers_of(values):
    return st.lists(values, max_size=4) | st.dictionaries(keys, values, max_size=5)


json = st.recursive(scalars, containers_of, max_leaves=6)
trainers = st.lists(st.fixed_dictionaries({"name": st.just("trainer"), "state": json}), max_size=1)
pod_statuses = st.fixed_dictionaries(
    {}, optional={"phase": words, "conditions": json, "containerStatuses": trainers}
)
TERMINATED_WITHOUT_VALUE = {
    "phase": "Failed",
    "containerStatuses": [{"name": "trainer", "state": {"terminated": None}}],
}


@given(pod_statuses, json)
@example(TERMINATED_WITHOUT_VALUE, {})
def test_no_pod_makes_decide_raise(status, value):
    pod = {**a_pod(0), "status": status}
    deleted = {**a_pod(1), "spec": value}
    deleted["metadata"] |= {"deletionTimestamp": value, "deletionGracePeriodSeconds": value}
    started = a_manifest(status={"attempt": {"number": 0}, "nodes": {"desired": 2}})
    for job in (a_job(), Job.from_dict(started)):
        decide(observe(job, read_pods(pod, deleted)), NOW)


@given(json, json)
def test_no_spec_of_a_pod_makes_decide_raise(tolerations, volumes):
    pod = a_pod(0, running(), tolerations=tolerations, volumes=volumes)
    decide(observe(a_job(), read_pods(pod)), NOW)


@given(json)
def test_no_metadata_makes_reading_a_pod_raise(metadata):
    read_pod({"metadata": metadata})
    read_pod({"metadata": {"labels": metadata}})
    owner_of({"metadata": metadata})
    owner_of({"metadata": {"ownerReferences": metadata}})


@given(json, json)
def test_no_job_makes_decide_raise(status, spec):
    job = Job.from_dict({"metadata": {"uid": "x"}, "status": status, "spec": spec})
    decide(observe(job, read_pods(a_pod(0), a_pod(1, attempt=1))), NOW)


@given(json, json)
def test_no_node_makes_reading_it_raise(spec, status):
    node = read_node({"metadata": {"name": "node-0"}, "spec": spec, "status": status})
    assert node.health in NodeHealth


FULL = FULL_STATUS.to_dict()
spec_fields = st.sampled_from(known_fields()["spec"])
inner_fields = st.sampled_from(
    sorted({key for fields in known_fields().values() for key in fields})
)
values = st.recursive(
    scalars, lambda inner: st.dictionaries(inner_fields, inner, max_size=3) | json
)


@given(st.dictionaries(spec_fields, values, max_size=5))
def test_no_field_of_a_spec_makes_reading_raise(fields):
    with suppress(SpecError):
        Spec.from_user(a_spec(**fields))


def objects_like(manifest):
    """Return a strategy for objects with the fields of another, or with any value in them."""
    fields = {}
    for name, value in manifest.items():
        fields[name] = json | far_values
        if isinstance(value, dict):
            fields[name] |= objects_like(value)
        elif isinstance(value, list) and isinstance(value[0], dict):
            fields[name] |= st.lists(objects_like(value[0]) | json, max_size=3)
        else:
            fields[name] |= st.just(value)
    return st.fixed_dictionaries({}, optional=fields)


# Values of the right type for a field, although no operator writes them.
FAR_TIMES = ["0001-01-01T00:00:00Z", "1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z"]
EXTREMES = (*FAR_TIMES, 2**63 - 1, -(2**63), 0, True, "", [], {})
far_values = st.sampled_from(EXTREMES)


@settings(max_examples=300)
@given(objects_like(FULL), st.integers(-1, 3), st.booleans())
def test_no_status_makes_decide_raise(status, attempt, latched):
    running = {
        "attempt": {"number": attempt},
        "backoff": {"count": 1, "until": None},
        "operator": {"attempt": {"latched": latched}},
    }
    for one in (status, {**status, **running}, {**status, "conditions": []}):
        job = Job.from_dict(a_manifest(status=one))
        plan = decide(observe(job, read_pods(a_pod(0), a_pod(1, attempt=1))), at(5))
        assert Status.from_dict(plan.status.to_dict()).to_dict() == plan.status.to_dict()


@given(json)
def test_no_value_makes_reading_a_status_raise(value):
    Status.from_dict(value).to_dict()
    Status.from_dict({"operator": value}).to_dict()


LIMITS = {
    "activeDeadlineSeconds": 1,
    "startupDeadlineSeconds": 2**31 - 1,
    "ttlSecondsAfterFinished": 1,
}
LISTED = [
    {"failedNodes": [{"name": "node-0", "failures": 2**63 - 1, "time": time}]}
    | {
        "operator": {
            "unreachableNodes": [{"name": "node-0", "since": time}],
            "attempt": {"yielding": {"to": "ml/older", "until": time}},
        }
    }
    | {"backoff": {"count": 2**63 - 1, "until": time}}
    for time in FAR_TIMES
]


# The pods of a gang that has failed.
OF_GANG = read_pods(a_pod(0, running()), a_pod(1, failed("x"), attempt=2))


def decide_on_status(status):
    job = Job.from_dict(a_manifest(status=status, **LIMITS))
    for pods in (OF_GANG, OF_GANG[1:]):
        plan = decide(observe(job, pods, nodes={}, older_gang="ml/older"), NOW)
        plan.status.to_dict()


def paths_of(manifest, path=()):
    """Yield the path of each field of an object, and of the objects in it."""
    for name, value in manifest.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from paths_of(value, (*path, name))


def with_value(manifest, path, value):
    """Return an object with another value at a path."""
    name, *others = path
    if others:
        value = with_value(manifest.get(name) or {}, others, value)
    return {**manifest, name: value}


def without(manifest, *paths):
    found = manifest
    for path in paths:
        found = with_value(found, path, None)
    return found


NOT_STARTED = (("attempt", "runningTime"), ("operator", "attempt", "yielding"), ("backoff",))


@pytest.mark.parametrize("path", sorted(paths_of(FULL)), ids=".".join)
def test_no_extreme_value_makes_decide_raise(path):
    two_nodes = {**FULL, "nodes": {"desired": 2}}
    unfinished = {**two_nodes, "conditions": []}
    for base in (two_nodes, unfinished, without(unfinished, *NOT_STARTED)):
        for value in EXTREMES:
            decide_on_status(with_value(base, path, value))


@pytest.mark.parametrize("listed", LISTED, ids=FAR_TIMES)
def test_no_far_time_in_a_list_makes_decide_raise(listed):
    status = {**FULL, **listed, "nodes": {"desired": 2}}
    decide_on_status(status)
    decide_on_status({**status, "conditions": []})


@given(st.sampled_from(FAR_TIMES), st.sampled_from(FAR_TIMES), st.booleans())
def test_no_time_of_a_pod_makes_decide_raise(finished, transition, summary):
    status = failed(torchrun_summary(rank=0) if summary else "")
    status["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = finished
    target = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": transition}
    disrupted = failed(conditions=[target])
    for pods in ([a_pod(0, status)], [a_pod(0, status), a_pod(1, disrupted)]):
        job = Job.from_dict(a_manifest(status={"attempt": {"number": 0}, "nodes": {"desired": 2}}))
        decide(observe(job, read_pods(*pods)), NOW).status.to_dict()


# Possible messages of a process


@pytest.mark.parametrize("depth", [500, 900, 985, 990, 1000, 2000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_no_depth_of_a_result_makes_reading_it_raise(depth, opening, closing):
    read_result(f'{{"deep": {opening * depth}1{closing * depth}}}')


@given(st.text(max_size=300), json)
def test_no_message_makes_reading_it_raise(text, value):
    for message in (text, repr(value), torchrun_summary(error=text)):
        read_result(message)
        parse_summary(message)
        is_follower(message)


@pytest.mark.parametrize("number", ["1" * 4000, "1e999", "-1e-999", "NaN", "Infinity"])
def test_any_number_is_a_result(number):
    assert set(read_result(f'{{"loss": {number}}}')) == {"loss"}


def test_a_result_can_be_sent_to_the_api_server():
    # A JSON string can have half a character. This is not UTF-8. The API server would replace it,
    # and the operator would write its own version again at each look.
    for message in ('{"a": "\\ud83d"}', '{"\\ud83d": "a"}', '{"a": ["\\ud83d"]}'):
        for key, value in read_result(message).items():
            (key + value).encode()


def test_a_status_has_no_more_nodes_than_a_job_can_have():
    # The operator lists the missing indices at each look.
    job = Job.from_dict(a_manifest(status={"attempt": {"number": 0}, "nodes": {"desired": 10**9}}))
    assert job.status.pods.desired <= MAX_NODES
