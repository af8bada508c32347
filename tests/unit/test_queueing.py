"""Jobs with a queue: whether they may run, and what becomes of their Workloads."""

from dataclasses import replace

import pytest
from builders.containers import creating, running, waiting
from builders.jobs import JOB_UID, a_condition, a_finished_job, a_running_job, a_status
from builders.jobs import a_job as a_job_without_queue
from builders.pods import a_pod, read_pods
from builders.surroundings import scheduling_gated, unschedulable
from builders.times import NOW, at

from ddpjob import DDPJob
from ddpjob.core.api import kueue
from ddpjob.core.api.history import Place
from ddpjob.core.api.kueue import FINALIZER, Demand, read_workload, workload_name
from ddpjob.core.api.names import Condition, Identity, Phase
from ddpjob.core.api.queue import Queue, read_queue
from ddpjob.core.api.readers import SpecError
from ddpjob.core.api.reasons import Reason
from ddpjob.core.decide.queueing import NOT_SERVED
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import ApiState, Refusal, observe
from ddpjob.core.plan import PlaceAction

TEAM = Queue("team")
OWNER = Identity("ml", "digits", JOB_UID)

GRANTED = {"QuotaReserved": (True, "QuotaReserved", ""), "Admitted": (True, "Admitted", "")}
NO_ROOM = {"QuotaReserved": (False, "Pending", "insufficient unused quota for cpu")}
PREEMPTED = {**GRANTED, "Evicted": (True, "Preempted", "a job of team b has a better claim")}
GIVEN_BACK = {**NO_ROOM, "Evicted": (True, "Preempted", "a job of team b has a better claim")}


def a_workload(number=1, *, count=2, queue=TEAM, deleting=False, held=True, **conditions):
    """Return a Workload of the job, as the API server has it. A condition is given by its type."""
    body = kueue.new_workload(OWNER, number, Demand(queue, count, {"spec": {"containers": []}}))
    body["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": "7"}
    if deleting:
        body["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    if not held:
        body["metadata"]["finalizers"] = ["other/finalizer"]
    body["status"] = {
        "conditions": [
            {
                "type": kind,
                "status": str(holds),
                "reason": reason,
                "message": message,
                "lastTransitionTime": "2026-11-21T11:00:00Z",
            }
            for kind, (holds, reason, message) in conditions.items()
        ]
    }
    if conditions.get("QuotaReserved", (False,))[0]:
        assignment = {"name": "main", "count": count, "flavors": {"cpu": "workers", "memory": "m"}}
        body["status"]["admission"] = {"podSetAssignments": [assignment]}
    return body


def decide_for(job, *bodies, pods=(), state=ApiState.SERVED, queue=TEAM, **surroundings):
    workloads = tuple(map(read_workload, bodies))
    job = replace(job, queue=queue)
    observation = observe(
        job, read_pods(*pods), kueue=state, workloads=workloads, is_current=True, **surroundings
    )
    return decide(observation, NOW)


def a_new_job(**fields):
    return a_job_without_queue(**fields)


def a_queued_job(number=1, uid="", **spec):
    conditions = a_condition(Condition.SUSPENDED)
    status = a_status(ran=False, latched=False, conditions=conditions, place=Place(number, uid))
    return a_job_without_queue(status=replace(status, attempt=type(status.attempt)()), **spec)


def a_running_job_with_place(**fields):
    return a_running_job(place=Place(1, "uid-1"), **fields)


RUN = [a_pod(0, running()), a_pod(1, running())]


# May it run?


@pytest.mark.parametrize(
    ("labels", "queue"),
    [
        (None, None),
        ({}, None),
        ({"kueue.x-k8s.io/queue-name": ""}, None),
        ({"kueue.x-k8s.io/queue-name": "team"}, TEAM),
        (
            {
                "kueue.x-k8s.io/queue-name": "team",
                "kueue.x-k8s.io/priority-class": "high",
                "kueue.x-k8s.io/max-exec-time-seconds": "60",
            },
            Queue("team", "high", "60"),
        ),
    ],
)
def test_the_queue_of_a_job_is_in_its_labels(labels, queue):
    assert read_queue(labels) == queue


@pytest.mark.parametrize(("text", "seconds"), [("", 0), ("1", 1), ("2147483647", 2**31 - 1)])
def test_the_longest_time_in_a_place_is_a_number(text, seconds):
    assert Queue("team", max_time=text).read_max_time() == seconds


@pytest.mark.parametrize("text", ["an hour", "0", "-1", "1.5", "2147483648", "9" * 5000, "²"])
def test_another_longest_time_is_refused_before_and_after_the_job_is_created(text):
    with pytest.raises(SpecError, match=r"max-exec-time-seconds: must be an integer from 1 to "):
        Queue("team", max_time=text).read_max_time()
    labels = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/max-exec-time-seconds": text}
    manifest = DDPJob.create("digits", image="i", args=["a.py"]).manifest()
    manifest["metadata"]["labels"] = labels
    with pytest.raises(SpecError, match="correct the label"):
        DDPJob.from_manifest(manifest).check()


def test_a_new_job_takes_a_number_before_it_asks_for_room():
    plan = decide_for(a_new_job())
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, Reason.QUEUED)
    assert plan.status.message == "waits for room in the queue team"
    assert plan.status.place == Place(1)
    assert plan.place.action is PlaceAction.CREATE
    assert (plan.create, plan.status.attempt.number) == ((), None)
    assert [event.reason for event in plan.events] == [Reason.QUEUED]


