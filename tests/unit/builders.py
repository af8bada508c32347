"""Builders for the core's input: manifests, statuses, and pods from an API server.

A pod is built from its index and its status: `a_pod(1, failed(torchrun_summary(rank=1)))`.
`plan_for` decides on a job and its pods. Times are NOW and seconds after it.
"""

import json
from dataclasses import fields as fields_of
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ddpjob.core.agent_files import config_map_name
from ddpjob.core.api import names
from ddpjob.core.api.conditions import (
    Conditions,
    find_condition,
    set_condition,
    stamp_conditions,
)
from ddpjob.core.api.history import (
    Backoff,
    EndedAttempt,
    FailedNode,
    LastFailure,
    Place,
    Retried,
    UnreachableNode,
    Yielding,
)
from ddpjob.core.api.job import Job
from ddpjob.core.api.names import Condition
from ddpjob.core.api.parts import write
from ddpjob.core.api.status import (
    Account,
    Attempt,
    Host,
    PodCounts,
    Resolved,
    Status,
    UsedBudget,
)
from ddpjob.core.api.times import format_time
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.nodes import read_node
from ddpjob.core.observe.observation import Nodes, Observation, Pod, observe
from ddpjob.core.observe.pods import read_pod
from ddpjob.core.plan import Plan

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
JOB_UID = "0b4c6f3e-9d52-4c43-b4f0-2f4c0f6f1d11"

# The end of the message of a failed job without a checkpoint.
WHAT_TO_DO = (
    "correct the cause, then raise spec.retries (ddpjob retry digits): the job begins anew, unless "
    "its script saves checkpoints itself. To change its spec, delete it and create it again"
)

# The last 2048 bytes of the logs of torchrun 2.13. A kubelet keeps only this part of a log.
TAILS = Path(__file__).parent / "data" / "torchrun"


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def torchrun_tail(name: str) -> str:
    """Return a log as the API server shows it, with a character that was cut in two replaced."""
    return (TAILS / f"{name}.txt").read_text(encoding="utf-8", errors="replace")


# Jobs


def a_spec(**fields):
    return {"nodes": 2, "image": "trainer:1", "args": ["train.py"], **fields}


def a_manifest(*, name="digits", status=None, generation=1, deleting=False, **spec):
    metadata = {"name": name, "namespace": "ml", "uid": JOB_UID, "generation": generation}
    if deleting:
        metadata["deletionTimestamp"] = format_time(NOW)
    return {"metadata": metadata, "spec": a_spec(**spec), "status": status or {}}


def a_job(*, status: Status | None = None, **fields) -> Job:
    """Return a job of two nodes. Without a `status` the operator has not seen it yet."""
    return Job.from_dict(a_manifest(status=status.to_dict() if status else None, **fields))


def a_condition(kind: Condition, holds: bool = True, *, now=NOW) -> Conditions:
    """Return the conditions of a job with only this one."""
    return stamp_conditions(set_condition((), kind, holds, "Reason", "message"), 1, now)


# The parts with fields that a test gives by their names alone.
PARTS = {
    field.name: part
    for part, cls in (("attempt", Attempt), ("budget", UsedBudget), ("account", Account))
    for field in fields_of(cls)
}


def changed(status: Status, **fields) -> Status:
    """Return a status with other values of its fields, and of those of its parts."""
    for name, value in fields.items():
        part = PARTS.get(name)
        if part:
            name, value = part, replace(getattr(status, part), **{name: value})
        status = replace(status, **{name: value})
    return status


def a_status(*, attempt=0, nodes=2, latched=True, ran=True, **fields) -> Status:
    """Return the status of a job in the middle of an attempt.

    `latched`: every pod of the attempt was seen. `ran`: all its nodes were running at once.
    """
    status = Status(
        phase="Running" if ran else "Starting",
        reason="NodesRunning" if ran else "CreatingPods",
        observed_generation=1,
        conditions=a_condition(Condition.RUNNING, ran),
        attempt=Attempt(
            attempt,
            start=NOW,
            running_time=NOW if ran else None,
            latched=latched,
            had_pods=attempt > 0,
        ),
        pods=PodCounts(desired=nodes),
        start_time=NOW,
    )
    return changed(status, **fields)


def a_starting_job(*, attempt=0, nodes=2) -> Job:
    """Return a job before the latch: not every pod of its attempt was seen."""
    status = a_status(attempt=attempt, nodes=nodes, latched=False, ran=False)
    return a_job(status=status, nodes=nodes)


