"""Small builders for the objects that the core reads: manifests, statuses and pods as Kubernetes shows them.

A pod is built from its place and what happened to it, `a_pod(1, failed(a_summary(rank=1)))`; `look` is one look at a
job and its pods, as the operator takes it. Times are NOW and seconds after it.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from ddpjob.core import names
from ddpjob.core.decide import decide
from ddpjob.core.job import Job
from ddpjob.core.observe import Observation, Pod, Refusal, observe
from ddpjob.core.plan import Plan
from ddpjob.core.pods import read_pod
from ddpjob.core.status import PodCounts, Status, set_condition
from ddpjob.core.times import format_time

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
JOB_UID = "0b4c6f3e-9d52-4c43-b4f0-2f4c0f6f1d11"
TAILS = Path(__file__).parent / "data" / "torchrun"
"""The last 2048 bytes of what torchrun 2.13 really wrote, which is what a kubelet keeps of a log."""


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def torchrun_tail(name: str) -> str:
    """As the API server shows it: what the cut left of a character is replaced."""
    return (TAILS / f"{name}.txt").read_text(encoding="utf-8", errors="replace")


# --- jobs


def a_spec(**fields):
    return {"nodes": 2, "image": "trainer:1", "args": ["train.py"], **fields}


def a_manifest(*, name="digits", status=None, generation=1, deleting=False, **spec):
    metadata = {"name": name, "namespace": "ml", "uid": JOB_UID, "generation": generation}
    if deleting:
        metadata["deletionTimestamp"] = format_time(NOW)
    return {"metadata": metadata, "spec": a_spec(**spec), "status": status or {}}


def a_job(*, status=None, **fields) -> Job:
    """A DDPJob of two nodes that nobody has worked on yet, unless `status` (a Status) says otherwise."""
    return Job.from_dict(a_manifest(status=status.to_dict() if status else None, **fields))


def a_status(*, attempt=0, nodes=2, latched=True, ran=True, **fields) -> Status:
    """A job in the middle of an attempt whose pods were all seen (`latched`) and all ran (`ran`)."""
    conditions = set_condition((), names.Condition.RUNNING, ran, "NodesRunning", "", NOW)
    told = (
        {"phase": "Running", "reason": "NodesRunning"}
        if ran
        else {"phase": "Starting", "reason": "CreatingPods"}
    )
    return Status(
        attempt=attempt,
        pods=PodCounts(desired=nodes),
        **{
            "attempt_started": attempt if latched else (attempt - 1 if attempt else None),
            "attempt_time": NOW,
        }
        | {"start_time": NOW, "conditions": conditions, "observed_generation": 1}
        | told
        | fields,
    )


def a_starting_job(*, attempt=0, nodes=2, **fields) -> Job:
    """Before the latch: the status is written, not every pod was seen."""
    return a_job(
        status=a_status(attempt=attempt, nodes=nodes, latched=False, ran=False),
        nodes=nodes,
        **fields,
    )


def a_running_job(*, attempt=0, nodes=2, spec=None, **status) -> Job:
    """After the latch, every pod running."""
    return a_job(
        status=a_status(attempt=attempt, nodes=nodes, **status), **{"nodes": nodes, **(spec or {})}
    )


# --- pods


def a_pod(
    index=0,
    status=None,
    *,
    attempt=0,
    job="digits",
    node=None,
    deleted_at=None,
    grace=45,
    labels=None,
):
    """Node `index` of an attempt as the API server shows it; Pending without a node unless `status` says more."""
    name = names.pod_name(job, attempt, index)
    metadata = {
        "name": name,
        "namespace": "ml",
        "uid": f"uid-of-{name}",
        "labels": {names.LABEL_ATTEMPT: str(attempt), names.LABEL_INDEX: str(index)}
        if labels is None
        else labels,
        "ownerReferences": [{"kind": names.KIND, "name": job, "uid": JOB_UID, "controller": True}],
    }
    if deleted_at is not None:
        metadata["deletionTimestamp"] = format_time(deleted_at + timedelta(seconds=grace))
        metadata["deletionGracePeriodSeconds"] = grace
    placed = node or ("" if status is None or status.get("unplaced") else f"node-{index}")
    shown = {
        key: value for key, value in (status or {"phase": "Pending"}).items() if key != "unplaced"
    }
    return {"metadata": metadata, "spec": {"nodeName": placed} if placed else {}, "status": shown}


def trainer(state, *others):
    return {"containerStatuses": [*others, {"name": names.TRAINER, "state": state}]}


def waiting(reason="ContainerCreating", message=""):
    return {"phase": "Pending", **trainer({"waiting": {"reason": reason, "message": message}})}


def unschedulable(message="0/3 nodes are available: 3 Insufficient cpu."):
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    return {"phase": "Pending", "conditions": [condition], "unplaced": True}


def running():
    return {"phase": "Running", **trainer({"running": {"startedAt": format_time(NOW)}})}


def ended(code, message="", *, reason=None, when=NOW, phase=None, conditions=()):
    """The trainer has ended; the pod's phase follows unless something else in it still runs (`phase`)."""
    state = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "message": message,
        "finishedAt": format_time(when),
    }
    return {
        "phase": phase or ("Failed" if code else "Succeeded"),
        "conditions": list(conditions),
        **trainer({"terminated": state}),
    }


