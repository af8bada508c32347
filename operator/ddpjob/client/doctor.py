"""Checks of a cluster: the operator, the user's rights, and what jobs need in a namespace.

An ordinary user may not read everything. All forbidden checks together are one finding. A resource
needed by only some jobs is not a problem.
"""

import re
import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ddpjob import __version__
from ddpjob.client.async_client import AsyncClient
from ddpjob.client.errors import ClientError, NotConnected, Rejected, client_errors
from ddpjob.client.findings import (
    Finding,
    is_forbidden,
    jobs_of_namespace,
    list_all,
    list_if_allowed,
)
from ddpjob.client.networks import Gap, find_gaps
from ddpjob.client.operators import OPERATOR, VERSION_LABEL, check_operator
from ddpjob.client.queues import check_queues
from ddpjob.client.quotas import unnamed_resources
from ddpjob.core.api import names, profiles
from ddpjob.core.api.kubernetes import advice_on_version, note_on_version
from ddpjob.core.api.readers import Dict, child, children, either
from ddpjob.kube.kinds import (
    ACCESS_REVIEWS,
    CLAIMS,
    CRDS,
    DEPLOYMENTS,
    JOBS,
    NAMESPACES,
    NODES,
    SELF_REVIEWS,
    Kind,
)
from ddpjob.kube.request import ReadDocument, Request, Verb

POD_SECURITY = "pod-security.kubernetes.io/enforce"


class Right(NamedTuple):
    """A right on a resource. The `commands` of this program need it."""

    verb: str
    group: str
    resource: str
    commands: Sequence[str]


RIGHTS = (
    Right("create", names.GROUP, names.PLURAL, ("submit",)),
    Right("get", names.GROUP, names.PLURAL, ("status",)),
    Right("list", names.GROUP, names.PLURAL, ("list",)),
    Right("watch", names.GROUP, names.PLURAL, ("wait",)),
    Right("patch", names.GROUP, names.PLURAL, ("submit", "suspend", "scale")),
    Right("delete", names.GROUP, names.PLURAL, ("delete",)),
    Right("list", "", "pods", ("logs", "status")),
    Right("watch", "", "pods", ("logs --follow",)),
    Right("get", "", "pods/log", ("logs",)),
    Right("create", "", "configmaps", ("submit --script",)),
    Right("patch", "", "configmaps", ("submit --script",)),
)
READING = ("get", "list", "watch")

# Options of `ddpjob submit` for the resources demanded by a quota.
QUOTA_OPTIONS = {
    "requests.cpu": "--cpu 4",
    "requests.memory": "--memory 16Gi",
    "limits.memory": "--memory 16Gi",
    "limits.cpu": "--set spec.resources.limits.cpu=4",
}

# Parts of the names of provisioners with shared volumes: several nodes can mount them for writing.
SHARED_PROVISIONERS = ("efs.csi", "fsx", "nfs", "filestore", "file.csi", "cephfs", "longhorn")


# The API server sets this label of each namespace to the namespace's name.
NAMESPACE_LABEL = "kubernetes.io/metadata.name"

NETWORK_ADVICE = "create a NetworkPolicy that admits all ports: workers connect on random ones"
NETWORK_PAGE = "users/teams.md#networks"

QUOTAS = Kind("", "v1", "resourcequotas")
LIMIT_RANGES = Kind("", "v1", "limitranges")
STORAGE_CLASSES = Kind("storage.k8s.io", "v1", "storageclasses", namespaced=False)

# The kinds of the objects in requests for reviews.
REVIEWS = {ACCESS_REVIEWS: "SelfSubjectAccessReview", SELF_REVIEWS: "SelfSubjectReview"}

Check = Callable[[AsyncClient], Awaitable[Sequence[Finding]]]


async def examine(client: AsyncClient) -> AsyncGenerator[Finding, None]:
    """Yield the findings of all checks. Raises NotConnected without a cluster."""
    with client_errors():
        version = await client.api.call(ReadDocument("version"))
    found = version["gitVersion"]
    answer = f"{found} answers{note_on_version(found)}"
    yield Finding("Kubernetes", answer, advice_on_version(found))
    hidden = []
    for check in CHECKS:
        try:
            for finding in await check(client):
                yield finding
        except NotConnected:
            raise
        except ClientError as error:
            if is_forbidden(error):
                hidden.append(SUBJECTS[check])
            else:
                found = f"cannot be read: {error}"
                yield Finding(SUBJECTS[check], found, "run ddpjob doctor again", is_unknown=True)
    if hidden:
        seen = f"you may not look at: {', '.join(hidden)}"
        advice = f"if jobs do not run, ask an administrator for ddpjob doctor -n {client.namespace}"
        yield Finding("Not checked", seen, advice, is_unknown=True)