def a_running_job(
    *, attempt=0, nodes=2, spec=None, generation=1, deleting=False, **status_fields
) -> Job:
    """Return a job after the latch. All of its nodes ran.

    `spec` are fields of its spec. Fields of its status can be given by name.
    """
    return a_job(
        status=a_status(attempt=attempt, nodes=nodes, **status_fields),
        generation=generation,
        deleting=deleting,
        **{"nodes": nodes, **(spec or {})},
    )


def a_finished_job(
    kind=Condition.COMPLETE, *, ignored_fields=(), completion_time=None, **fields
) -> Job:
    status = a_status(
        conditions=a_condition(kind),
        phase=str(kind),
        ignored_fields=ignored_fields,
        completion_time=completion_time,
    )
    return a_job(status=status, **fields)


# A status with a value in every field, and with all fields in every part.
FULL_STATUS = Status(
    phase="Failed",
    reason="MaxRestartsExceeded",
    message="message",
    pods=PodCounts(desired=4, active=3, ready=2, succeeded=1, failed=1),
    attempt=Attempt(
        2,
        start=NOW,
        running_time=at(5),
        latched=True,
        had_pods=True,
        births=(2, 0),
        host=Host(1, "10.0.0.7"),
        previous_ran=False,
        succeeded_nodes=(0, 3),
        undecided_since=at(6),
        silent_since=at(6),
        starting_since=at(7),
        starting_seconds=3,
        yielding=Yielding("ml/older", at(11)),
    ),
    budget=UsedBudget(
        failures=1,
        disruptions=1,
        announced=3,
        failure_times=(NOW,),
        disruption_times=(at(1),),
        announced_times=(at(2),),
        retried=Retried(1, 1, 1, 2),
    ),
    account=Account("training", at(5), {"queued": 1, "starting": 4, "training": 5}),
    last_failure=LastFailure(
        1, "Failure", "WorkerFailed", "message", "node-1", "digits-1-1", 1, 1, time=NOW
    ),
    attempts=(
        EndedAttempt(
            1,
            "Failure",
            "WorkerFailed",
            "message",
            "node-1",
            "digits-0-1",
            1,
            1,
            start=NOW,
            running_time=at(2),
            training_time=at(4),
            untrained_seconds=2,
            end=at(9),
            first_step=1,
            last_step=9,
            total_steps=90,
            steps_lost=3,
        ),
    ),
    failed_nodes=(FailedNode("node-1", 2, NOW),),
    backoff=Backoff(2, at(10)),
    result={"accuracy": "0.9"},
    resolved=Resolved(1, 4, "cpu", "x"),
    ignored_fields=("spec.later",),
    start_time=NOW,
    completion_time=at(60),
    conditions=a_condition(Condition.FAILED),
    observed_generation=3,
    selector="ddpjob.dev/job-uid=x",
    place=Place(2, "uid-of-workload"),
    active_since=at(8),
    active_seconds=9,
    unreachable_nodes=(UnreachableNode("node-2", NOW, "uid-2"),),
    stray_pods=("copy",),
)


# Pods


def a_pod(index=0, status=None, *, attempt=0, deleted_at=None, grace=45, **spec):
    """Return the pod of one node as the API server shows it.

    Without a `status` it is Pending and not scheduled. Fields of its spec can be given by name. It
    has no agent of this version, so it does not stay for another attempt.
    """
    name = names.pod_name("digits", attempt, index)
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": "digits",
        "uid": JOB_UID,
        "controller": True,
    }
    metadata = {
        "name": name,
        "namespace": "ml",
        "uid": f"uid-of-{name}",
        "labels": {names.LABEL_ATTEMPT: str(attempt), names.LABEL_INDEX: str(index)},
        "ownerReferences": [owner],
    }
    if deleted_at is not None:
        metadata["deletionTimestamp"] = format_time(deleted_at + timedelta(seconds=grace))
        metadata["deletionGracePeriodSeconds"] = grace
    if is_scheduled(status):
        spec = {"nodeName": f"node-{index}", **spec}
    spec = {"terminationGracePeriodSeconds": 45, **spec}
    return {"metadata": metadata, "spec": spec, "status": status or {"phase": "Pending"}}


def an_agents_pod(index=0, status=None, *, attempt=0, born=None, annotations=(), **fields):
    """Return a pod that may stay for another attempt.

    `born` is the attempt of its creation, if the pod has stayed since then.
    """
    pod = a_pod(index, status, attempt=attempt, **fields)
    if born is not None:
        name = names.pod_name("digits", born, index)
        pod["metadata"] |= {"name": name, "uid": f"uid-of-{name}"}
    pod["metadata"]["annotations"] = dict(annotations)
    agent = {"name": names.AGENT_VOLUME, "configMap": {"name": config_map_name()}}
    pod["spec"] = {**pod["spec"], "volumes": [agent]}
    return pod


