"""A pod is read from any state that the API server can show."""

import pytest
from builders.containers import (
    ended,
    failed,
    running,
    succeeded,
    trainer_status,
    waiting,
    with_sidecar,
)
from builders.messages import FOLLOWER_ERROR, agent_report, torchrun_summary
from builders.pods import a_pod
from builders.surroundings import (
    disruption_target,
    evicted,
    not_ready,
    over_own_limit,
    preempted_by_kubelet,
    rejected_by_kubelet,
    scheduling_gated,
    unschedulable,
)
from builders.times import NOW, at

from ddpjob.core.api import names
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.reasons import Reason
from ddpjob.core.observe.observation import TrainerState
from ddpjob.core.observe.pods import read_pod

RUNNING_STATE = {"running": {}}
SIDECAR = {"name": "mesh", "state": {"running": {}}}


# The trainer


@pytest.mark.parametrize(
    ("status", "state"),
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
        ({"phase": "Unknown", **trainer_status(RUNNING_STATE)}, TrainerState.RUNNING),
        ({"phase": "Pending", **trainer_status(RUNNING_STATE, SIDECAR)}, TrainerState.RUNNING),
        (succeeded(), TrainerState.SUCCEEDED),
        (succeeded(phase="Running"), TrainerState.SUCCEEDED),
        (succeeded(phase="Failed"), TrainerState.SUCCEEDED),
        (failed(), TrainerState.FAILED),
        (failed(phase="Running"), TrainerState.FAILED),
        (evicted(), TrainerState.FAILED),
        (rejected_by_kubelet(), TrainerState.FAILED),
        ({"phase": "Failed", **trainer_status(RUNNING_STATE)}, TrainerState.FAILED),
        ({"phase": "Succeeded"}, TrainerState.FAILED),
    ],
)
def test_the_state_of_a_pod_is_that_of_its_trainer(status, state):
    assert read_pod(a_pod(0, status)).state is state


def test_a_pod_without_spec_and_status_is_pending_without_a_node():
    pod = read_pod({"metadata": a_pod(3, attempt=2)["metadata"]})
    assert (pod.attempt, pod.index) == (2, 3)
    assert (pod.state, pod.node_name) == (TrainerState.PENDING, "")
    assert not pod.ended
    assert not pod.released


def test_every_field_of_an_ended_trainer_is_read():
    pod = read_pod(a_pod(1, ended(17, "last line", when=at(3))))
    assert (pod.exit_code, pod.exit_reason) == (17, "Error")
    assert (pod.message, pod.finished) == ("last line", at(3))
    assert (pod.name, pod.uid) == ("digits-0-1", "uid-of-digits-0-1")
    assert pod.node_name == "node-1"
    assert pod.started
    assert pod.ended
    assert pod.released


def test_the_end_of_a_trainer_has_a_time():
    assert read_pod(a_pod(0, failed(when=NOW))).finished == NOW


def test_a_pod_is_released_only_when_all_its_containers_have_ended():
    assert not read_pod(a_pod(0, with_sidecar(succeeded()))).released
    assert not read_pod(a_pod(0, with_sidecar(succeeded(), {"waiting": {}}))).released
    assert read_pod(a_pod(0, with_sidecar(succeeded(), {"terminated": {"exitCode": 0}}))).released
    assert read_pod(a_pod(0, succeeded())).released


def test_a_pod_that_was_deleted_by_force_is_released_although_a_finalizer_keeps_it():
    assert read_pod(a_pod(0, running(), deleted_at=NOW, grace=0)).released
    assert not read_pod(a_pod(0, running(), deleted_at=NOW, grace=1)).released


def test_a_pod_is_released_when_its_containers_have_ended_even_if_its_phase_lags_behind():
    assert read_pod(a_pod(0, succeeded(phase="Running"))).released
    assert not read_pod(a_pod(0, running())).released