def succeeded(message="", **more):
    return ended(0, message, **more)


def failed(message="", **more):
    return ended(1, message, **more)


def with_sidecar(status, state=None):
    """The same end of a trainer, with a second container that runs on."""
    sidecar = {"name": "proxy", "state": {"running": {}} if state is None else state}
    return {
        **status,
        "phase": "Running",
        "containerStatuses": [*status["containerStatuses"], sidecar],
    }


def oom_killed(**more):
    return ended(137, reason="OOMKilled", **more)


def disruption_target(reason="EvictionByEvictionAPI", message="Eviction API: evicting", when=NOW):
    told = {"reason": reason, "message": message, "lastTransitionTime": format_time(when)}
    return {"type": "DisruptionTarget", "status": "True", **told}


def evicted(**more):
    """By the kubelet: the pod says so, the container was killed."""
    return {
        **ended(137, **more),
        "phase": "Failed",
        "reason": "Evicted",
        "message": "The node was low on memory.",
    }


def refused_by_kubelet(reason="UnexpectedAdmissionError"):
    """No container was ever started."""
    return {"phase": "Failed", "reason": reason, "message": "Allocate failed: no devices left"}


# --- what torchrun says

FOLLOWER_WORDS = "RuntimeError: [pair.cc:553] Connection closed by peer [10.244.1.3]:48525."


def a_summary(rank=1, code=1, words="ValueError: boom", when=NOW):
    """torchrun's last words about `rank`, in the shape of the real ones under data/torchrun."""
    return (
        f"[rank{rank}]: {words}\n"
        f"E{when:%m%d %H:%M:%S.%f} 7 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) "
        "local_rank: 0 (pid: 42) of binary: /usr/local/bin/python\n"
        'Traceback (most recent call last):\n  File "/usr/local/bin/torchrun", line 6, in <module>\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"Root Cause (first observed failure):\n[0]:\n  time      : {when:%Y-%m-%d_%H:%M:%S}\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: 42) \n  error_file: <N/A>\n"
        "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n"
    )


def a_follower(rank=0, when=NOW):
    return a_summary(rank, 1, FOLLOWER_WORDS, when)


# --- looking


def read(*pods) -> tuple[Pod, ...]:
    return tuple(pod for pod in map(read_pod, pods) if pod)


def seen(job: Job, *pods, refusal: Refusal | None = None) -> Observation:
    return observe(job, read(*pods), refusal)


def look(job: Job, *pods, now=NOW, refusal: Refusal | None = None) -> Plan:
    """One look at a job and its pods."""
    return decide(seen(job, *pods, refusal=refusal), now)


def then(job: Job, plan: Plan) -> Job:
    """The job once the plan's status is written, as the API server gives it back."""
    return Job(**{**vars(job), "status": Status.from_dict(plan.status.to_dict())})


def deleted(plan: Plan) -> list[str]:
    return [delete.name for delete in plan.delete]


def condition(status: Status, kind) -> dict:
    return next((dict(c) for c in status.conditions if c["type"] == kind), {})
