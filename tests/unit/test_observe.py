"""What is read from pods as an API server shows them, odd ones too."""

import pytest
from builders import (
    NOW,
    a_pod,
    a_running_job,
    a_starting_job,
    at,
    disruption_target,
    ended,
    evicted,
    failed,
    refused_by_kubelet,
    running,
    seen,
    succeeded,
    trainer,
    unschedulable,
    waiting,
    with_sidecar,
)

from ddpjob.core import names
from ddpjob.core.observe import TrainerState
from ddpjob.core.pods import owner_uid, read_pod
from ddpjob.core.times import format_time

RUNNING_STATE = {"running": {}}
SIDECAR = {"name": "mesh", "state": {"running": {}}}


@pytest.mark.parametrize(
    ("status", "fate"),
    [
        ({}, TrainerState.PENDING),
        ({"phase": "Pending"}, TrainerState.PENDING),
        (waiting(), TrainerState.PENDING),
        (unschedulable(), TrainerState.PENDING),
        ({"phase": "Unknown"}, TrainerState.PENDING),
        ({"phase": "Hibernating"}, TrainerState.PENDING),
        ({"phase": "Running"}, TrainerState.PENDING),
        ({"phase": "Running", "containerStatuses": [SIDECAR]}, TrainerState.PENDING),
        (running(), TrainerState.RUNNING),
        ({"phase": "Unknown", **trainer(RUNNING_STATE)}, TrainerState.RUNNING),
        ({"phase": "Pending", **trainer(RUNNING_STATE, SIDECAR)}, TrainerState.RUNNING),
        (succeeded(), TrainerState.SUCCEEDED),
        (succeeded(phase="Running"), TrainerState.SUCCEEDED),
        (succeeded(phase="Failed"), TrainerState.SUCCEEDED),
        (failed(), TrainerState.FAILED),
        (failed(phase="Running"), TrainerState.FAILED),
        (evicted(), TrainerState.FAILED),
        (refused_by_kubelet(), TrainerState.FAILED),
        ({"phase": "Failed", **trainer(RUNNING_STATE)}, TrainerState.FAILED),
        ({"phase": "Succeeded"}, TrainerState.FAILED),
    ],
)
def test_a_pods_fate_is_its_trainers(status, fate):
    assert read_pod(a_pod(0, status)).state is fate


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {names.LABEL_ATTEMPT: "0"},
        {names.LABEL_INDEX: "0"},
        {names.LABEL_ATTEMPT: "", names.LABEL_INDEX: "0"},
        {names.LABEL_ATTEMPT: "-1", names.LABEL_INDEX: "0"},
        {names.LABEL_ATTEMPT: "one", names.LABEL_INDEX: "0"},
        {names.LABEL_ATTEMPT: None, names.LABEL_INDEX: "0"},
    ],
)
def test_a_pod_that_says_neither_attempt_nor_index_is_none_of_ours(labels):
    assert read_pod(a_pod(0, labels=labels)) is None


@pytest.mark.parametrize(
    "pod", [{}, {"metadata": None}, {"metadata": {"labels": None}}, {"metadata": 7}]
)
def test_an_object_without_metadata_is_none_of_ours(pod):
    assert read_pod(pod) is None
    assert owner_uid(pod) == ""


def test_a_pod_without_spec_and_status_is_pending_nowhere():
    pod = a_pod(3, attempt=2)
    pod = read_pod({"metadata": pod["metadata"]})
    assert (pod.attempt, pod.index, pod.state, pod.node) == (2, 3, TrainerState.PENDING, "")
    assert not pod.ended
    assert not pod.released


def test_the_end_of_a_trainer_is_read_whole():
    pod = read_pod(a_pod(1, ended(17, "last words", when=at(3)), node="worker-7"))
    assert (pod.exit_code, pod.exit_reason, pod.message, pod.finished) == (
        17,
        "Error",
        "last words",
        at(3),
    )
    assert (pod.name, pod.uid, pod.node) == ("digits-0-1", "uid-of-digits-0-1", "worker-7")
    assert pod.started
    assert pod.ended
    assert pod.released


def test_a_pod_is_released_only_when_all_of_it_has_ended():
    assert not read_pod(a_pod(0, with_sidecar(succeeded()))).released
    assert not read_pod(a_pod(0, with_sidecar(succeeded(), {"waiting": {}}))).released
    assert read_pod(a_pod(0, with_sidecar(succeeded(), {"terminated": {"exitCode": 0}}))).released
    assert read_pod(a_pod(0, succeeded())).released


def test_a_kubelet_reports_the_containers_end_before_the_pods():
    assert read_pod(a_pod(0, succeeded(phase="Running"))).released
    assert not read_pod(a_pod(0, running())).released


@pytest.mark.parametrize(
    ("status", "started"), [(None, False), (waiting(), False), (running(), True), (failed(), True)]
)
def test_a_pod_has_started_when_its_trainer_has(status, started):
    assert read_pod(a_pod(0, status)).started is started