def test_a_job_that_waits_has_the_words_of_kueue():
    plan = decide_for(a_queued_job(), a_workload(**NO_ROOM))
    assert plan.status.message == (
        "waits for room in the queue team: insufficient unused quota for cpu"
    )
    assert (plan.place, plan.status.place) == (None, Place(1))


def test_a_job_with_room_begins():
    plan = decide_for(a_queued_job(), a_workload(**GRANTED))
    assert plan.status.attempt.number == 0
    assert plan.new_pods == (0, 1)
    assert plan.status.place == Place(1, "uid-1")
    suspended = plan.status.conditions[-1]
    assert not plan.status.has(Condition.SUSPENDED)
    assert (suspended.reason, suspended.message) == (
        "Admitted",
        "the queue team has given the job room",
    )


def test_a_suspended_job_asks_for_no_room_and_gives_its_own_back():
    plan = decide_for(a_new_job(suspend=True))
    assert (plan.status.reason, plan.status.place, plan.place) == (
        Reason.SUSPENDED,
        Place(),
        None,
    )
    plan = decide_for(a_queued_job(suspend=True), a_workload(**NO_ROOM))
    assert plan.place.action is PlaceAction.REMOVE


@pytest.mark.parametrize(
    ("workload", "reason", "words"),
    [
        (PREEMPTED, "Preempted", "taken the room of the job back: a job of team b has"),
        (GIVEN_BACK, "Preempted", "waits for room in the queue team: insufficient unused"),
    ],
)
def test_an_evicted_job_ends_its_pods_and_waits_again(workload, reason, words):
    job = a_running_job_with_place()
    plan = decide_for(job, a_workload(**workload), pods=RUN)
    assert (plan.status.phase, plan.status.reason) == (Phase.PENDING, reason)
    assert words in plan.status.message
    assert "waiting for pod digits-0-0" in plan.status.message
    assert [delete.grace for delete in plan.delete] == [None, None]
    assert plan.place is None
    assert plan.status.attempts[0].reason == "Preempted"
    assert plan.status.budget.restarts == 0


def test_room_is_given_back_when_no_pod_runs():
    job = a_running_job_with_place()
    plan = decide_for(job, a_workload(**PREEMPTED), pods=[])
    assert plan.place.action is PlaceAction.GIVE_BACK