@pytest.mark.parametrize(
    ("status", "started"), [(None, False), (waiting(), False), (running(), True), (failed(), True)]
)
def test_a_pod_has_started_if_its_trainer_has(status, started):
    assert read_pod(a_pod(0, status)).started is started


# Disruptions


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
        (a_pod(0, evicted()), "TerminationByKubelet"),
        (a_pod(0, preempted_by_kubelet()), "PreemptionByKubelet"),
        (a_pod(0, rejected_by_kubelet("Evicted")), "NodePressure"),
        (a_pod(0, rejected_by_kubelet("OutOfmemory")), "OutOfmemory"),
        (a_pod(0, ended(137, reason="ContainerStatusUnknown")), "NodeRestarted"),
        (a_pod(0, running(), deleted_at=NOW), "PodDeleted"),
        (a_pod(0, {"phase": "Failed"}), "PodLost"),
    ],
)
def test_a_disruption_has_a_reason(pod, reason):
    assert read_pod(pod).disruption.reason == reason


@pytest.mark.parametrize("status", [running(), failed("boom"), succeeded(), waiting(), None])
def test_other_pods_are_not_disrupted(status):
    assert read_pod(a_pod(0, status)).disruption is None


def test_a_disruption_that_was_cancelled_is_ignored():
    cancelled = {**disruption_target(), "status": "False"}
    assert read_pod(a_pod(0, {"phase": "Running", "conditions": [cancelled]})).disruption is None


def test_a_pod_that_succeeded_was_not_disrupted():
    pod = a_pod(0, succeeded(conditions=[disruption_target()]), deleted_at=NOW)
    assert read_pod(pod).disruption is None


def test_the_time_of_a_deletion_is_that_of_the_request():
    assert read_pod(a_pod(0, running(), deleted_at=at(4), grace=300)).disruption.time == at(4)


def test_the_time_of_a_deletion_without_a_grace_period_is_its_deadline():
    pod = a_pod(0, running(), deleted_at=at(4), grace=0)
    del pod["metadata"]["deletionGracePeriodSeconds"]
    assert read_pod(pod).disruption.time == at(4)


@pytest.mark.parametrize("seconds", [10**12, 2**63 - 1, -(10**12)])
def test_any_64_bit_grace_period_is_read(seconds):
    pod = a_pod(0, {"phase": "Running"}, deleted_at=NOW)
    pod["metadata"]["deletionGracePeriodSeconds"] = seconds
    assert read_pod(pod).disruption


def test_a_pod_over_a_limit_of_its_own_was_not_disrupted():
    pod = read_pod(a_pod(0, over_own_limit("Pod ephemeral local storage usage exceeds 1Gi")))
    assert pod.disruption is None
    assert pod.own_limit.message == "Pod ephemeral local storage usage exceeds 1Gi"


@pytest.mark.parametrize("containers", [waiting(), {}, ended(137, reason="ContainerStatusUnknown")])
def test_a_slow_kubelet_reports_the_eviction_before_the_end_of_the_containers(containers):
    message = "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi. "
    status = {**containers, "phase": "Failed", "reason": "Evicted", "message": message}
    pod = read_pod(a_pod(0, status))
    assert pod.disruption is None
    assert pod.own_limit.message == message
    assert pod.failed


def test_an_eviction_because_of_pressure_on_the_node_exceeds_no_limit_of_the_pod():
    assert read_pod(a_pod(0, evicted())).own_limit is None


@pytest.mark.parametrize(
    ("code", "reason", "is_lost"),
    [
        (255, "Unknown", True),
        (137, "ContainerStatusUnknown", True),
        (255, "Error", False),
        (1, "Unknown", False),
    ],
)
def test_a_container_that_nobody_saw_end_was_lost_with_its_node(code, reason, is_lost):
    disruption = read_pod(a_pod(0, ended(code, reason=reason))).disruption
    assert (disruption is not None) is is_lost


# What is known without the Kubernetes node