async def check_crd(client: AsyncClient) -> Sequence[Finding]:
    """Check whether the API server serves DDPJobs, in the version of this program."""
    with client_errors():
        served = await client.api.read(ReadDocument(JOBS.api))
    if not served:
        advice = "install the operator's chart; it brings the CustomResourceDefinition"
        return [Finding("DDPJobs", f"the cluster does not serve {names.API_VERSION}", advice)]
    version = None
    # Only an administrator may read it.
    with suppress(ClientError), client_errors():
        read = Request(Verb.GET, CRDS, name=f"{names.PLURAL}.{names.GROUP}")
        crd = await client.api.read(read)
        version = child(child(crd, "metadata"), "labels").get(VERSION_LABEL)
    if version in (None, __version__):
        return [Finding("DDPJobs", f"served as {names.API_VERSION}")]
    found = f"the CRD is of {version}, this program of {__version__}"
    advice = "use the version of ddpjob that the cluster has, or upgrade the chart"
    return [Finding("DDPJobs", found, advice)]


async def check_rights(client: AsyncClient) -> Sequence[Finding]:
    """Check what the user may do in the namespace."""
    missing = [right for right in RIGHTS if not await _has_right(client, right)]
    where = f"in namespace {client.namespace}"
    if not missing:
        return [Finding("Rights", f"you may submit, follow, change and delete jobs {where}")]
    commands: list[str] = []
    verbs: dict[str, list[str]] = {}
    for right in missing:
        commands += right.commands
        verbs.setdefault(right.resource, []).append(right.verb)
    lacks = "; ".join(f"{', '.join(each)} {resource}" for resource, each in verbs.items())
    failing = ", ".join(dict.fromkeys(commands))
    found = f"{failing} cannot work {where}: you may not {lacks}"
    role = "view" if all(right.verb in READING for right in missing) else "edit"
    advice = await _advise_role(client, role)
    return [Finding("Rights", found, advice)]


async def _has_right(client: AsyncClient, right: Right) -> bool:
    name, _, subresource = right.resource.partition("/")
    attributes = {
        "namespace": client.namespace,
        "verb": right.verb,
        "group": right.group,
        "resource": name,
        "subresource": subresource,
    }
    answer = await _review(client, ACCESS_REVIEWS, {"resourceAttributes": attributes})
    return bool(child(answer, "status").get("allowed"))


async def _advise_role(client: AsyncClient, role: str) -> str:
    """Return the command for a role of Kubernetes. The chart adds the rights on jobs to it."""
    user = ""
    with suppress(Rejected):
        review = await _review(client, SELF_REVIEWS, {})
        user = str(child(child(review, "status"), "userInfo").get("username") or "")
    name = re.sub(r"[^\w.@:-]", "-", f"{role}-{user or 'jobs'}")
    return (
        f"ask an administrator: kubectl -n {client.namespace} create rolebinding {name} "
        f"--clusterrole={role} --user={shlex.quote(user or 'NAME')}; the chart's "
        f"rbac.aggregateRoles, which is on by default, adds DDPJobs to {role}"
    )


async def _review(client: AsyncClient, kind: Kind, spec: Dict) -> dict[str, Any]:
    body: dict[str, Any] = {
        "apiVersion": f"{kind.group}/{kind.version}",
        "kind": REVIEWS[kind],
    }
    if spec:
        body["spec"] = spec
    with client_errors():
        return await client.api.call(Request(Verb.CREATE, kind, body=body))


async def check_pod_security(client: AsyncClient) -> Sequence[Finding]:
    """Check whether the namespace admits the operator's pods."""
    with client_errors():
        namespace = await client.api.read(Request(Verb.GET, NAMESPACES, name=client.namespace))
    if namespace is None:
        advice = f"kubectl create namespace {client.namespace}"
        return [Finding("Namespace", f"{client.namespace} does not exist", advice)]
    level = child(namespace["metadata"], "labels").get(POD_SECURITY, "privileged")
    if level != "restricted":
        return [Finding("Pod Security", f"level {level}, which takes the operator's pods")]
    deployments = await list_if_allowed(client, DEPLOYMENTS, None, OPERATOR)
    if deployments is None:
        advice = "set spec.podSecurity: Restricted in your jobs, if the operator does not do so"
        return [Finding("Pod Security", "level restricted", advice, is_unknown=True)]
    for deployment in deployments:
        if "--pod-security=restricted" in str(deployment["spec"]):
            return [Finding("Pod Security", "level restricted, which the operator follows")]
    advice = "set spec.podSecurity: Restricted in the jobs, or podSecurity=restricted in the chart"
    return [Finding("Pod Security", "level restricted, not the default of the pods", advice)]