def told(seconds, copies=0, **fields):
    """Return the annotations of a kept pod with an assignment given so many seconds after NOW."""
    time = format_time(at(seconds))
    text = json.dumps({"start": True, "grace": 7, "time": time, "copies": copies, **fields})
    return {names.ANNOTATION_ASSIGNMENT: text}


def agent_report(
    attempt=0, cause="Failure", *, rank=1, exit_code=1, exception="ValueError: boom", **others
):
    """Return the termination message of an agent. `others` are further entries of it."""
    report = {
        "agent": 1,
        "attempt": attempt,
        "cause": cause,
        "rank": rank,
        "exitCode": exit_code,
        "exception": exception,
        "time": NOW.timestamp(),
        "lines": ["the last line"],
        **others,
    }
    return json.dumps(report)


def a_stray(index=0, status=None, *, name="copy", attempt=0):
    """Return a pod with the labels and the owner of a gang's pod, but with a name of its own."""
    pod = a_pod(index, status, attempt=attempt)
    pod["metadata"] |= {"name": name, "uid": f"uid-of-{name}"}
    return pod


def is_scheduled(status) -> bool:
    """Return True if a pod with this status has a Kubernetes node."""
    if status is None:
        return False
    for entry in status.get("conditions", ()):
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            return False
    return True


def trainer_status(state, *other_containers):
    return {"containerStatuses": [*other_containers, {"name": names.TRAINER, "state": state}]}


def waiting(reason="ContainerCreating", message=""):
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", **trainer_status(state)}


def creating(seconds):
    """Return the status of a pod with a node for so many seconds, and without a container yet."""
    since = format_time(at(-seconds))
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
    return {**waiting(), "conditions": [condition]}


def not_scheduled(reason, message):
    entry = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return {"phase": "Pending", "conditions": [entry]}


def unschedulable(message="0/3 nodes are available: 3 Insufficient cpu."):
    return not_scheduled("Unschedulable", message)


def scheduling_gated():
    """Return the status of a pod held by a queue with a scheduling gate."""
    return not_scheduled(
        "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates"
    )


def starting(*, since=NOW):
    """Return the status of a pod with a running container, before its workers have met."""
    state = {"running": {"startedAt": format_time(since)}}
    return {"phase": "Running", "podIP": "10.244.0.7", **trainer_status(state)}


def running(*, since=NOW):
    """Return the status of a pod after its workers have met the others."""
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": format_time(since)}
    status = {**starting(), "conditions": [ready]}
    status["containerStatuses"][0]["ready"] = True
    return status


def ended(code, message="", *, reason=None, when=NOW, **status):
    """Return the status of a pod after the end of its trainer.

    Other fields of the pod's status can be given by name, such as its `phase` if something else in
    it still runs.
    """
    state = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "message": message,
        "finishedAt": format_time(when),
    }
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, **trainer_status({"terminated": state}), **status}


def succeeded(message="", **fields):
    return ended(0, message, **fields)


def failed(message="", **fields):
    return ended(1, message, **fields)


def oom_killed(**fields):
    return ended(137, reason="OOMKilled", **fields)


def without_end_time(status):
    """Remove the end time of the trainer. Some runtimes do not report it."""
    for container in status["containerStatuses"]:
        del container["state"]["terminated"]["finishedAt"]
    return status


def not_ready(status):
    """Return the status that the control plane gives a running pod of an unreachable node.

    The kubelet's last word was that the containers are ready.
    """
    ready = {"type": "Ready", "status": "False"}
    containers_ready = {"type": "ContainersReady", "status": "True"}
    return {**status, "conditions": [ready, containers_ready]}


def with_sidecar(status, state=None):
    """Add a container, still running or in another `state`, beside a trainer that has ended."""
    sidecar = {"name": "proxy", "state": {"running": {}} if state is None else state}
    containers = [*status["containerStatuses"], sidecar]
    return {**status, "phase": "Running", "containerStatuses": containers}


def disruption_target(reason="EvictionByEvictionAPI", message="Eviction API: evicting", when=NOW):
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": format_time(when),
    }


def evicted(**fields):
    """Return the status after an eviction by the kubelet because of pressure on its node."""
    message = "The node was low on resource: memory."
    target = disruption_target("TerminationByKubelet", message)
    return {**over_own_limit(message, **fields), "conditions": [target]}


def shut_down():
    """Return the status of a pod ended by its kubelet for a shutdown of the node."""
    message = "Pod was terminated in response to imminent node shutdown."
    target = disruption_target("TerminationByKubelet", message)
    ended_pod = {**ended(143), "phase": "Failed", "reason": "Terminated", "message": message}
    return {**ended_pod, "conditions": [target]}