@pytest.mark.parametrize("state", NOT_SERVED)
def test_without_kueue_nothing_begins_and_nothing_is_stopped(state):
    plan = decide_for(a_new_job(), state=state)
    assert (plan.status.reason, plan.status.message) == (Reason.NO_QUEUE, NOT_SERVED[state])
    assert plan.place is None
    plan = decide_for(a_running_job_with_place(), pods=RUN, state=state)
    assert (plan.status.phase, plan.delete) == (Phase.RUNNING, ())


def test_with_queues_switched_off_the_label_is_ignored():
    plan = decide_for(a_new_job(), state=ApiState.OFF)
    assert plan.new_pods == (0, 1)
    assert plan.place is None


def test_a_refusal_of_the_workload_is_told_and_tried_again_later():
    refusal = Refusal(Reason.NO_QUEUE, "WorkloadPriorityClass high does not exist", at(5))
    plan = decide_for(a_queued_job(), refusal=refusal)
    assert plan.status.message == "WorkloadPriorityClass high does not exist"
    assert (plan.place, plan.wake_after) == (None, 5)
    later = Refusal(Reason.NO_QUEUE, "WorkloadPriorityClass high does not exist", at(-1))
    assert decide_for(a_queued_job(), refusal=later).place.action is PlaceAction.CREATE


def test_a_pod_that_kueue_has_taken_for_one_of_its_own_is_a_reason():
    gates = [{"name": "kueue.x-k8s.io/admission"}]
    (pod,) = read_pods(a_pod(0, scheduling_gated(), schedulingGates=gates))
    assert pod.blocked.reason == Reason.HELD_BY_KUEUE
    assert "integrations.externalFrameworks" in pod.blocked.message