def test_a_deletion_has_the_deadline_that_the_api_server_set():
    assert read_pod(a_pod(0, running(), deleted_at=NOW, grace=45)).deletion_deadline == at(45)
    assert read_pod(a_pod(0, running())).deletion_deadline is None


@pytest.mark.parametrize("deadline", ["soon", 7, "9999-12-31T23:59:59Z"])
def test_a_deadline_that_cannot_be_read_is_never_overdue(deadline):
    pod = a_pod(0, running(), deleted_at=NOW)
    pod["metadata"]["deletionTimestamp"] = deadline
    read = read_pod(pod)
    assert read.deleting
    assert read.deletion_deadline > at(10**9)


def test_a_pod_that_only_the_control_plane_reports_as_not_ready_looks_lost():
    assert read_pod(a_pod(0, not_ready(running()))).looks_lost


@pytest.mark.parametrize("status", [running(), waiting(), None])
def test_other_pods_do_not_look_lost(status):
    assert not read_pod(a_pod(0, status)).looks_lost


@pytest.mark.parametrize("reason", ["ContainersNotReady", "ReadinessGatesNotReady"])
def test_a_pod_that_its_kubelet_reports_as_not_ready_does_not_look_lost(reason):
    status = not_ready(running())
    status["conditions"][0]["reason"] = reason
    assert not read_pod(a_pod(0, status)).looks_lost


def test_a_pod_with_a_sidecar_that_is_not_ready_does_not_look_lost():
    status = not_ready(with_sidecar(running()))
    status["conditions"][1]["status"] = "False"
    assert not read_pod(a_pod(0, status)).looks_lost


def test_a_pod_knows_whether_it_mounts_a_claim():
    claim = {"name": "a", "persistentVolumeClaim": {"claimName": "b"}}
    assert read_pod(a_pod(0, running(), volumes=[{"name": "c"}, claim])).has_claims
    assert not read_pod(a_pod(0, running(), volumes=[{"name": "c", "emptyDir": {}}])).has_claims


def test_the_tolerations_that_kubernetes_adds_to_every_pod_are_not_read():
    tolerations = [
        {"key": "node.kubernetes.io/not-ready", "operator": "Exists"},
        {"key": "node.kubernetes.io/unreachable", "operator": "Exists"},
        {"key": "spot", "operator": "Exists"},
        {"operator": "Exists"},
    ]
    assert read_pod(a_pod(0, running(), tolerations=tolerations)).tolerated == ("spot", "")


# Pods that cannot start


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (unschedulable("no room"), "Unschedulable", "no room"),
        (
            unschedulable('0/3 nodes: persistentvolumeclaim "a" not found. not found'),
            "ClaimNotFound",
            'PersistentVolumeClaim "a" does not exist in the namespace of the job',
        ),
        (
            unschedulable('persistentvolumeclaim "a" not found'),
            "ClaimNotFound",
            'PersistentVolumeClaim "a" does not exist in the namespace of the job',
        ),
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
def test_a_blocked_pod_has_a_reason_and_a_message(status, reason, message):
    blocked = read_pod(a_pod(0, status)).blocked
    assert (blocked.reason, blocked.message) == (reason, message)


def test_a_scheduling_gate_is_named():
    pod = read_pod(a_pod(0, scheduling_gated()))
    assert (pod.blocked.reason, pod.gated) == (Reason.GATED, True)
    assert not read_pod(a_pod(0, unschedulable())).gated


@pytest.mark.parametrize(
    "status", [None, waiting(), waiting("PodInitializing"), running(), failed()]
)
def test_a_pod_that_starts_or_has_started_is_not_blocked(status):
    assert read_pod(a_pod(0, status)).blocked is None


# Init containers


def init_status(state, name="prepare"):
    return {"initContainerStatuses": [{"name": name, "state": state}]}


