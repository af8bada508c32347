"""Suspension, deadlines, clean-up, scale and dead nodes, against a real API server."""

import json

import pytest
from play import succeeded_nodes

# Short enough for a test, and longer than the operator's own delays.
SECONDS = 3


def pod_names(cluster, job="digits"):
    return sorted(cluster.pods(job))


def is_suspended(cluster):
    status = cluster.status("digits")
    return status.get("phase") == "Suspended" and not pod_names(cluster)


# Suspension


def test_a_suspended_job_gives_its_pods_back_and_resumes_for_free(cluster, an_operator):
    an_operator()
    cluster.create_job("digits")
    cluster.is_running("digits")
    cluster.change_job("digits", suspend=True)
    cluster.until("digits", lambda: is_suspended(cluster))
    cluster.change_job("digits", suspend=False, nodeSelector={"zone": "b"})
    cluster.is_running("digits", attempt=1)
    status = cluster.status("digits")
    assert (status["restarts"], status["attempts"][0]["cause"]) == (0, "Suspended")
    assert cluster.pods("digits")["digits-1-0"]["spec"]["nodeSelector"] == {"zone": "b"}


def test_a_job_that_was_created_suspended_has_no_pods_until_it_is_resumed(cluster, an_operator):
    an_operator()
    cluster.create_job("digits", suspend=True)
    cluster.until("digits", lambda: is_suspended(cluster))
    cluster.change_job("digits", suspend=False)
    cluster.is_running("digits")


# Deadlines and clean-up


def test_a_job_fails_after_its_active_deadline(cluster, an_operator):
    an_operator()
    cluster.create_job("digits", activeDeadlineSeconds=SECONDS)
    cluster.until("digits", lambda: cluster.status("digits").get("phase") == "Failed")
    assert cluster.status("digits")["reason"] == "DeadlineExceeded"
    cluster.until("digits", lambda: not pod_names(cluster))


def test_a_job_that_cannot_start_fails_after_its_startup_deadline_with_the_reason(
    cluster, an_operator
):
    an_operator()
    cluster.nodes = []
    cluster.create_job("digits", startupDeadlineSeconds=SECONDS)
    finished = lambda: cluster.status("digits").get("phase") == "Failed"  # noqa: E731
    cluster.wait(finished)
    assert "startupDeadlineSeconds=3" in cluster.status("digits")["message"]


@pytest.mark.parametrize(("policy", "left"), [("All", []), ("None", ["digits-0-0", "digits-0-1"])])
def test_the_clean_up_decides_which_pods_of_a_finished_job_go(cluster, an_operator, policy, left):
    an_operator()
    cluster.create_job("digits", cleanPodPolicy=policy)
    cluster.is_running("digits")
    cluster.ends("digits-0-0", message=json.dumps({"accuracy": 0.5}))
    cluster.ends("digits-0-1")
    cluster.until("digits", lambda: cluster.status("digits")["phase"] == "Complete")
    cluster.until("digits", lambda: pod_names(cluster) == left)
    assert cluster.status("digits")["result"] == {"accuracy": "0.5"}


def test_a_finished_job_is_deleted_after_its_time_to_live(cluster, an_operator):
    an_operator()
    cluster.create_job("digits", nodes=1, ttlSecondsAfterFinished=1)
    cluster.is_running("digits")
    cluster.ends("digits-0-0")
    cluster.until("digits", lambda: not cluster.exists("digits"))


def test_a_job_of_another_controller_is_left_alone(cluster, an_operator):
    an_operator()
    cluster.create_job("other", managedBy="kueue.x-k8s.io/multikueue")
    cluster.create_job("digits")
    cluster.is_running("digits")
    assert (cluster.status("other"), pod_names(cluster, "other")) == ({}, [])


def test_an_autoscaler_finds_the_pods_of_a_job_by_its_scale(cluster, an_operator):
    an_operator()
    cluster.create_job("digits")
    cluster.is_running("digits")
    path = f"/apis/ddpjob.dev/v1alpha1/namespaces/{cluster.namespace}/ddpjobs/digits/scale"
    scale = cluster.apiserver.request("GET", path).body
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)
    selected = cluster.apiserver.request(
        "GET",
        f"/api/v1/namespaces/{cluster.namespace}/pods?labelSelector={scale['status']['selector']}",
    )
    assert len(selected.body["items"]) == 2