def preempted_by_kubelet():
    """Return the status of a pod ended by its kubelet for a critical pod."""
    message = "Preempted in order to admit critical pod"
    target = disruption_target("TerminationByKubelet", message)
    ended_pod = {**ended(143), "phase": "Failed", "reason": "Preempting", "message": message}
    return {**ended_pod, "conditions": [target]}


def over_own_limit(message="Usage of EmptyDir volume exceeds the limit 1Gi.", **fields):
    """Return the status after the kubelet evicted a pod for exceeding a limit of its own."""
    return {**ended(137, **fields), "phase": "Failed", "reason": "Evicted", "message": message}


REJECTIONS = {
    "UnexpectedAdmissionError": "Allocate failed: no devices left",
    "Evicted": "The node had condition: [DiskPressure]. ",
}


def rejected_by_kubelet(reason="UnexpectedAdmissionError"):
    """Return the status of a pod rejected by the kubelet: no container was started."""
    message = f"Pod was rejected: {REJECTIONS.get(reason, 'no room')}"
    return {"phase": "Failed", "reason": reason, "message": message}


# torchrun's failure summary

FOLLOWER_ERROR = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
    "Connection closed by peer [10.244.1.3]:48525."
)


def torchrun_summary(rank=1, code=1, error="ValueError: boom", when=NOW):
    """Return torchrun's failure summary in the form of the files under data/torchrun."""
    return (
        f"[rank{rank}]: {error}\n"
        f"E{when:%m%d %H:%M:%S.%f} 7 torch/distributed/elastic/multiprocessing/api.py:1002] "
        f"failed (exitcode: {code}) local_rank: 0 (pid: 42) of binary: /usr/local/bin/python\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/local/bin/torchrun", line 6, in <module>\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        "Root Cause (first observed failure):\n"
        "[0]:\n"
        f"  time      : {when:%Y-%m-%d_%H:%M:%S}\n"
        "  host      : localhost\n"
        f"  rank      : {rank} (local_rank: 0)\n"
        f"  exitcode  : {code} (pid: 42) \n"
        "  error_file: <N/A>\n"
        "  traceback : To enable traceback see: "
        "https://pytorch.org/docs/stable/elastic/errors.html\n"
    )


def follower_summary(rank=0, when=NOW):
    """Return the summary of a rank that lost its peer."""
    return torchrun_summary(rank, 1, FOLLOWER_ERROR, when)


# The message of a pod with a rank that failed by itself, and of one that lost its peer.
FAILURE = torchrun_summary(rank=1)
FOLLOWER = follower_summary(rank=0)


def slow_rank_summary(rank=1, when=NOW):
    """Return the summary of a rank that waited too long for rank 0."""
    error = (
        "ddp_trainer.errors.SlowRankError: rank 0 on node 0 (a0-n0) is slow or stuck: it was "
        "last seen in step 47, 5.2 s ago"
    )
    return torchrun_summary(rank, 1, error, when)


# Kubernetes nodes


def a_node(name="node-0", ready="True", *taints, uid=""):
    """Return a node as the API server shows it. Its taints are given by their keys."""
    return {
        "metadata": {"name": name, "uid": uid or f"uid-of-{name}"},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def nodes_of(*bodies):
    """Return nodes by name, with enough healthy ones that those given are never most of them."""
    healthy = [a_node(f"other-{number}") for number in range(10)]
    return Nodes(map(read_node, [*bodies, *healthy]))


# Decisions


def read_pods(*bodies) -> tuple[Pod, ...]:
    return tuple(pod for pod in map(read_pod, bodies) if pod)


def observation(job: Job, *pods, **surroundings) -> Observation:
    return observe(job, read_pods(*pods), **surroundings)


def plan_for(job: Job, *pods, now=NOW, **surroundings) -> Plan:
    """Decide. Other fields of the Observation can be given by name, such as `nodes`."""
    return decide(observation(job, *pods, **surroundings), now)


def written(job: Job, plan: Plan) -> Job:
    """Return the job as the API server gives it back after the plan's status was written."""
    return replace(job, status=Status.from_dict(plan.status.to_dict()))


def deleted_pods(plan: Plan) -> list[str]:
    return [delete.name for delete in plan.delete]


def budgets_used(plan: Plan) -> tuple[int, int]:
    """Return (failures, unannounced disruptions)."""
    return plan.status.budget.failures, plan.status.budget.disruptions


def restarts_by_budget(plan: Plan) -> dict[str, int]:
    """Return the counted restarts by budget, without those that are 0."""
    budget = plan.status.to_dict()["budget"]
    return {name: restarts for name, restarts in budget.items() if restarts}


def condition(status: Status, kind: Condition) -> dict:
    found = find_condition(status.conditions, kind)
    return write(found) if found else {}