def test_an_init_container_that_failed_is_a_failure_of_the_job():
    state = {"terminated": {"exitCode": 3, "message": "no data"}}
    pod = read_pod(a_pod(0, {"phase": "Failed", **init_status(state)}))
    assert (pod.state, pod.exit_code, pod.disruption) == (TrainerState.FAILED, 3, None)
    assert pod.message == "init container prepare: no data"
    assert not pod.started


@pytest.mark.parametrize(("code", "reason"), [(137, "ContainerStatusUnknown"), (255, "Unknown")])
def test_an_init_container_that_its_node_has_lost_is_a_disruption(code, reason):
    state = {"terminated": {"exitCode": code, "reason": reason}}
    pod = read_pod(a_pod(0, {"phase": "Failed", **init_status(state)}))
    assert pod.disruption.reason == "NodeRestarted"


CURL = "  % Total    % Received\n\r 10\r 100\ncurl: (6) Could not resolve host: data\n\n"
ITS_LOG = "its log: kubectl -n ml logs digits-0-0 -c prepare"

# The end of an init container, and the message about it.
ENDS_OF_INIT_CONTAINERS = {
    "the end of its log": (
        {"reason": "Error", "message": CURL},
        "curl: (6) Could not resolve host: data",
    ),
    "no words": ({"reason": "Error"}, f"Error ({ITS_LOG})"),
    "blank lines": ({"reason": "Error", "message": "\n \n"}, f"Error ({ITS_LOG})"),
    "nothing at all": ({}, f"exit code 1 ({ITS_LOG})"),
    "no memory": ({"reason": "OOMKilled"}, f"OOMKilled ({ITS_LOG})"),
    "no memory, and a log": ({"reason": "OOMKilled", "message": CURL}, f"OOMKilled ({ITS_LOG})"),
}


@pytest.mark.parametrize(
    ("end", "words"), ENDS_OF_INIT_CONTAINERS.values(), ids=ENDS_OF_INIT_CONTAINERS
)
def test_an_init_container_that_failed_is_reported_with_its_last_line(end, words):
    state = {"terminated": {"exitCode": 1, **end}}
    pod = read_pod(a_pod(0, {"phase": "Failed", **init_status(state)}))
    assert pod.message == f"init container prepare: {words}"


@pytest.mark.parametrize("text", [FOLLOWER_ERROR, torchrun_summary(), agent_report()])
def test_the_log_of_an_init_container_says_nothing_about_workers(text):
    state = {"terminated": {"exitCode": 1, "reason": "Error", "message": text}}
    pod = read_pod(a_pod(0, {"phase": "Failed", **init_status(state)}))
    assert (pod.follower, pod.timed_out, pod.summary, pod.reported) == (False, False, None, None)


def test_a_blocked_init_container_is_named():
    state = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    pod = read_pod(a_pod(0, {"phase": "Pending", **init_status(state)}))
    assert pod.blocked.message == "init container prepare: not found"


# Pods of other owners


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
def test_a_pod_without_the_labels_of_attempt_and_index_is_not_read(labels):
    pod = a_pod(0)
    pod["metadata"]["labels"] = labels
    assert read_pod(pod) is None


@pytest.mark.parametrize(
    "pod", [{}, {"metadata": None}, {"metadata": {"labels": None}}, {"metadata": 7}]
)
def test_an_object_without_metadata_is_not_read(pod):
    assert read_pod(pod) is None
    assert owner_of(pod) is None


def test_the_owner_of_a_pod_is_the_job_of_its_namespace_that_controls_it():
    pod = a_pod(0)
    owner = pod["metadata"]["ownerReferences"][0]
    assert owner_of(pod) == (pod["metadata"]["namespace"], owner["name"], owner["uid"])


@pytest.mark.parametrize(
    "change", [{"controller": False}, {"kind": "Job"}, {"apiVersion": "ddpjob.dev/v1"}]
)
def test_an_owner_that_is_no_controlling_job_is_ignored(change):
    pod = a_pod(0)
    pod["metadata"]["ownerReferences"][0].update(change)
    assert owner_of(pod) is None