async def check_quota(client: AsyncClient) -> Sequence[Finding]:
    """Check the quotas of the namespace for room, and for resources required of each container."""
    findings = []
    quotas = await list_all(client, QUOTAS, client.namespace)
    limit_ranges = await list_if_allowed(client, LIMIT_RANGES, client.namespace) if quotas else ()
    for quota in quotas:
        name = quota["metadata"]["name"]
        full = _full_limits(quota)
        unnamed = unnamed_resources(quota, limit_ranges or ())
        if unnamed:
            is_unknown = limit_ranges is None
            findings.append(_describe_unnamed(name, unnamed, is_unknown=is_unknown))
        if full:
            advice = "delete finished jobs, or ask for more; jobs wait until there is room"
            findings.append(Finding("Quota", f"{name} is used up: {', '.join(full)}", advice))
        elif not unnamed:
            findings.append(Finding("Quota", f"{name} has room"))
    return findings or [Finding("Quota", f"namespace {client.namespace} has none")]


def _describe_unnamed(quota: str, unnamed: Sequence[str], *, is_unknown: bool) -> Finding:
    options = " ".join(dict.fromkeys(QUOTA_OPTIONS[resource] for resource in unnamed))
    found = f"{quota} refuses jobs without {', '.join(unnamed)} in spec.resources"
    advice = f"submit jobs with {options}, or ask for a LimitRange with defaults in the namespace"
    return Finding("Quota", found, advice, is_unknown=is_unknown)


def _full_limits(quota: Dict) -> Sequence[str]:
    """Return the used-up limits of a quota, such as `pods 4 of 4`."""
    status = child(quota, "status")
    used = child(status, "used")
    full = []
    for key, limit in child(status, "hard").items():
        amount = used.get(key)
        if _is_used_up(str(amount), str(limit)):
            full.append(f"{key} {amount} of {limit}")
    return full


def _is_used_up(used: str, limit: str) -> bool:
    # A limit of 0 forbids a kind of object. It is not a lack of room.
    if used.isdecimal() and limit.isdecimal():
        return int(used) >= int(limit) > 0
    # Quantities such as 8Gi: the API server writes equal ones alike.
    return used == limit and limit != "0"


async def check_devices(client: AsyncClient) -> Sequence[Finding]:
    """Check for usable nodes, and count their devices."""
    nodes = [node for node in await list_all(client, NODES) if _is_usable(node)]
    if not nodes:
        advice = "add a node, or uncordon one: kubectl get nodes"
        return [Finding("Nodes", "no node is ready and takes pods", advice)]
    totals = _count_devices(nodes)
    found = []
    for device, count in totals.items():
        if count:
            fitting = ", ".join(profiles.profiles_with(device))
            found.append(f"{count} {device} ({fitting})")
    if not found:
        found = [f"no {either(totals)}, so only accelerator {profiles.DEFAULT}"]
    return [Finding("Nodes", f"{len(nodes)} ready, {', '.join(found)}")]


def _count_devices(nodes: Sequence[Dict]) -> Mapping[str, int]:
    """Return the number of devices of all nodes, for each kind of device."""
    totals = dict.fromkeys(profiles.all_devices(), 0)
    for node in nodes:
        allocatable = child(child(node, "status"), "allocatable")
        for device in totals:
            count = str(allocatable.get(device, "0"))
            if count.isdecimal():
                totals[device] += int(count)
    return totals


def _is_usable(node: Dict) -> bool:
    if child(node, "spec").get("unschedulable"):
        return False
    for taint in children(child(node, "spec"), "taints"):
        if taint.get("key") == "node-role.kubernetes.io/control-plane":
            return False
    conditions = children(child(node, "status"), "conditions")
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


