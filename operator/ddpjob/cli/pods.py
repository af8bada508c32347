"""Find the pod of a rank, and reach into it with kubectl.

kubectl streams the input and output of a command. The client of this program does not have the
protocols for it.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from ddpjob.cli.connection import Connection
from ddpjob.cli.session import REFUSED, print_error
from ddpjob.client.errors import ClientError
from ddpjob.core.api import names
from ddpjob.core.api.names import Phase
from ddpjob.core.observe.observation import Pod, TrainerState
from ddpjob.core.observe.pods import read_pod
from ddpjob.core.plan import counted
from ddpjob.jobs.user_job import DDPJob
from ddpjob.show.advice import address_of

if TYPE_CHECKING:
    from ddpjob.client import AsyncClient

NO_KUBECTL = (
    "this command needs kubectl, which is not on the PATH; "
    "https://kubernetes.io/docs/tasks/tools/ has it for each system"
)

# The page on the checkpoints of a finished job, below docs/.
PAGE = "users/storage.md#copy-checkpoints"

# A shell of the image changes the folder, because kubectl exec has no option for it.
IN_FOLDER = 'cd "$0" && exec "$@"'


@dataclass(frozen=True)
class RunningPod:
    """A pod with a running trainer, and its job."""

    job: DDPJob
    name: str

    def command(self, connection: Connection, words: Sequence[str], *options: str) -> list[str]:
        """Return the call of kubectl for a command in the trainer, in the job's working folder."""
        if self.job.code:
            # The agent unpacks the code there, and starts torchrun there.
            words = ["/bin/sh", "-c", IN_FOLDER, names.WORK_FOLDER, *words]
        place = ["--namespace", self.job.namespace]
        if connection.context:
            place += ["--context", connection.context]
        if connection.kubeconfig:
            place += ["--kubeconfig", str(connection.kubeconfig)]
        pod = [self.name, "--container", names.TRAINER]
        return ["kubectl", "exec", *place, *options, *pod, "--", *words]


def require_kubectl() -> None:
    """End the program with a sentence if kubectl is not installed."""
    if not shutil.which("kubectl"):
        print_error(NO_KUBECTL)
        raise typer.Exit(REFUSED)


async def find_pod(
    client: "AsyncClient", name: str, *, rank: int = 0, node: int | None = None
) -> RunningPod:
    """Return the running pod of a rank, or of a node. Raises ClientError or BadParameter."""
    job = await client.get(name)
    if node is None:
        require_rank(job, rank)
        node = rank // job.processes_per_node
    require_node(job, node)
    pods = [read_pod(body) for body in await client.pods(job, node=node)]
    running = [pod for pod in pods if pod and pod.state is TrainerState.RUNNING]
    if not running:
        raise ClientError(_why_none_runs(job, node))
    return RunningPod(job, max(running, key=_preference).name)


def _preference(pod: Pod) -> tuple[bool, int, int]:
    """Return a key for the choice of a pod: one of an earlier attempt may still be ending."""
    return pod.deletion_deadline is None, pod.attempt, pod.born


def _why_none_runs(job: DDPJob, node: int) -> str:
    if job.finished:
        advice = "what they wrote outside of a volume was deleted with them"
        if not job.claims:
            advice += "; ddpjob submit --checkpoints CLAIM keeps checkpoints"
        if job.checkpoint:
            page = address_of(PAGE) or f"docs/{PAGE}"
            advice = f"its checkpoints stay: {job.checkpoint}; {page} shows how to copy them"
        return f"job {job.name} is {job.phase}, so its pods have ended; {advice}"
    if job.phase == Phase.SUSPENDED:
        return f"job {job.name} is suspended and has no pods; ddpjob resume {job.name} continues it"
    return (
        f"node {node} of job {job.name} has no running pod; the job is {job.phase}: {job.message}; "
        f"ddpjob status {job.name} has the reason"
    )


def node_count(job: DDPJob) -> int:
    """Return the number of nodes of a job. A job just scaled down still has its previous size."""
    return max(job.status.pods.desired, int(job.spec.get("nodes", 1)))


def require_node(job: DDPJob, node: int) -> None:
    """Raise BadParameter for a node outside the job's size."""
    nodes = node_count(job)
    if node >= nodes:
        raise typer.BadParameter(_has(job, nodes, "node"), param_hint="--node")


def require_rank(job: DDPJob, rank: int) -> None:
    """Raise BadParameter for a rank outside the job's size."""
    ranks = node_count(job) * job.processes_per_node
    if rank >= ranks:
        raise typer.BadParameter(_has(job, ranks, "rank"), param_hint="--rank")


def _has(job: DDPJob, count: int, noun: str) -> str:
    numbers = f"0 to {count - 1}" if count > 1 else "0"
    return f"job {job.name} has {counted(count, noun)}, {numbers}"
