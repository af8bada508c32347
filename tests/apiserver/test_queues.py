"""Jobs with a queue: the operator against an API server, and Kueue as the test plays it."""

import itertools

import pytest
from play import Gate
from queue_of_kueue import Queue, has_room, holds, install_kueue, serve_kueue

from ddpjob.kube.api import ApiClient, configuration
from ddpjob.kube.errors import ApiError
from ddpjob.kube.kinds import WORKLOADS
from ddpjob.kube.request import ReadDocument, Request, Verb

TEAM = {"kueue.x-k8s.io/queue-name": "team"}


@pytest.fixture(scope="session")
def with_kueue(apiserver):
    install_kueue(apiserver)


@pytest.fixture
def queue(cluster, with_kueue):
    return Queue(cluster)


def is_waiting(cluster, job, reason="Queued"):
    cluster.until(job, lambda: cluster.status(job).get("reason") == reason)


def is_complete(cluster, job, attempt=0):
    for index in (0, 1):
        cluster.ends(f"{job}-{attempt}-{index}")
    cluster.until(job, lambda: cluster.status(job)["phase"] == "Complete")


def test_a_job_waits_for_room_runs_where_it_has_it_and_gives_it_back(cluster, queue, an_operator):
    an_operator()
    cluster.create_job("digits", labels=TEAM)
    is_waiting(cluster, "digits")
    # The status is written first.
    cluster.until("digits", lambda: queue.workloads("digits"))
    (workload,) = queue.workloads("digits")
    assert workload["spec"]["queueName"] == "team"
    (pod_set,) = workload["spec"]["podSets"]
    assert pod_set["count"] == 2
    (trainer,) = pod_set["template"]["spec"]["containers"]
    assert trainer["image"] == "trainer:1"
    assert cluster.pods("digits") == {}
    queue.admit("digits")
    cluster.is_running("digits")
    pod = cluster.pods_by_name("digits-0-1")
    assert pod["spec"]["nodeSelector"] == {"pool": "training"}
    assert {"key": "training"} in pod["spec"]["tolerations"]
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "main"
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == workload["metadata"]["name"]
    cluster.until("digits", lambda: holds(queue.workloads("digits")[0], "PodsReady"))
    is_complete(cluster, "digits")
    cluster.until("digits", lambda: not finalizers_of(queue, "digits"))
    (workload,) = queue.workloads("digits")
    assert holds(workload, "Finished")
    # Create, PodsReady, Finished, and the finalizer.
    assert workload["metadata"]["generation"] <= 2


def finalizers_of(queue, job):
    return queue.workloads(job)[0]["metadata"].get("finalizers")


def statuses_before_a_pod(writes, job):
    """List the writes of the job's status before its first pod."""

    def creates_no_pod(write):
        return not (write.startswith("POST") and "/pods" in write)

    before = itertools.takewhile(creates_no_pod, writes)
    return [write for write in before if f"/{job}/status" in write]


def test_an_undisturbed_job_writes_its_workload_four_times(cluster, queue, an_operator):
    gate = Gate(cluster.apiserver)
    try:
        an_operator(kubeconfig=gate.kubeconfig)
        cluster.create_job("alone")
        cluster.is_running("alone")
        is_complete(cluster, "alone")
        alone = gate.writes.copy()
        assert not [write for write in alone if "kueue" in write or "podgroups" in write]
        cluster.create_job("digits", labels=TEAM)
        is_waiting(cluster, "digits")
        queue.admit("digits")
        cluster.is_running("digits")
        cluster.until("digits", lambda: holds(queue.workloads("digits")[0], "PodsReady"))
        is_complete(cluster, "digits")
        name = queue.workloads("digits")[0]["metadata"]["name"]
        cluster.until("digits", lambda: not finalizers_of(queue, "digits"))
        of_workload = [write for write in gate.writes if "/workloads" in write]
        assert [write.partition(name)[2] for write in of_workload[1:]] == ["/status", "/status", ""]
        assert (of_workload[0].split()[0], len(of_workload)) == ("POST", 4)
        # The status of the waiting job, and that of its attempt. After the first pod, the number
        # depends on how many pods' news each look finds.
        assert len(statuses_before_a_pod(gate.writes[len(alone) :], "digits")) == 2
    finally:
        gate.close()