# What somebody else does


def test_a_wiped_status_is_recovered_once(cluster, an_operator):
    an_operator()
    cluster.create_job("digits")
    cluster.is_running("digits")
    cluster.ends("digits-0-1", code=1)
    cluster.is_running("digits", attempt=1)
    cluster.wipe_status("digits")
    cluster.is_running("digits", attempt=1)
    cluster.ends("digits-1-0")
    cluster.ends("digits-1-1")
    cluster.until("digits", lambda: cluster.status("digits")["phase"] == "Complete")
    assert cluster.event_reasons().count("StatusRecovered") == 1


def test_a_copied_pod_decides_nothing_and_is_reported(cluster, an_operator):
    an_operator()
    cluster.create_job("digits")
    cluster.is_running("digits")
    cluster.copy_pod("digits-0-1", "copy", index=7)
    cluster.ends("copy")
    cluster.until(
        "digits", lambda: cluster.status("digits")["operator"].get("strayPods") == ["copy"]
    )
    assert cluster.status("digits")["phase"] == "Running"
    cluster.ends("digits-0-0")
    cluster.ends("digits-0-1")
    cluster.until("digits", lambda: cluster.status("digits")["phase"] == "Complete")


def test_pods_of_another_namespace_decide_nothing(cluster, other_namespace, an_operator):
    # Whoever can read the job knows its UID, and may create pods somewhere else.
    an_operator(scope=())
    cluster.create_job("digits")
    cluster.is_running("digits")
    other_namespace.forge_pod(cluster, "digits-0-0", attempt=7)
    for pod in ("digits-0-0", "digits-0-1"):
        other_namespace.forge_pod(cluster, pod)
        other_namespace.ends(pod, code=2)
    cluster.ends("digits-0-0")
    cluster.until("digits", lambda: succeeded_nodes(cluster.status("digits")) == [0])
    cluster.ends("digits-0-1")
    cluster.until("digits", lambda: cluster.status("digits")["phase"] == "Complete")
    status = cluster.status("digits")
    assert (status["attempt"]["number"], status.get("lastFailure")) == (0, None)
    assert "strayPods" not in status.get("operator", {})


# Dead nodes


@pytest.fixture
def three_nodes(cluster):
    """Return a cluster of three ready Kubernetes nodes."""
    cluster.nodes = [f"{cluster.namespace}-{number}" for number in range(3)]
    for node in cluster.nodes:
        cluster.report_node(node, "True")
    yield cluster
    for node in cluster.nodes:
        cluster.remove_node(node)


def test_the_next_attempt_begins_although_a_node_is_dead(three_nodes, an_operator):
    an_operator(f"--dead-node-seconds={SECONDS}", scope=())
    three_nodes.create_job("digits")
    three_nodes.is_running("digits")
    dead = three_nodes.pods("digits")["digits-0-1"]["spec"]["nodeName"]
    three_nodes.silent.add(dead)
    three_nodes.report_node(dead, "Unknown")
    three_nodes.is_running("digits", attempt=1)
    status = three_nodes.status("digits")
    assert (status["budget"]["failures"], status["budget"]["disruptions"]) == (0, 1)
    assert (status["lastFailure"]["node"], status["lastFailure"]["reason"]) == (
        dead,
        "NodeUnreachable",
    )
    assert "digits-0-1" not in pod_names(three_nodes)
    assert "ForceDeleted" in three_nodes.event_reasons()


def test_nothing_is_forced_while_most_nodes_are_not_ready(three_nodes, an_operator):
    an_operator("--dead-node-seconds=1", scope=())
    three_nodes.create_job("digits")
    three_nodes.is_running("digits")
    for node in three_nodes.nodes[:2]:
        three_nodes.silent.add(node)
        three_nodes.report_node(node, "Unknown")
    cut_off = "2 of 3 Kubernetes nodes are not ready"
    three_nodes.until("digits", lambda: cut_off in three_nodes.status("digits")["message"])
    assert three_nodes.status("digits")["attempt"]["number"] == 0
    three_nodes.silent.clear()
    for node in three_nodes.nodes:
        three_nodes.report_node(node, "True")
    three_nodes.until("digits", lambda: cut_off not in three_nodes.status("digits")["message"])
    assert pod_names(three_nodes) == ["digits-0-0", "digits-0-1"]
