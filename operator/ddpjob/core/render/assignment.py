"""What the agent of a pod is told: its options for the life of the pod, and one attempt at a time.

agent/agent.py describes the options, and agent/assignment.py an assignment. Options are in the
pod's command. An assignment is in an annotation, and the kubelet writes it into a file of the pod.
"""

import json
from typing import Any, Protocol

from ddpjob.core.api import names
from ddpjob.core.api.job import Job
from ddpjob.core.api.launcher import flags_of, is_torchrun
from ddpjob.core.api.pod_fields import GRACE_SECONDS
from ddpjob.core.api.readers import child
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.times import format_time
from ddpjob.core.plan import Assign

# Seconds. Peers may stay Pending for long, in a full cluster or while it is scaled up. Waiting for
# them must not end an attempt.
RENDEZVOUS_SECONDS = 3600

# The wait of a pod for the next attempt, in seconds, if it has only lost its peer.
FOLLOWER_WAIT = 8

# The wait of a held pod, in seconds, after its grace period: other pods end first.
HELD_WAIT = 75


class Addresses(Protocol):
    """The addresses by which the agents of an attempt find each other.

    c10d gives ranks by the string order of the agents' local addresses. `port` is the port of an
    agent's /ready and /metrics.
    """

    def endpoint(self, job: Job) -> str: ...

    def local(self, job: Job, index: int) -> str: ...

    def port(self, job: Job, index: int) -> int: ...


class ServiceAddresses:
    """Names under the job's headless Service.

    They are short, because Neuron's collectives accept at most 63 characters.
    """

    def endpoint(self, job: Job) -> str:
        attempt = job.status.attempt
        return names.rendezvous_endpoint(job.name, attempt.number or 0, attempt.host.address)

    def local(self, job: Job, index: int) -> str:
        return f"{names.hostname(job.status.attempt.born(index), index)}.{job.name}"

    def port(self, job: Job, index: int) -> int:
        return names.AGENT_PORT


def assignment(job: Job, index: int, addresses: Addresses, assign: Assign | None = None) -> str:
    """Return the assignment of a node for the job's current attempt, as JSON.

    `assign` has the details for a kept pod.
    """
    may_start = assign is None or assign.start
    assert job.spec is not None
    fields = {
        "attempt": job.status.attempt.number or 0,
        "start": may_start,
        "flags": _flags(job, job.spec, index, addresses),
        "env": {"DDP_ATTEMPT": str(job.status.attempt.number or 0)},
        "ranks": job.spec.nproc_per_node,
        "grace": assign.grace if assign else 0,
        "wait": _wait(assign),
    }
    if assign:
        fields["time"] = format_time(assign.time)
        fields["copies"] = assign.copies
    if assign and assign.dump:
        fields["dump"] = True
    return json.dumps(fields)


def _wait(assign: Assign | None) -> float:
    """Return for how many seconds a pod waits for the next attempt, or until it may start one."""
    if assign is None or assign.start:
        return FOLLOWER_WAIT
    # A pod that ends beside it has its own grace period.
    return HELD_WAIT + max(assign.grace, GRACE_SECONDS)


def _flags(job: Job, spec: Spec, index: int, addresses: Addresses) -> list[str]:
    """Return torchrun's flags: only flags known to torch 2.5 to 2.15."""
    status = job.status
    # The setup of one pod may take longer than that of another.
    setup = int(spec.setup_timeout.total_seconds()) if spec.setup else 0
    timeout = str(RENDEZVOUS_SECONDS + setup)
    conf = {
        "join_timeout": timeout,
        "read_timeout": timeout,
        **spec.rdzv_conf,
        # torchrun would guess wrong: behind a Service name every agent looks like a client.
        "is_host": "true" if index == status.attempt.host.index else "false",
    }
    return [
        f"--nnodes={status.pods.desired}",
        f"--nproc-per-node={spec.nproc_per_node}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-id={names.rendezvous_id(job.uid, status.attempt.number or 0)}",
        f"--rdzv-endpoint={addresses.endpoint(job)}",
        f"--rdzv-conf={','.join(f'{key}={value}' for key, value in sorted(conf.items()))}",
        f"--local-addr={addresses.local(job, index)}",
    ]


def agent_options(spec: Spec, state_path: str, port: str, *, isolated: bool) -> str:
    """Return the options of a pod's agent, as JSON. `port` is for /ready and /metrics.

    `state_path` is where it tells its state to the operator.

    Without `isolated`, other programs have the same files and IPC as the pod.
    """
    hang, first = spec.lifecycle.hang_timeout, spec.lifecycle.first_heartbeat
    # Then the agent can start it itself.
    has_torchrun = is_torchrun(spec.command)
    options: dict[str, Any] = {
        "folder": names.RUN_FOLDER,
        "assignment": names.ASSIGNMENT_FILE,
        "words": f"{names.AGENT_FOLDER}/words.json",
        "message": names.MESSAGE_FILE,
        "clear": names.MEMORY_FOLDER,
        "work": names.FOLDER,
        "code": names.CODE_FOLDER if spec.code else None,
        # Kubernetes reads `$` in a command as a reference to a variable.
        "setup": spec.setup.replace("$", "$$") or None,
        "setup_seconds": spec.setup_timeout.total_seconds(),
        # On one machine, temporary files are where its user wants them. Paths in the folder of a
        # run may be too long for the sockets of programs in TMPDIR.
        "own_files": isolated,
        # No other field of the spec can set it.
        "own_ipc": isolated and not child(spec.pod_template, "spec").get("hostIPC"),
        "port": port,
        "state_path": state_path,
        "command": None if has_torchrun else list(spec.command),
        "flags": [*flags_of(spec.command), *spec.torchrun_args],
        "hang_seconds": hang.total_seconds() if hang else None,
        "first_seconds": first.total_seconds() if first else None,
        "heartbeat": str(spec.lifecycle.heartbeat),
        # It is not known how other programs start their workers.
        "fast_start": spec.fast_start and has_torchrun,
    }
    # The port may be a placeholder. It must stay as it is.
    return json.dumps(options, ensure_ascii=False)