async def check_storage(client: AsyncClient) -> Sequence[Finding]:
    """Check for missing claims of jobs, and look for storage shared by several nodes."""
    claims = await list_all(client, CLAIMS, client.namespace)
    known = {claim["metadata"]["name"] for claim in claims}
    findings = []
    for job in await jobs_of_namespace(client):
        if job.finished:
            continue
        for name in job.claims:
            if name not in known:
                found = f"job {job.name} mounts claim {name}, which does not exist"
                advice = "create the claim, or submit the job again with another one"
                findings.append(Finding("Storage", found, advice))
    if findings:
        return findings
    return [Finding("Storage", await _describe_sharing(client, claims))]


async def _describe_sharing(client: AsyncClient, claims: Iterable[Dict]) -> str:
    """Describe the storage for checkpoints shared by several nodes. Not every job needs it."""
    shared = [claim["metadata"]["name"] for claim in claims if _is_shared(claim)]
    if shared:
        return f"claims that all nodes can mount: {', '.join(shared)}"
    classes = await list_if_allowed(client, STORAGE_CLASSES) or ()
    fitting = [one["metadata"]["name"] for one in classes if _can_share(one)]
    if fitting:
        return f"no claim with ReadWriteMany is bound, but class {', '.join(fitting)} can give one"
    return (
        "no claim or class with ReadWriteMany is known; only jobs of several nodes with "
        "spec.checkpoint need one"
    )


def _is_shared(claim: Dict) -> bool:
    modes = child(claim, "spec").get("accessModes", ())
    phase = child(claim, "status").get("phase")
    return "ReadWriteMany" in modes and phase == "Bound"


def _can_share(storage_class: Dict) -> bool:
    provisioner = str(storage_class.get("provisioner"))
    return any(part in provisioner for part in SHARED_PROVISIONERS)


async def check_dns(client: AsyncClient) -> Sequence[Finding]:
    """Check for a ready server of the cluster's DNS. The nodes of a job find each other by DNS."""
    slices = await list_all(
        client,
        Kind("discovery.k8s.io", "v1", "endpointslices"),
        "kube-system",
        "kubernetes.io/service-name=kube-dns",
    )
    ready = 0
    for one in slices:
        for endpoint in children(one, "endpoints"):
            ready += bool(child(endpoint, "conditions").get("ready", True))
    if ready:
        return [Finding("DNS", f"{ready} servers of kube-dns are ready")]
    if not slices:
        advice = "if workers do not find each other, look at the DNS that the cluster has instead"
        return [Finding("DNS", "there is no kube-dns in kube-system", advice, is_unknown=True)]
    advice = "see kubectl -n kube-system get pods -l k8s-app=kube-dns"
    return [Finding("DNS", "no server of kube-dns is ready", advice)]


async def check_networks(client: AsyncClient) -> Sequence[Finding]:
    """Check for connections blocked by NetworkPolicies: between a job's pods, and to the DNS."""
    kind = Kind("networking.k8s.io", "v1", "networkpolicies")
    policies = await list_all(client, kind, client.namespace)
    namespace = None
    # Without the right to read the namespace, one of its labels is still known: its name.
    with suppress(ClientError), client_errors():
        namespace = await client.api.read(Request(Verb.GET, NAMESPACES, name=client.namespace))
    labels = {
        NAMESPACE_LABEL: client.namespace,
        **child(child(namespace, "metadata"), "labels"),
    }
    findings = []
    for gap in find_gaps(policies, labels):
        found = _describe_gap(gap)
        findings.append(Finding("Networks", found, NETWORK_ADVICE, NETWORK_PAGE))
    if findings:
        return findings
    if not policies:
        return [Finding("Networks", f"namespace {client.namespace} has no NetworkPolicy")]
    return [Finding("Networks", "no NetworkPolicy keeps the pods of a job apart")]


def _describe_gap(gap: Gap) -> str:
    whose = f"the pods of job {gap.job}" if gap.job else "the pods of a job"
    policies = ", ".join(gap.policies)
    who = f"NetworkPolicies {policies} admit"
    if len(gap.policies) == 1:
        who = f"NetworkPolicy {policies} admits"
    return f"{whose} cannot reach {gap.target}: {who} no such {gap.direction}"


SUBJECTS: Mapping[Check, str] = {
    check_crd: "DDPJobs",
    check_operator: "Operator",
    check_rights: "Rights",
    check_pod_security: "Pod Security",
    check_quota: "Quota",
    check_devices: "Nodes",
    check_storage: "Storage",
    check_dns: "DNS",
    check_networks: "Networks",
    check_queues: "Queues",
}
CHECKS: Iterable[Check] = tuple(SUBJECTS)