# --- signs of disruption


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (
            a_pod(0, failed(conditions=[disruption_target("PreemptionByScheduler")])),
            "PreemptionByScheduler",
        ),
        (
            a_pod(0, {"phase": "Running", "conditions": [disruption_target("TaintManager")]}),
            "TaintManager",
        ),
        (a_pod(0, evicted()), "Evicted"),
        (a_pod(0, refused_by_kubelet("OutOfmemory")), "OutOfmemory"),
        (a_pod(0, running(), deleted_at=NOW), "PodDeleted"),
        (a_pod(0, {"phase": "Failed"}), "PodLost"),
    ],
)
def test_a_disruption_is_known_by_its_sign(pod, reason):
    assert read_pod(pod).disruption.reason == reason


@pytest.mark.parametrize("status", [running(), failed("boom"), succeeded(), waiting(), None])
def test_other_pods_have_no_sign_of_disruption(status):
    assert read_pod(a_pod(0, status)).disruption is None


def test_a_disruption_that_did_not_come_to_pass_is_no_sign():
    undone = {**disruption_target(), "status": "False"}
    assert read_pod(a_pod(0, {"phase": "Running", "conditions": [undone]})).disruption is None


def test_who_succeeded_was_not_disrupted():
    pod = a_pod(0, succeeded(conditions=[disruption_target()]), deleted_at=NOW)
    assert read_pod(pod).disruption is None


def test_a_deletion_is_dated_when_it_was_asked_for():
    assert read_pod(a_pod(0, running(), deleted_at=at(4), grace=300)).disruption.time == at(4)


def test_a_deletion_without_a_grace_period_is_dated_at_its_end():
    pod = a_pod(0, running(), deleted_at=at(4), grace=0)
    del pod["metadata"]["deletionGracePeriodSeconds"]
    assert read_pod(pod).disruption.time == at(4)


# --- what keeps a pod from starting


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (unschedulable("no room"), "Unschedulable", "no room"),
        (waiting("ErrImagePull", "not found"), "ImagePull", "not found"),
        (waiting("ImagePullBackOff"), "ImagePull", "ImagePullBackOff"),
        (waiting("InvalidImageName", "bad"), "ImagePull", "bad"),
        (
            waiting("CreateContainerConfigError", "no secret"),
            "CreateContainerConfigError",
            "no secret",
        ),
    ],
)
def test_what_keeps_a_pod_from_starting_is_told(status, reason, message):
    blocked = read_pod(a_pod(0, status)).blocked
    assert (blocked.reason, blocked.message) == (reason, message)


@pytest.mark.parametrize(
    "status", [None, waiting(), waiting("PodInitializing"), running(), failed()]
)
def test_a_pod_on_its_way_is_not_blocked(status):
    assert read_pod(a_pod(0, status)).blocked is None


# --- belonging


def test_a_pod_belongs_to_the_job_that_controls_it():
    pod = a_pod(0)
    assert owner_uid(pod) == pod["metadata"]["ownerReferences"][0]["uid"]


@pytest.mark.parametrize("change", [{"controller": False}, {"kind": "Job"}])
def test_another_owner_is_no_owner(change):
    pod = a_pod(0)
    pod["metadata"]["ownerReferences"][0].update(change)
    assert owner_uid(pod) == ""


# --- an observation


def test_pods_stand_in_the_order_of_attempt_and_index():
    pods = seen(
        a_running_job(nodes=11, attempt=1), a_pod(10, attempt=1), a_pod(9, attempt=1), a_pod(0)
    ).pods
    assert [pod.name for pod in pods] == ["digits-0-0", "digits-1-9", "digits-1-10"]


def test_missing_are_the_indices_of_this_attempt_without_a_pod():
    assert seen(a_starting_job(attempt=1, nodes=3), a_pod(0), a_pod(1, attempt=1)).missing == (0, 2)


def test_an_attempt_is_latched_by_its_own_number():
    assert seen(a_running_job(attempt=2)).latched
    assert not seen(a_starting_job(attempt=2)).latched
    assert not seen(a_starting_job()).latched


def test_times_are_read_as_kubernetes_writes_them():
    assert read_pod(a_pod(0, failed(when=NOW))).finished == NOW
    assert format_time(NOW) == "2026-11-21T12:00:00Z"


def an_init(state, name="prepare"):
    return {"initContainerStatuses": [{"name": name, "state": state}]}


def test_an_init_container_that_failed_is_the_jobs_own_failure():
    status = {"phase": "Failed", **an_init({"terminated": {"exitCode": 3, "message": "no data"}})}
    pod = read_pod(a_pod(0, status))
    assert (pod.state, pod.exit_code, pod.disruption) == (TrainerState.FAILED, 3, None)
    assert pod.message == "init container prepare: no data"
    assert not pod.started


def test_what_an_init_container_waits_for_is_said_with_its_name():
    status = {
        "phase": "Pending",
        **an_init({"waiting": {"reason": "ErrImagePull", "message": "not found"}}),
    }
    assert read_pod(a_pod(0, status)).blocked.message == "init container prepare: not found"