def test_a_job_joins_the_queue_that_takes_jobs_without_one(cluster, queue, an_operator):
    queue.create_default()
    an_operator()
    cluster.create_job("digits")
    queue.admit("digits")
    cluster.is_running("digits")
    assert queue.workloads("digits")[0]["spec"]["queueName"] == "default"


def test_a_preempted_job_gives_its_room_back_and_goes_on_later(cluster, queue, an_operator):
    an_operator()
    cluster.create_job("digits", labels=TEAM)
    queue.admit("digits")
    cluster.is_running("digits")
    queue.evict("digits")
    is_waiting(cluster, "digits", "Preempted")
    cluster.until("digits", lambda: not has_room(queue.workloads("digits")[0]))
    assert "admission" not in queue.workloads("digits")[0]["status"]
    assert cluster.pods("digits") == {}
    queue.admit("digits")
    cluster.is_running("digits", attempt=1)
    assert cluster.status("digits")["restarts"] == 0
    is_complete(cluster, "digits", attempt=1)


def test_a_class_of_priority_that_does_not_exist_is_named(cluster, queue, an_operator):
    an_operator()
    cluster.create_job("digits", labels={**TEAM, "kueue.x-k8s.io/priority-class": "high"})
    cluster.until("digits", lambda: "does not exist" in cluster.status("digits").get("message", ""))
    assert cluster.status("digits")["message"] == (
        "WorkloadPriorityClass high does not exist; choose another one"
    )
    assert queue.workloads("digits") == []


def test_a_wrong_label_is_named_and_a_right_one_is_taken(cluster, queue, an_operator):
    an_operator()
    label = "kueue.x-k8s.io/max-exec-time-seconds"
    cluster.create_job("digits", labels={**TEAM, label: "an-hour"})
    cluster.until("digits", lambda: "correct the" in cluster.status("digits").get("message", ""))
    assert cluster.status("digits")["message"] == (
        f"metadata.labels.{label}: must be an integer from 1 to 2147483647 in quotes, got "
        '"an-hour"; correct the label'
    )
    assert queue.workloads("digits") == []
    cluster.apiserver.kubectl(
        "label", "-n", cluster.namespace, "--overwrite", "ddpjob/digits", f"{label}=3600"
    )
    queue.admit("digits")
    cluster.is_running("digits")
    assert queue.workloads("digits")[0]["spec"]["maximumExecutionTimeSeconds"] == 3600


def test_without_kueue_nothing_stops_and_nothing_begins_until_it_comes_back(
    apiserver, cluster, queue, an_operator
):
    an_operator()
    cluster.create_job("runs", labels=TEAM)
    queue.admit("runs")
    cluster.is_running("runs")
    serve_kueue(apiserver, is_served=False)
    try:
        cluster.create_job("waits", labels=TEAM)
        is_waiting(cluster, "waits", "QueueUnavailable")
        assert cluster.status("runs")["phase"] == "Running"
        is_complete(cluster, "runs")
    finally:
        serve_kueue(apiserver, is_served=True)
    queue.admit("waits")
    cluster.is_running("waits")
    cluster.until("runs", lambda: not has_room(queue.workloads("runs")[0]))


async def test_an_object_of_a_kind_that_is_not_served_is_not_gone(apiserver, cluster, queue):
    api = ApiClient(await configuration(apiserver.kubeconfig))
    read = Request(Verb.GET, WORKLOADS, cluster.namespace, "digits")
    kinds = ReadDocument(WORKLOADS.api)
    try:
        assert not await api.read(read)
        assert await api.read(kinds)
        serve_kueue(apiserver, is_served=False)
        with pytest.raises(ApiError, match="404 page not found"):
            await api.read(read)
        apiserver.wait_for(lambda: apiserver.request("GET", f"/{WORKLOADS.api}").code == 404)
        assert not await api.read(kinds)
    finally:
        serve_kueue(apiserver, is_served=True)
        await api.close()


