"""A spec is read, or refused with a sentence that says what to do."""

import pytest
from builders import NOW, a_manifest, a_spec, at
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.core import names
from ddpjob.core.job import Job
from ddpjob.core.pod_fields import OWNED_POD_FIELDS, OWNED_TRAINER_FIELDS, POD_FIELDS
from ddpjob.core.readers import SpecError
from ddpjob.core.spec import Checkpoint, FailurePolicy, Spec
from ddpjob.core.status import Backoff, PodCounts, Status, set_condition, stamp_conditions
from ddpjob.core.times import format_time, parse_time


def trainer(**fields):
    return {"spec": {"containers": [{"name": "trainer", **fields}]}}


# --- what is refused, and in which words

REFUSED = {
    "no object": ([], "spec must be an object, not []."),
    "no image": ({"image": None}, "spec.image must be a text that is not empty, not None."),
    "empty image": ({"image": ""}, "spec.image must be a text that is not empty, not ''."),
    "no args": (
        {"args": []},
        "spec.args must be a list of at least one text (numbers in quotes), not [].",
    ),
    "args as text": ({"args": "x.py"}, "spec.args must be a list of at least one text"),
    "number in args": (
        {"args": ["x.py", 2]},
        "spec.args must be a list of at least one text (numbers in quotes)",
    ),
    "no node": ({"nodes": 0}, "spec.nodes must be a whole number from 1 to 1000, not 0."),
    "too many nodes": (
        {"nodes": 1001},
        "spec.nodes must be a whole number from 1 to 1000, not 1001.",
    ),
    "nodes as text": ({"nodes": "2"}, "spec.nodes must be a whole number from 1 to 1000, not '2'."),
    "nodes as truth": (
        {"nodes": True},
        "spec.nodes must be a whole number from 1 to 1000, not True.",
    ),
    "processes": (
        {"nprocPerNode": 257},
        "spec.nprocPerNode (or auto) must be a whole number from 1 to 256, not 257.",
    ),
    "gpu processes": (
        {"nprocPerNode": "gpu"},
        "spec.nprocPerNode (or auto) must be a whole number",
    ),
    "processes across trn1 nodes": (
        {"accelerator": "trn1.32xlarge", "nodes": 2, "nprocPerNode": 8},
        "spec.nprocPerNode with accelerator trn1.32xlarge on each of several nodes must be 32 or auto, not 8.",
    ),
    "processes of a trn1 node": (
        {"accelerator": "trn1.32xlarge", "nodes": 1, "nprocPerNode": 16},
        "spec.nprocPerNode with accelerator trn1.32xlarge on one node must be 1, 2, 8, 32 or auto, not 16.",
    ),
    "several small trn1 nodes": (
        {"accelerator": "trn1.2xlarge", "nodes": 2},
        "spec.nodes must be 1 with accelerator trn1.2xlarge: such a node has no EFA to reach another one.",
    ),
    "profile": (
        {"accelerator": "tpu"},
        "spec.accelerator 'tpu' is no profile; there are cpu, gpu, trn1.32xlarge, trn1.2xlarge.",
    ),
    "no profile": ({"accelerator": ""}, "spec.accelerator must be a text that is not empty"),
    "a field to come": (
        {"suspend": True},
        "spec has no field 'suspend'; it has accelerator, affinity, args,",
    ),
    "a typo": ({"nodez": 2}, "spec has no field 'nodez'"),
    "torchrun": (
        {"torchrun": {"maxRestarts": 1}},
        "spec.torchrun has no field 'maxRestarts'; it has command, rdzvConf.",
    ),
    "torchrun's own flag first": (
        {"args": ["--standalone", "train.py"]},
        "spec.args begins with --standalone, a flag of torchrun that the operator sets; begin with the script or -m",
    ),
    "torchrun's flag with a value": (
        {"args": ["--rdzv_endpoint=x", "train.py"]},
        "spec.args begins with --rdzv_endpoint=x,",
    ),
    "a second mount at the checkpoints": (
        {
            "checkpoint": {"claimName": "c"},
            "volumeMounts": [{"name": "v", "mountPath": "/checkpoints/"}],
        },
        "spec.volumeMounts mounts /checkpoints/, where spec.checkpoint mounts its claim already",
    ),
    "command": (
        {"torchrun": {"command": []}},
        "spec.torchrun.command must be a list of at least one text",
    ),
    "torchrun as text": (
        {"torchrun": "torchrun"},
        "spec.torchrun must be an object, not 'torchrun'.",
    ),
    "is_host": (
        {"torchrun": {"rdzvConf": {"is_host": "true"}}},
        "spec.torchrun.rdzvConf.is_host belongs to the operator: node 0 is the host; leave it out.",
    ),
    "is_host in disguise": (
        {"torchrun": {"rdzvConf": {"join_timeout": "60,is_host=false"}}},
        "spec.torchrun.rdzvConf.join_timeout must be a number or a text without comma, '=' and space",
    ),
    "checkpoint without claim": (
        {"checkpoint": {"mountPath": "/x"}},
        "spec.checkpoint.claimName must be a text that is not empty, not None.",
    ),
    "empty checkpoint": (
        {"checkpoint": {}},
        "spec.checkpoint.claimName must be a text that is not empty, not None.",
    ),
    "checkpoint field": (
        {"checkpoint": {"claim": "x"}},
        "spec.checkpoint has no field 'claim'; it has claimName, mountPath.",
    ),
    "maxRestarts": (
        {"failurePolicy": {"maxRestarts": -1}},
        "spec.failurePolicy.maxRestarts must be a whole number",
    ),
    "maxDisruptions": (
        {"failurePolicy": {"maxDisruptions": "many"}},
        "spec.failurePolicy.maxDisruptions must be a whole number",
    ),
    "policy field": (
        {"failurePolicy": {"windowSeconds": 1}},
        "spec.failurePolicy has no field 'windowSeconds'; it has maxDisruptions, maxRestarts.",
    ),
    "env as object": ({"env": {"A": "b"}}, "spec.env must be a list of objects, not {'A': 'b'}."),
    "env of texts": ({"env": ["A=b"]}, "spec.env must be a list of objects, not ['A=b']."),
    "volumes as object": ({"volumes": {"a": {}}}, "spec.volumes must be a list of objects"),
    "mounts of texts": ({"volumeMounts": ["/data"]}, "spec.volumeMounts must be a list of objects"),
    "tolerations": (
        {"tolerations": "all"},
        "spec.tolerations must be a list of objects, not 'all'.",
    ),
    "resources as text": ({"resources": "many"}, "spec.resources must be an object, not 'many'."),
    "limits as text": (
        {"resources": {"limits": "many"}},
        "spec.resources.limits must be an object, not 'many'.",
    ),
    "requests as list": (
        {"resources": {"requests": []}},
        "spec.resources.requests must be an object, not [].",
    ),
    "affinity as list": ({"affinity": []}, "spec.affinity must be an object, not []."),
    "nodeSelector as list": (
        {"nodeSelector": ["x"]},
        "spec.nodeSelector must be an object, not ['x'].",
    ),
    "pull policy": (
        {"imagePullPolicy": 3},
        "spec.imagePullPolicy must be a text that is not empty, not 3.",
    ),
    "service account": (
        {"serviceAccountName": ["x"]},
        "spec.serviceAccountName must be a text that is not empty",
    ),
    "template field": (
        {"podTemplate": {"status": {}}},
        "spec.podTemplate has no field 'status'; it has metadata, spec.",
    ),
    "template name": (
        {"podTemplate": {"metadata": {"name": "x"}}},
        "spec.podTemplate.metadata has no field 'name'; it has annotations, labels.",
    ),
    "our label": (
        {"podTemplate": {"metadata": {"labels": {"ddpjob.dev/attempt": "7"}}}},
        "spec.podTemplate.metadata.labels sets ddpjob.dev/attempt, which belongs to the operator; leave it out.",
    ),
    "our annotation": (
        {"podTemplate": {"metadata": {"annotations": {"ddpjob.dev/x": "7"}}}},
        "spec.podTemplate.metadata.annotations sets ddpjob.dev/x, which belongs to the operator; leave it out.",
    ),
    "containers as object": (
        {"podTemplate": {"spec": {"containers": {"trainer": {}}}}},
        "spec.podTemplate.spec.containers must be a list of objects",
    ),
    "reserved in the template": (
        {"podTemplate": trainer(env=[{"name": "RANK", "value": "0"}])},
        "spec.podTemplate's env sets RANK, which torchrun gives to each process itself; leave it out.",
    ),
}