def test_the_finalizer_of_kueue_is_a_reason_unless_a_pod_has_another_one():
    for status, reason in (
        (creating(0), Reason.HELD_BY_KUEUE),
        (waiting("ImagePullBackOff"), Reason.IMAGE_PULL),
        (unschedulable("no node"), Reason.UNSCHEDULABLE),
    ):
        body = a_pod(0, status)
        body["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
        (pod,) = read_pods(body)
        assert pod.blocked.reason == reason


# A new place


@pytest.mark.parametrize(
    ("workload", "fields"),
    [
        ({"count": 3}, {}),
        ({"queue": Queue("other")}, {}),
        ({"deleting": True}, {}),
    ],
    ids=["another number of nodes", "another queue", "deleted by an administrator"],
)
def test_a_place_of_no_use_is_left_once_the_pods_have_ended(workload, fields):
    job = a_running_job_with_place(**fields)
    body = a_workload(**GRANTED, **workload)
    plan = decide_for(job, body, pods=RUN)
    assert (plan.status.reason, len(plan.delete), plan.place) == (Reason.QUEUED, 2, None)
    plan = decide_for(job, body)
    assert plan.place.action is PlaceAction.REMOVE
    # The Workload is gone.
    plan = decide_for(job)
    assert plan.status.place == Place(2)
    assert plan.place.action is PlaceAction.CREATE


def test_a_place_that_was_never_had_keeps_its_number():
    plan = decide_for(a_queued_job(number=3))
    assert plan.status.place == Place(3)
    assert plan.place.action is PlaceAction.CREATE


def test_a_job_whose_label_was_removed_runs_without_a_place():
    plan = decide_for(a_queued_job(), a_workload(**NO_ROOM), queue=None)
    assert plan.status.attempt.number == 0
    assert plan.place.action is PlaceAction.REMOVE


@pytest.mark.parametrize("conditions", [GRANTED, PREEMPTED])
def test_a_job_whose_label_was_removed_gives_its_room_back_before_it_goes_on(conditions):
    job = a_running_job_with_place()
    plan = decide_for(job, a_workload(**conditions), pods=RUN, queue=None)
    assert plan.status.message.startswith("leaves the queue team; waiting for pod digits-0-0")
    assert (len(plan.delete), plan.place) == (2, None)
    plan = decide_for(job, a_workload(**conditions), queue=None)
    assert plan.place.action is PlaceAction.REMOVE


def test_a_workload_that_has_lost_its_finalizer_is_finished_and_removed_all_the_same():
    done = a_running_job_with_place(conditions=a_condition(Condition.COMPLETE))
    plan = decide_for(done, a_workload(held=False, **GRANTED))
    assert plan.place.action is PlaceAction.FINISH
    suspended = a_queued_job(suspend=True)
    plan = decide_for(suspended, a_workload(held=False, **GRANTED))
    assert plan.place.action is PlaceAction.REMOVE
    gone = a_workload(held=False, deleting=True, **GRANTED)
    assert decide_for(suspended, gone).place is None


def test_a_finished_job_whose_spec_cannot_be_read_gives_its_room_back():
    done = a_running_job_with_place(conditions=a_condition(Condition.COMPLETE))
    unreadable = replace(done, spec=None, spec_error="spec.nodes: is wrong")
    plan = decide_for(unreadable, a_workload(**GRANTED))
    assert plan.place.action is PlaceAction.FINISH


def test_a_workload_of_an_older_number_is_removed():
    surplus = a_workload(1, **NO_ROOM)
    plan = decide_for(a_queued_job(number=2), surplus, a_workload(2, **NO_ROOM))
    assert plan.place.action is PlaceAction.REMOVE
    assert plan.place.workload.name == workload_name("digits", JOB_UID, 1)


# The run, and its end


def test_kueue_is_told_when_the_workers_have_met_and_when_they_have_to_meet_again():
    job = a_running_job_with_place()
    plan = decide_for(job, a_workload(**GRANTED), pods=RUN)
    assert plan.place.action is PlaceAction.READY
    ready = {"PodsReady": (True, "Started", "")}
    assert decide_for(job, a_workload(**GRANTED, **ready), pods=RUN).place is None
    again = a_running_job_with_place(ran=False, latched=False)
    plan = decide_for(again, a_workload(**GRANTED, **ready), pods=RUN[:0])
    assert plan.place.action is PlaceAction.NOT_READY


def test_a_finished_job_gives_its_room_back_when_no_pod_runs():
    done = a_running_job_with_place(conditions=a_condition(Condition.COMPLETE))
    granted = a_workload(**GRANTED)
    assert decide_for(done, granted, pods=RUN).place is None
    assert decide_for(done, granted).place.action is PlaceAction.FINISH
    finished = {**GRANTED, "Finished": (True, "Succeeded", "")}
    assert decide_for(done, a_workload(**finished)).place.action is PlaceAction.FINISH
    assert decide_for(done, a_workload(held=False, **finished)).place is None


# Changes of a Workload


def conditions_of(change):
    return {one["type"]: (one["status"], one["reason"]) for one in change["conditions"]}


def test_what_is_given_back_is_queued_again_after_a_preemption_only():
    change = kueue.given_back(read_workload(a_workload(**PREEMPTED)), NOW)
    assert change["admission"] is None
    assert conditions_of(change) == {
        "QuotaReserved": ("False", "Pending"),
        "Admitted": ("False", "NoReservation"),
        "Evicted": ("True", "Preempted"),
        "Requeued": ("True", "Preempted"),
        "PodsReady": ("False", "WaitForStart"),
    }
    stopped = {**GRANTED, "Evicted": (True, "ClusterQueueStopped", "")}
    change = kueue.given_back(read_workload(a_workload(**stopped)), NOW)
    assert conditions_of(change)["Requeued"] == ("False", "ClusterQueueStopped")


def test_the_time_with_room_is_added_up_for_its_limit():
    body = a_workload(**PREEMPTED)
    body["status"]["accumulatedPastExecutionTimeSeconds"] = 100
    change = kueue.given_back(read_workload(body), NOW)
    assert change["accumulatedPastExecutionTimeSeconds"] == 100 + 3600
    again = kueue.given_back(read_workload(a_workload(**GIVEN_BACK)), NOW)
    assert again["accumulatedPastExecutionTimeSeconds"] == 0


def test_a_change_keeps_the_other_conditions_and_the_time_of_what_stays():
    workload = read_workload(a_workload(**GRANTED))
    change = kueue.pods_ready(workload, is_ready=True, now=NOW)
    found = {one["type"]: one for one in change["conditions"]}
    assert set(found) == {"QuotaReserved", "Admitted", "PodsReady"}
    assert found["Admitted"]["lastTransitionTime"] == "2026-11-21T11:00:00Z"
    assert found["PodsReady"]["lastTransitionTime"] == "2026-11-21T12:00:00Z"


def test_a_workload_of_another_kind_is_not_read():
    body = a_workload()
    body["metadata"]["ownerReferences"][0]["kind"] = "Job"
    assert read_workload(body) is None
    del body["metadata"]["ownerReferences"]
    body["metadata"]["labels"].pop("kueue.x-k8s.io/job-uid")
    assert read_workload(body) is None


def test_a_workload_whose_owner_was_taken_off_belongs_to_the_job_in_its_labels():
    """`kubectl delete --cascade=orphan` takes the owner off."""
    body = a_workload()
    before = read_workload(body)
    del body["metadata"]["ownerReferences"]
    assert read_workload(body) == before


def test_a_workload_of_the_same_name_with_another_uid_is_removed_and_no_place():
    job = a_running_job(place=Place(1, "another-uid"))
    plan = decide_for(job, a_workload(**GRANTED), pods=RUN)
    assert plan.status.place == Place(2)
    assert plan.status.reason == Reason.QUEUED
    assert len(plan.delete) == 2
    later = decide_for(job, a_workload(**GRANTED))
    assert later.place.action is PlaceAction.REMOVE


# A job being deleted


def a_job_being_deleted():
    return replace(a_running_job_with_place(), deleting=True)


def test_a_job_being_deleted_leaves_its_pods_to_the_garbage_collector():
    job = a_job_being_deleted()
    plan = decide_for(job, a_workload(**GRANTED), pods=RUN)
    assert (plan.delete, plan.place, plan.status) == ((), None, job.status)


@pytest.mark.parametrize(
    "workload", [a_workload(**PREEMPTED), a_workload(**GRANTED, deleting=True)]
)
def test_a_job_held_by_a_finalizer_of_others_gives_its_room_back_if_the_queue_takes_it(workload):
    job = a_job_being_deleted()
    plan = decide_for(job, workload, pods=RUN)
    assert len(plan.delete) == 2
    assert (plan.place, plan.status) == (None, job.status)
    assert decide_for(job, workload).place.action is PlaceAction.REMOVE


def test_a_job_being_deleted_gives_its_room_back_once_its_pods_have_ended():
    plan = decide_for(a_job_being_deleted(), a_workload(**GRANTED))
    assert plan.place.action is PlaceAction.REMOVE
    assert plan.new_pods == ()


def test_the_finalizer_of_others_is_kept():
    body = a_workload()
    body["metadata"]["finalizers"].append("other/finalizer")
    workload = read_workload(body)
    assert (workload.held, workload.finalizers) == (True, ("other/finalizer",))
    assert body["metadata"]["finalizers"][0] == FINALIZER


def test_the_name_of_a_workload_tells_places_and_jobs_apart():
    names = {
        workload_name("digits", uid, number) for uid in (JOB_UID, "other") for number in (1, 2)
    }
    assert len(names) == 4
    assert all(len(name) <= 63 for name in names)


def test_the_place_has_the_labels_of_its_flavors_and_what_admission_checks_ask_for():
    body = a_workload(**GRANTED)
    update = {"name": "main", "labels": {"a": "b"}, "nodeSelector": {"zone": "z"}}
    body["status"]["admissionChecks"] = [{"name": "c", "podSetUpdates": [update]}]
    workload = read_workload(body)
    assert workload.flavors == ("workers", "m")
    taint = {"key": "gpu", "operator": "Exists"}
    flavors = [{"spec": {"nodeLabels": {"pool": "p"}, "tolerations": [taint]}}, {"spec": {}}]
    found = kueue.placement_of(workload, flavors)
    assert found.node_labels == {"pool": "p", "zone": "z"}
    assert found.tolerations == [taint]
    assert found.labels == {"kueue.x-k8s.io/podset": "main", "a": "b"}
    assert found.annotations == {"kueue.x-k8s.io/workload": workload.name}


def test_a_job_whose_status_was_lost_keeps_the_room_that_it_has():
    job = a_job_without_queue()
    old, present = a_workload(number=2, Finished=(True, "", "")), a_workload(number=3, **GRANTED)
    plan = decide_for(job, old, present, pods=RUN)
    assert plan.status.place.number == 3
    assert (plan.delete, plan.place) == ((), None)


def test_a_place_with_checks_that_are_not_ready_is_no_lack_of_room():
    body = a_workload(QuotaReserved=(True, "QuotaReserved", "Quota reserved"))
    checks = [
        {"name": "nodes", "state": "Pending", "message": "2 nodes are made"},
        {"name": "done", "state": "Ready"},
    ]
    body["status"]["admissionChecks"] = checks
    assert decide_for(a_queued_job(), body).status.message == (
        "has room in the queue team, and waits for its admission checks: nodes (2 nodes are made)"
    )


def test_an_attempt_that_had_no_pod_before_it_lost_its_room_is_not_in_the_history():
    job = a_job_without_queue(status=a_status(attempt=1, ran=False, latched=False, place=Place(1)))
    plan = decide_for(job, a_workload(**NO_ROOM))
    assert plan.status.reason == Reason.QUEUED
    assert plan.status.attempts == ()


def test_a_new_job_joins_the_queue_that_takes_jobs_without_one():
    plan = decide_for(a_new_job(), queue=None, has_default_queue=True)
    assert (plan.join_queue, plan.create) == ("default", ())
    assert plan.status.message == (
        "joins the LocalQueue default, which takes the jobs of its namespace"
    )


@pytest.mark.parametrize(
    ("job", "more"),
    [
        pytest.param(a_new_job(), {"queue": TEAM}, id="it has a queue"),
        pytest.param(a_new_job(suspend=True), {"queue": None}, id="it is suspended"),
        pytest.param(a_running_job(), {"queue": None, "pods": RUN}, id="it runs"),
        pytest.param(a_new_job(), {"queue": None, "state": ApiState.OFF}, id="without queues"),
        pytest.param(a_finished_job(), {"queue": None}, id="it has finished"),
    ],
)
def test_a_job_does_not_join_the_queue_that_takes_others(job, more):
    assert decide_for(job, has_default_queue=True, **more).join_queue == ""


def test_a_new_job_waits_until_the_local_queues_are_read():
    plan = decide_for(a_new_job(), queue=None, state=ApiState.UNKNOWN, has_default_queue=None)
    assert (plan.create, plan.status.phase, plan.join_queue) == ((), "", "")
    assert plan.wake_after == 1.0


def test_a_job_that_lost_the_label_of_its_queue_gets_it_again_and_runs_on():
    # As by `kubectl replace` of a manifest without the label.
    default = a_workload(queue=Queue("default"), **GRANTED)
    job = a_running_job_with_place()
    plan = decide_for(job, default, pods=RUN, queue=None, has_default_queue=True)
    assert (plan.join_queue, plan.delete) == ("default", ())
    assert plan.status.phase == Phase.RUNNING
    # If the label is refused, the job goes on until the next try, under all other rules.
    refusal = Refusal(Reason.FORBIDDEN, "denied by a policy", at(30))
    surroundings = {"queue": None, "has_default_queue": True, "refusal": refusal}
    plan = decide_for(job, default, pods=RUN, **surroundings)
    assert (plan.join_queue, plan.delete, plan.status.phase) == ("", (), Phase.RUNNING)
    lost = a_pod(0, running(), deleted_at=NOW)
    plan = decide_for(job, default, pods=[lost, RUN[1]], **surroundings)
    assert plan.status.attempt.number == 1


def test_a_job_that_is_taken_up_again_joins_before_its_first_pod():
    job = a_job_without_queue(status=a_status(attempt=2, ran=False, latched=False))
    plan = decide_for(job, queue=None, has_default_queue=True)
    assert (plan.join_queue, plan.create) == ("default", ())


def test_a_resumed_job_joins_the_queue_that_was_made_while_it_ran():
    job = a_job_without_queue(status=a_status(conditions=a_condition(Condition.SUSPENDED)))
    plan = decide_for(job, queue=None, has_default_queue=True)
    assert (plan.join_queue, plan.create) == ("default", ())
    waiting = decide_for(job, pods=RUN, queue=None, has_default_queue=True)
    assert waiting.join_queue == ""


def test_a_label_that_cannot_be_written_is_the_reason():
    refusal = Refusal(Reason.FORBIDDEN, "ddpjobs is forbidden", at(30))
    plan = decide_for(a_new_job(), queue=None, has_default_queue=True, refusal=refusal)
    assert (plan.status.reason, plan.join_queue, plan.create) == (Reason.FORBIDDEN, "", ())
    assert plan.status.attempt.number is None
    # No pod comes before the label.
    again = decide_for(
        replace(a_new_job(), status=plan.status),
        queue=None,
        has_default_queue=True,
        refusal=replace(refusal, retry_at=NOW),
    )
    assert (again.join_queue, again.create) == ("default", ())


def test_a_pod_that_waits_for_a_node_which_the_queue_has_replaced_is_made_again():
    marks = {"kueue.x-k8s.io/podset-preferred-topology": "rack"}
    host = "kubernetes.io/hostname"
    workload = a_workload(**GRANTED)
    (assignment,) = workload["status"]["admission"]["podSetAssignments"]
    one_each = {
        "domainCount": 2,
        "podCounts": {"universal": 1},
        "valuesPerLevel": [{"individual": {"roots": ["node-b", "node-c"]}}],
    }
    assignment["topologyAssignment"] = {"levels": [host], "slices": [one_each]}
    pods = [a_pod(0, nodeSelector={host: "node-a"}), a_pod(1, nodeSelector={host: "node-b"})]
    for pod in pods:
        pod["metadata"]["annotations"] = marks
    job = a_job_without_queue(
        status=a_status(ran=False, place=Place(1, "uid-1")),
        scheduling={"topology": {"preferred": "rack"}},
    )
    workload["spec"]["podSets"][0]["topologyRequest"] = {"preferred": "rack"}
    plan = decide_for(job, workload, pods=pods)
    assert [(delete.name, delete.grace) for delete in plan.delete] == [("digits-0-0", 0)]
    job = replace(job, status=plan.status)
    # Its deletion takes a moment.
    dying = a_pod(0, nodeSelector={host: "node-a"}, deleted_at=NOW)
    dying["metadata"]["annotations"] = marks
    plan = decide_for(job, workload, pods=[dying, pods[1]])
    assert (plan.delete, plan.status.attempt.latched) == ((), False)
    # A finalizer of others must not keep the job from its other rules for ever.
    held = a_pod(0, nodeSelector={host: "node-a"}, deleted_at=at(-3600))
    held["metadata"]["annotations"] = marks
    assert decide_for(job, workload, pods=[held, pods[1]]).status.attempt.number == 1
    plan = decide_for(replace(job, status=plan.status), workload, pods=pods[1:])
    assert (plan.new_pods, plan.status.attempt.number) == ((0,), 0)
