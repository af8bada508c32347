"""Checks of the operator: whether one runs, and whether one serves the user's namespace.

An installation of the operator marks each namespace with a job by a Lease there, and renews it
while the namespace has jobs. A user with the role `edit` may read this Lease. Only administrators
may read the Deployment of the operator.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ddpjob import __version__
from ddpjob.client.async_client import AsyncClient
from ddpjob.client.errors import Rejected, client_errors
from ddpjob.client.findings import Finding, is_forbidden, jobs_of_namespace, list_if_allowed
from ddpjob.core.api import names
from ddpjob.core.api.readers import Dict, child, children, integer_or_zero, strings_or_empty
from ddpjob.core.api.times import parse_time, since
from ddpjob.jobs.user_job import DDPJob
from ddpjob.kube.kinds import DEPLOYMENTS, LEASES
from ddpjob.kube.request import Request, Verb
from ddpjob.show.text import duration

SUBJECT = "Operator"

# Labels of the operator's Deployment, as the chart sets them.
OPERATOR = "app.kubernetes.io/part-of=ddpjob,app.kubernetes.io/component=operator"
VERSION_LABEL = "app.kubernetes.io/version"

# A leader renews its Lease every few seconds. The clock of this machine may be another one.
STALE_LEASE = timedelta(seconds=120)

# An operator sees a new job within this time, and then marks the namespace.
SEEN_AFTER = timedelta(seconds=60)


@dataclass(frozen=True)
class Service:
    """The known facts about the operator of a namespace.

    - `holder`: the installation named in the mark; empty without a mark. `age`: of the mark.
    - `is_fresh`: the mark still counts. `is_readable`: the user may read the mark.
    - `jobs`: jobs older than SEEN_AFTER. An operator should have seen them.
    """

    namespace: str
    jobs: Sequence[DDPJob]
    is_readable: bool = True
    holder: str = ""
    age: timedelta = timedelta(0)
    is_fresh: bool = False

    @property
    def before(self) -> str:
        """Return the end of a sentence about an expired mark."""
        return f"; {self.holder} did until {duration(self.age)} ago" if self.holder else ""


async def check_operator(client: AsyncClient) -> Sequence[Finding]:
    """Check whether an operator runs, leads, has this version, and serves the namespace."""
    service = await _find_service(client)
    about_service = _describe_service(service)
    deployments = await list_if_allowed(client, DEPLOYMENTS, None, OPERATOR)
    if deployments is None:
        return [about_service]
    findings: list[Finding] = []
    for deployment in deployments:
        findings += _check_deployment(deployment)
        if not service.is_fresh:
            findings += _check_watched(client, deployment)
        findings += await _check_lease(client, deployment)
    # Before the first job of a namespace, only the Deployment shows an operator.
    if not about_service.is_unknown:
        findings.append(about_service)
    if findings:
        return findings
    advice = "install the operator's chart, or start one with ddpjob operator"
    return [Finding(SUBJECT, "no Deployment of it was found in the cluster", advice)]


# The namespace


async def _find_service(client: AsyncClient) -> Service:
    """Return what the jobs and the mark of the namespace show."""
    now = datetime.now(UTC)
    namespace = client.namespace
    jobs = [job for job in await jobs_of_namespace(client) if _should_be_seen(job, now)]
    request = Request(Verb.GET, LEASES, namespace, names.INSTALLATION_LEASE)
    try:
        with client_errors():
            lease = await client.api.read(request)
    except Rejected as error:
        if not is_forbidden(error):
            raise
        return Service(namespace, jobs, is_readable=False)
    spec = child(lease, "spec")
    renewed = parse_time(spec.get("renewTime"))
    holder = str(spec.get("holderIdentity") or "")
    if not renewed or not holder:
        return Service(namespace, jobs)
    passed = since(renewed, now)
    lasts = timedelta(seconds=integer_or_zero(spec.get("leaseDurationSeconds")))
    return Service(
        namespace,
        jobs,
        holder=holder,
        age=passed,
        is_fresh=passed < lasts,
    )


def _should_be_seen(job: DDPJob, now: datetime) -> bool:
    """Return True if an operator of this cluster has had the time to look at a job."""
    if job.created is None or since(job.created, now) <= SEEN_AFTER:
        return False
    manager = job.spec.get("managedBy", names.CONTROLLER)
    return bool(manager == names.CONTROLLER)


def _describe_service(service: Service) -> Finding:
    namespace = service.namespace
    if service.is_fresh:
        return Finding(SUBJECT, f"{service.holder} serves namespace {namespace}")
    unseen = [job.name for job in service.jobs if not job.finished and not job.reason]
    if unseen:
        found = f"no operator has looked at job {unseen[0]} of namespace {namespace}"
        advice = (
            "ask the administrator whether the operator runs, and whether its watchNamespaces and "
            f"excludedNamespaces leave {namespace} out; an event may have the reason: "
            f"kubectl -n {namespace} describe ddpjob {unseen[0]}"
        )
        return Finding(SUBJECT, found + service.before, advice)
    if service.jobs and service.holder:
        found = f"no operator serves namespace {namespace}, which has jobs{service.before}"
        return Finding(SUBJECT, found, "ask the administrator whether the operator runs")
    return _describe_unknown(service)


def _describe_unknown(service: Service) -> Finding:
    found = f"it is not known whether one serves namespace {service.namespace}"
    lease = f"Lease {names.INSTALLATION_LEASE}"
    if not service.is_readable:
        found += f": you may not read its {lease}"
    elif not service.jobs:
        found += f": it has a current {lease} only while it has jobs{service.before}"
        advice = "submit a job, and run ddpjob doctor again after a minute"
        return Finding(SUBJECT, found, advice, is_unknown=True)
    else:
        found += f": it has jobs, and no {lease}"
    advice = f"if jobs do not run, ask an administrator for ddpjob doctor -n {service.namespace}"
    return Finding(SUBJECT, found, advice, is_unknown=True)


# The Deployment


def _check_deployment(deployment: Dict) -> Iterable[Finding]:
    metadata = deployment["metadata"]
    place = f"{metadata['namespace']}/{metadata['name']}"
    ready = integer_or_zero(child(deployment, "status").get("readyReplicas"))
    version = child(metadata, "labels").get(VERSION_LABEL, "")
    if not ready:
        advice = f"see kubectl -n {metadata['namespace']} logs deployment/{metadata['name']}"
        yield Finding(SUBJECT, f"{place} has no ready pod", advice)
    elif version != __version__:
        found = f"{place} is of version {version}, this program of {__version__}"
        yield Finding(SUBJECT, found, "use the same version of both")
    else:
        yield Finding(SUBJECT, f"{place} {version} is ready")


def _arguments(deployment: Dict, option: str) -> list[str]:
    """Return the values of an option of the operator."""
    template = child(child(deployment, "spec"), "template")
    found = []
    for container in children(child(template, "spec"), "containers"):
        for word in strings_or_empty(container.get("args")):
            name, equals, value = word.partition("=")
            if name == option and equals:
                found.append(value)
    return found


def _check_watched(client: AsyncClient, deployment: Dict) -> Sequence[Finding]:
    name = deployment["metadata"]["name"]
    watched = _arguments(deployment, "--namespace")
    if watched and client.namespace not in watched:
        found = f"{name} watches only {', '.join(watched)}"
        advice = f"add {client.namespace} to watchNamespaces in the values of its chart"
        return [Finding(SUBJECT, found, advice)]
    if client.namespace in _arguments(deployment, "--exclude-namespace"):
        found = f"{name} excludes the namespace {client.namespace}"
        advice = "use another one, or remove it from excludedNamespaces in the values of its chart"
        return [Finding(SUBJECT, found, advice)]
    return ()


async def _check_lease(client: AsyncClient, deployment: Dict) -> Sequence[Finding]:
    namespace = deployment["metadata"]["namespace"]
    wanted = _arguments(deployment, "--lease-name") or [names.MANAGER]
    leases = await list_if_allowed(client, LEASES, namespace)
    if leases is None:
        return ()
    for lease in leases:
        if lease["metadata"]["name"] not in wanted:
            continue
        spec = child(lease, "spec")
        renewed = parse_time(spec.get("renewTime"))
        if renewed and datetime.now(UTC) - renewed < STALE_LEASE:
            holder, _, _ = str(spec.get("holderIdentity")).partition("_")
            return [Finding("Leader", f"{holder} leads")]
    advice = "its pods wait for the Lease, or cannot write it; see their logs"
    return [Finding("Leader", f"no operator in namespace {namespace} leads", advice)]