@pytest.mark.parametrize(("fields", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_bad_spec_is_refused_with_a_sentence(fields, sentence):
    with pytest.raises(SpecError) as refused:
        Spec.from_dict(a_spec(**fields) if isinstance(fields, dict) else fields)
    assert str(refused.value).startswith(sentence)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize("path", ["checkpoints", "/", "//", "/a:b", "", 7])
def test_a_mount_path_that_cannot_be_one_is_refused(path):
    with pytest.raises(SpecError, match=r"spec\.checkpoint\.mountPath"):
        Spec.from_dict(a_spec(checkpoint={"claimName": "c", "mountPath": path}))


@pytest.mark.parametrize("name", [*sorted(names.RESERVED_VARIABLES), "PET_NNODES", "PET_"])
def test_a_reserved_variable_is_refused_by_name(name):
    with pytest.raises(
        SpecError, match=f"spec.env sets {name}, which torchrun gives to each process itself"
    ):
        Spec.from_dict(a_spec(env=[{"name": "FINE", "value": ""}, {"name": name, "value": "1"}]))


def test_variables_that_only_look_reserved_are_accepted():
    fine = [{"name": name} for name in ("MY_RANK", "RANKS", "PETS", "rank", "DDP_ATTEMPT")]
    assert Spec.from_dict(a_spec(env=fine)).pod_fields["env"] == fine


@pytest.mark.parametrize("field", OWNED_POD_FIELDS)
def test_what_the_operator_owns_of_a_pod_is_refused(field):
    with pytest.raises(
        SpecError, match=rf"spec\.podTemplate\.spec\.{field} belongs to the operator; leave it out"
    ):
        Spec.from_dict(a_spec(podTemplate={"spec": {field: "x"}}))


@pytest.mark.parametrize("field", OWNED_TRAINER_FIELDS)
def test_what_the_operator_owns_of_the_trainer_is_refused(field):
    with pytest.raises(
        SpecError, match=f"trainer of spec.podTemplate sets {field}, which belongs to the operator"
    ):
        Spec.from_dict(a_spec(podTemplate=trainer(**{field: ["x"]})))


def test_a_sidecar_may_set_what_the_trainer_may_not():
    sidecar = {"name": "mesh", "command": ["x"], "env": [{"name": "RANK", "value": "0"}]}
    assert Spec.from_dict(a_spec(podTemplate={"spec": {"containers": [sidecar]}})).pod_template


# --- what is accepted


def test_the_smallest_spec_has_the_documented_defaults():
    spec = Spec.from_dict({"image": "i", "args": ["a"]})
    assert spec == Spec(
        image="i",
        args=("a",),
        nodes=1,
        nproc_per_node=None,
        accelerator="cpu",
        command=("torchrun",),
        checkpoint=None,
        failure_policy=FailurePolicy(max_restarts=3, max_disruptions=20),
    )


def test_a_whole_spec_is_read():
    spec = Spec.from_dict(
        a_spec(
            nodes=4,
            nprocPerNode=2,
            torchrun={
                "command": ["python", "-m", "torch.distributed.run"],
                "rdzvConf": {"join_timeout": 60},
            },
            checkpoint={"claimName": "ckpt", "mountPath": "/c/"},
            failurePolicy={"maxRestarts": 0},
        )
    )
    assert (spec.nodes, spec.processes) == (4, 2)
    assert spec.command == ("python", "-m", "torch.distributed.run")
    assert spec.rdzv_conf == {"join_timeout": "60"}
    assert spec.checkpoint == Checkpoint("ckpt", "/c")
    assert spec.failure_policy == FailurePolicy(0, 20)


def test_pod_fields_stay_as_they_are():
    texts = dict.fromkeys(("imagePullPolicy", "serviceAccountName", "priorityClassName"), "x")
    objects = {
        "resources": {"limits": {"cpu": 1}},
        "nodeSelector": {"a": "b"},
        "affinity": {"nodeAffinity": {}},
    }
    lists = {
        name: [{"name": "x", "mountPath": "/x", "deep": {"er": [1]}}]
        for name in POD_FIELDS
        if name not in {**texts, **objects}
    }
    fields = {**texts, **objects, **lists}
    assert Spec.from_dict(a_spec(**fields)).pod_fields == fields


def test_fields_that_say_nothing_are_absent():
    assert Spec.from_dict(a_spec(**dict.fromkeys(POD_FIELDS))).pod_fields == {}
    assert Spec.from_dict(a_spec(serviceAccountName="", priorityClassName="")).pod_fields == {}
    assert (
        Spec.from_dict(
            a_spec(checkpoint=None, failurePolicy=None, torchrun=None, podTemplate=None)
        ).checkpoint
        is None
    )


# --- status


def test_a_whole_status_survives_its_way_over_the_api_server():
    conditions = set_condition((), names.Condition.RUNNING, True, "NodesRunning", "m", NOW)
    status = Status(
        phase="Running",
        reason="NodesRunning",
        message="m",
        observed_generation=3,
        conditions=stamp_conditions(conditions, 3),
        attempt=2,
        attempt_started=1,
        attempt_time=NOW,
        restarts=1,
        disruptions=1,
        pods=PodCounts(desired=4, active=3, ready=2, succeeded=1, failed=0),
        resolved={"worldSize": 4},
        backoff=Backoff(2, at(10)),
        succeeded_nodes=(0, 3),
        last_failure={"attempt": 1, "cause": "Failure"},
        start_time=NOW,
        completion_time=at(60),
        result={"accuracy": "0.9"},
    )
    assert Status.from_dict(status.to_dict()) == status
    assert status.to_dict()["nodesReady"] == "3/4"


def test_a_status_that_says_nothing_is_short():
    assert set(Status().to_dict()) == {
        "observedGeneration",
        "conditions",
        "restarts",
        "disruptions",
        "nodes",
        "nodesReady",
    }


def test_attempt_0_is_not_no_attempt():
    assert Status.from_dict({"attempt": 0, "attemptStarted": 0}).to_dict()["attemptStarted"] == 0
    assert Status.from_dict({}).attempt is None


@pytest.mark.parametrize(
    "data", [None, [], "x", {"conditions": None}, {"nodes": 7}, {"backoff": {"until": 3}}]
)
def test_a_status_that_cannot_be_read_counts_as_not_there(data):
    assert Status.from_dict(data) == Status()


@pytest.mark.parametrize("kind", names.Condition)
@pytest.mark.parametrize("value", [True, False])
def test_complete_and_failed_finish_a_job(kind, value):
    status = Status(conditions=set_condition((), kind, value, "r", "m", NOW))
    assert status.has(kind) is value
    assert status.finished is (value and kind is not names.Condition.RUNNING)


# --- conditions


def test_a_conditions_transition_time_moves_only_with_its_status():
    first = set_condition((), names.Condition.RUNNING, False, "A", "a", at(0))
    same = set_condition(first, names.Condition.RUNNING, False, "B", "b", at(5))
    other = set_condition(same, names.Condition.RUNNING, True, "C", "c", at(9))
    assert (same[0]["lastTransitionTime"], same[0]["reason"]) == (format_time(at(0)), "B")
    assert other[0]["lastTransitionTime"] == format_time(at(9))


def test_conditions_keep_their_place_and_foreign_ones_stay():
    foreign = {"type": "Foreign", "status": "True"}
    conditions = set_condition((foreign,), names.Condition.FAILED, True, "r", "m", NOW)
    conditions = set_condition(conditions, names.Condition.FAILED, True, "again", "m", NOW)
    assert [c["type"] for c in conditions] == ["Foreign", "Failed"]
    assert conditions[0] == foreign


# --- jobs and times


def test_a_job_is_read():
    job = Job.from_dict(a_manifest(name="digits", generation=4))
    assert (job.name, job.namespace, job.generation, job.deleting, job.spec_error) == (
        "digits",
        "ml",
        4,
        False,
        "",
    )


def test_a_job_that_is_being_deleted_is_known_as_such():
    assert Job.from_dict(a_manifest(deleting=True)).deleting


def test_a_job_with_a_bad_spec_keeps_the_sentence():
    job = Job.from_dict(a_manifest(nodes=0))
    assert job.spec is None
    assert job.spec_error.startswith("spec.nodes must be a whole number")


@given(st.datetimes(min_value=NOW.replace(year=1990, tzinfo=None)))
def test_times_survive_to_the_second(moment):
    moment = moment.replace(tzinfo=NOW.tzinfo)
    assert parse_time(format_time(moment)) == moment.replace(microsecond=0)


@pytest.mark.parametrize("text", [None, "", "yesterday", 5, "0001-01-01T00:00:00+14:00"])
def test_a_time_that_cannot_be_read_is_none(text):
    assert parse_time(text) is None


def test_microseconds_and_zones_are_read():
    assert parse_time("2026-11-21T13:00:00.5+01:00") == NOW.replace(microsecond=500000)