def test_a_workload_is_let_go_if_its_job_went_while_no_operator_was_there(
    cluster, queue, an_operator
):
    operator = an_operator()
    cluster.create_job("digits", labels=TEAM)
    queue.admit("digits")
    cluster.is_running("digits")
    operator.kill()
    cluster.remove_lease("ddpjob-operator")
    cluster.apiserver.delete_jobs(cluster.namespace)
    queue.delete("digits")
    an_operator()
    # A running pod still uses the room.
    cluster.wait(lambda: cluster.holder())
    assert len(queue.workloads("digits")) == 1
    for pod in cluster.pods("digits"):
        cluster.vanishes(pod)
    cluster.wait(lambda: not queue.workloads("digits"))


# `make test` kills it at every fourth write, and `make test-slow` at each.
@pytest.mark.parametrize(
    ("writes", "passed_on"),
    [
        pytest.param(itertools.count(1, 4), False, id="before-the-write"),
        pytest.param(itertools.count(3, 4), True, id="after-the-write"),
        pytest.param(itertools.count(1), False, id="before-each-write", marks=pytest.mark.slow),
        pytest.param(itertools.count(1), True, id="after-each-write", marks=pytest.mark.slow),
    ],
)
def test_an_operator_killed_at_any_write_neither_loses_room_nor_keeps_it(
    cluster, queue, an_operator, writes, passed_on
):
    gate = Gate(cluster.apiserver)

    def fresh():
        cluster.remove_lease("ddpjob-operator")
        return an_operator(kubeconfig=gate.kubeconfig)

    def survives(job, step):
        """Do a step of a job's life; if the operator was killed meanwhile, start another one."""
        nonlocal operator, was_killed
        cluster.until(job, lambda: gate.is_shut or step())
        if gate.is_shut:
            was_killed = True
            gate.open()
            assert operator.is_over
            operator = fresh()
            cluster.until(job, step)

    operator = fresh()
    for k in writes:
        job = f"job-{k}"
        was_killed = False
        gate.on_shut = operator.kill
        gate.shut_at(k, passed_on)
        cluster.create_job(job, labels=TEAM)
        survives(job, lambda: len(queue.unfinished(job)) == 1)  # noqa: B023
        queue.admit(job)
        survives(job, lambda: cluster.status(job).get("phase") == "Running")  # noqa: B023
        queue.evict(job)
        survives(job, lambda: not any(map(has_room, queue.workloads(job))))  # noqa: B023
        assert cluster.pods(job) == {}
        queue.admit(job)
        survives(job, lambda: runs_attempt(cluster, job, 1))  # noqa: B023
        cluster.change_job(job, suspend=True)
        survives(job, lambda: not queue.workloads(job))  # noqa: B023
        assert cluster.pods(job) == {}
        cluster.change_job(job, suspend=False)
        survives(job, lambda: len(queue.unfinished(job)) == 1)  # noqa: B023
        queue.admit(job)
        survives(job, lambda: runs_attempt(cluster, job, 2))  # noqa: B023
        attempt = cluster.status(job)["attempt"]["number"]
        for index in (0, 1):
            cluster.ends(f"{job}-{attempt}-{index}")
        survives(job, lambda: is_let_go(queue, job))  # noqa: B023
        (workload,) = queue.workloads(job)
        assert holds(workload, "Finished")
        assert cluster.status(job)["restarts"] == 0
        gate.open()
        if not was_killed:
            break
    gate.close()
    assert k > 15, "not every write was tried"


def runs_attempt(cluster, job, number):
    status = cluster.status(job)
    return status.get("phase") == "Running" and status["attempt"]["number"] >= number


def is_let_go(queue, job):
    return not any(one["metadata"].get("finalizers") for one in queue.workloads(job))
