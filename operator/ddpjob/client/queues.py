"""Checks of Kueue's queues: what can keep the jobs of a namespace waiting for ever."""

from collections.abc import Iterator, Sequence, Set

from ddpjob.client.async_client import AsyncClient
from ddpjob.client.errors import client_errors
from ddpjob.client.findings import Finding, jobs_of_namespace, list_if_allowed
from ddpjob.core.api import names
from ddpjob.core.api.kueue import POD_WEBHOOK, Workload, read_workload
from ddpjob.core.api.queue import DEFAULT_QUEUE, LABEL_QUEUE
from ddpjob.core.api.readers import Dict
from ddpjob.core.api.reasons import Reason
from ddpjob.jobs.user_job import DDPJob
from ddpjob.kube.kinds import LOCAL_QUEUES, WORKLOADS
from ddpjob.kube.request import ReadDocument

SUBJECT = "Queues"
PAGE = "users/queues.md#for-administrators"


async def check_queues(client: AsyncClient) -> Sequence[Finding]:
    """Check for missing queues of jobs, and for Workloads waiting for an operator."""
    jobs = await jobs_of_namespace(client)
    with client_errors():
        is_served = await client.api.read(ReadDocument(WORKLOADS.api))
    findings = list(find_refused_pods(jobs))
    if not is_served:
        return [*find_without_kueue(jobs), *findings]
    queues = await list_if_allowed(client, LOCAL_QUEUES, client.namespace)
    labels = f"{names.LABEL_MANAGED_BY}={names.MANAGER}"
    found = await list_if_allowed(client, WORKLOADS, client.namespace, labels) or ()
    workloads = list(filter(None, map(read_workload, found)))
    if queues is not None:
        findings += find_traps(jobs, queues)
    findings += find_held(workloads, jobs)
    return findings


def find_without_kueue(jobs: Sequence[DDPJob]) -> Iterator[Finding]:
    """Yield a finding if a job waits for a queue in a cluster without Kueue."""
    waiting = [job for job in jobs if job.queue and not job.finished]
    if waiting:
        job = waiting[0]
        found = f"job {job.name} has the queue {job.queue}, and Kueue is not installed"
        advice = f"install Kueue, or remove the label {LABEL_QUEUE}"
        yield Finding(SUBJECT, found, advice, PAGE)


def find_refused_pods(jobs: Sequence[DDPJob]) -> Iterator[Finding]:
    """Yield findings about jobs whose pods are refused or held by Kueue's webhook for pods."""
    for job in (job for job in jobs if not job.finished):
        if POD_WEBHOOK in job.message:
            yield Finding(
                SUBJECT,
                f"Kueue's webhook {POD_WEBHOOK} fails, so the pods of job {job.name} are refused",
                "look whether Kueue runs and whether its ServiceAccount may read DDPJobs: "
                "`kueue.account` of the chart names it",
                PAGE,
            )
        elif job.reason == Reason.HELD_BY_KUEUE:
            found = f"Kueue takes the pods of job {job.name} one by one"
            advice = (
                f"let Kueue's configuration name DDPJobs, and give the job the label {LABEL_QUEUE}"
            )
            yield Finding(SUBJECT, found, advice, PAGE)


def find_traps(jobs: Sequence[DDPJob], queues: Sequence[Dict]) -> Iterator[Finding]:
    """Yield findings about missing queues, and about a default queue for single pods."""
    unfinished = [job for job in jobs if not job.finished]
    known = {str(queue["metadata"]["name"]) for queue in queues}
    for job in unfinished:
        if job.queue and job.queue not in known:
            found = f"job {job.name} waits for the LocalQueue {job.queue}, which does not exist"
            advice = "create it"
            if known:
                advice = f"choose one of {', '.join(sorted(known))}"
            yield Finding(SUBJECT, found, advice, PAGE)
    without = [job for job in unfinished if not job.queue and not job.spec.get("suspend")]
    if DEFAULT_QUEUE in known and without:
        found = (
            f"the LocalQueue {DEFAULT_QUEUE} also takes the pods of jobs without a queue, such as "
            f"{without[0].name}"
        )
        advice = "suspend and resume such a job: it then joins the queue"
        yield Finding(SUBJECT, found, advice, PAGE)


def find_held(workloads: Sequence[Workload], jobs: Sequence[DDPJob]) -> Iterator[Finding]:
    """Yield a finding for each way in which a Workload waits for the operator."""
    finished = {job.uid for job in jobs if job.finished}
    patch = """--type merge --patch '{"metadata": {"finalizers": null}}'"""
    waiting: dict[str, Workload] = {}
    for one in workloads:
        why = _why_held(one, finished)
        if why:
            waiting.setdefault(why, one)
    for why, one in waiting.items():
        let_go = f"kubectl -n {one.namespace} patch workload {one.name} {patch}"
        if not one.deleting:
            delete = f"kubectl -n {one.namespace} delete workload {one.name} --wait=false"
            let_go = f"{delete} && {let_go}"
        found = f"Workload {one.name} {why}, and waits for the operator and the end of the pods"
        yield Finding(SUBJECT, found, f"without an operator and pods: {let_go}", PAGE)


def _why_held(workload: Workload, finished: Set[str]) -> str:
    """Return why the operator has to let a Workload go, or an empty string.

    `finished` are the UIDs of finished jobs.
    """
    if workload.finished and not workload.deleting:
        return ""
    if workload.deleting:
        return "is deleted" if workload.held else ""
    if workload.evicted and workload.has_quota:
        return "has to give its room back"
    return "has the room of a finished job" if workload.job_uid in finished else ""
