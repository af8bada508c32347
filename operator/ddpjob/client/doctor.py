"""Checks of a cluster: the operator, the user's rights, and what jobs need in a namespace."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ddpjob import __version__
from ddpjob.client.async_client import AsyncClient
from ddpjob.client.errors import ClientError, NotConnected, client_errors
from ddpjob.client.networks import Gap, find_gaps
from ddpjob.core.api import names, profiles
from ddpjob.core.api.kubernetes import advice_on_version, note_on_version
from ddpjob.core.api.readers import Dict, child, children, either, integer_or_zero, strings_or_empty
from ddpjob.core.api.times import parse_time
from ddpjob.kube.kinds import (
    ACCESS_REVIEWS,
    CRDS,
    DEPLOYMENTS,
    JOBS,
    LEASES,
    NAMESPACES,
    NODES,
    Kind,
)
from ddpjob.kube.request import ReadDocument, Request, Verb
from ddpjob.kube.watch import list_objects

# Labels of the operator's Deployment, as the chart sets them.
OPERATOR = "app.kubernetes.io/part-of=ddpjob,app.kubernetes.io/component=operator"
VERSION_LABEL = "app.kubernetes.io/version"

# A leader renews its Lease every few seconds. The clock of this machine may be another one.
STALE_LEASE = timedelta(seconds=120)

POD_SECURITY = "pod-security.kubernetes.io/enforce"

# What commands of this program do: verb, group, resource, and the command.
RIGHTS = (
    ("create", names.GROUP, names.PLURAL, "submit"),
    ("get", names.GROUP, names.PLURAL, "status"),
    ("list", names.GROUP, names.PLURAL, "list"),
    ("watch", names.GROUP, names.PLURAL, "wait"),
    ("patch", names.GROUP, names.PLURAL, "submit, suspend and scale"),
    ("delete", names.GROUP, names.PLURAL, "delete"),
    ("list", "", "pods", "logs and status"),
    ("watch", "", "pods", "logs --follow"),
    ("get", "", "pods/log", "logs"),
    ("create", "", "configmaps", "submit --script"),
    ("patch", "", "configmaps", "submit --script"),
)

# Provisioners of volumes that several nodes can mount for writing.
SHARED_PROVISIONERS = ("efs.csi", "fsx", "nfs", "filestore", "file.csi", "cephfs", "longhorn")


# The label that the API server gives each namespace: its name.
NAMESPACE_LABEL = "kubernetes.io/metadata.name"

NETWORK_ADVICE = (
    "create the NetworkPolicy of docs/users/teams.md: workers connect to each other on random ports"
)


@dataclass(frozen=True)
class Finding:
    """What a check found. `advice` says what to do; without one all is well."""

    subject: str
    found: str
    advice: str = ""
    # True if the user may not look.
    is_hidden: bool = False


Check = Callable[[AsyncClient], Awaitable[Sequence[Finding]]]


async def examine(client: AsyncClient) -> AsyncGenerator[Finding, None]:
    """Yield the findings of all checks. Raises NotConnected without a cluster."""
    with client_errors():
        version = await client.api.call(ReadDocument("version"))
    found = version["gitVersion"]
    answer = f"{found} answers{note_on_version(found)}"
    yield Finding("Kubernetes", answer, advice_on_version(found))
    for check in CHECKS:
        try:
            for finding in await check(client):
                yield finding
        except NotConnected:
            raise
        except ClientError as error:
            yield Finding(SUBJECTS[check], f"cannot be read: {error}", is_hidden=True)


async def _list(
    client: AsyncClient, kind: Kind, namespace: str | None = None, labels: str = ""
) -> list[dict[str, Any]]:
    query = {"labelSelector": labels} if labels else {}
    with client_errors():
        found, _ = await list_objects(client.api, kind, namespace, query)
    return found


async def check_crd(client: AsyncClient) -> Sequence[Finding]:
    """Check that the API server serves DDPJobs, in the version of this program."""
    with client_errors():
        served = await client.api.read(ReadDocument(JOBS.api))
    if not served:
        advice = "install the operator's chart; it brings the CustomResourceDefinition"
        return [Finding("DDPJobs", f"the cluster does not serve {names.API_VERSION}", advice)]
    version = None
    # Only an administrator may read it.
    with suppress(ClientError), client_errors():
        crd = await client.api.read(Request(Verb.GET, CRDS, name=f"{names.PLURAL}.{names.GROUP}"))
        version = child(child(crd, "metadata"), "labels").get(VERSION_LABEL)
    if version in (None, __version__):
        return [Finding("DDPJobs", f"served as {names.API_VERSION}")]
    advice = "use the version of ddpjob that the cluster has, or upgrade the chart"
    return [Finding("DDPJobs", f"the CRD is of {version}, this program of {__version__}", advice)]


async def check_operator(client: AsyncClient) -> Sequence[Finding]:
    """Check that an operator runs, leads, and has the version of this program."""
    deployments = await _list(client, DEPLOYMENTS, None, OPERATOR)
    if not deployments:
        advice = "install the operator's chart, or start one with ddpjob operator"
        return [Finding("Operator", "no Deployment of it was found in the cluster", advice)]
    findings = []
    for deployment in deployments:
        metadata = deployment["metadata"]
        place = f"{metadata['namespace']}/{metadata['name']}"
        ready = integer_or_zero(child(deployment, "status").get("readyReplicas"))
        version = child(metadata, "labels").get(VERSION_LABEL, "")
        if not ready:
            advice = f"see kubectl -n {metadata['namespace']} logs deployment/{metadata['name']}"
            findings.append(Finding("Operator", f"{place} has no ready pod", advice))
        elif version != __version__:
            found = f"{place} is of version {version}, this program of {__version__}"
            findings.append(Finding("Operator", found, "use the same version of both"))
        else:
            findings.append(Finding("Operator", f"{place} {version} is ready"))
        findings += _check_watched(client, deployment)
        findings += await _check_lease(client, deployment)
    return findings


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
        return [Finding("Operator", found, advice)]
    if client.namespace in _arguments(deployment, "--exclude-namespace"):
        found = f"{name} excludes the namespace {client.namespace}"
        advice = "use another one, or remove it from excludedNamespaces in the values of its chart"
        return [Finding("Operator", found, advice)]
    return ()


async def _check_lease(client: AsyncClient, deployment: Dict) -> Sequence[Finding]:
    namespace = deployment["metadata"]["namespace"]
    wanted = _arguments(deployment, "--lease-name") or [names.MANAGER]
    for lease in await _list(client, LEASES, namespace):
        if lease["metadata"]["name"] not in wanted:
            continue
        renewed = parse_time(child(lease, "spec").get("renewTime"))
        if renewed and datetime.now(UTC) - renewed < STALE_LEASE:
            holder = str(child(lease, "spec").get("holderIdentity")).partition("_")[0]
            return [Finding("Leader", f"{holder} leads")]
    advice = "its pods wait for the Lease, or cannot write it; see their logs"
    return [Finding("Leader", f"no operator in namespace {namespace} leads", advice)]


async def check_rights(client: AsyncClient) -> Sequence[Finding]:
    """Check what the user may do in the namespace."""
    missing = []
    for verb, group, resource, command in RIGHTS:
        name, _, subresource = resource.partition("/")
        attributes = {
            "namespace": client.namespace,
            "verb": verb,
            "group": group,
            "resource": name,
            "subresource": subresource,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        with client_errors():
            answer = await client.api.call(Request(Verb.CREATE, ACCESS_REVIEWS, body=review))
        if not child(answer, "status").get("allowed"):
            missing.append(f"{verb} {resource} (for {command})")
    where = f"in namespace {client.namespace}"
    if missing:
        advice = "ask for a RoleBinding to the chart's ClusterRole for users of jobs"
        return [Finding("Rights", f"you may not {', '.join(missing)} {where}", advice)]
    return [Finding("Rights", f"you may submit, follow, change and delete jobs {where}")]


async def check_pod_security(client: AsyncClient) -> Sequence[Finding]:
    """Check that the namespace takes the pods that the operator makes."""
    with client_errors():
        namespace = await client.api.read(Request(Verb.GET, NAMESPACES, name=client.namespace))
    if namespace is None:
        advice = f"kubectl create namespace {client.namespace}"
        return [Finding("Namespace", f"{client.namespace} does not exist", advice)]
    level = child(namespace["metadata"], "labels").get(POD_SECURITY, "privileged")
    if level != "restricted":
        return [Finding("Pod Security", f"level {level}, which takes the operator's pods")]
    advice = "set spec.podSecurity: Restricted in the jobs, or podSecurity=restricted in the chart"
    deployments = await _list(client, DEPLOYMENTS, None, OPERATOR)
    if any("--pod-security=restricted" in str(found["spec"]) for found in deployments):
        return [Finding("Pod Security", "level restricted, which the operator follows")]
    return [Finding("Pod Security", "level restricted, not the default of the pods", advice)]


async def check_quota(client: AsyncClient) -> Sequence[Finding]:
    """Check that the quotas of the namespace are not used up."""
    findings = []
    for quota in await _list(client, Kind("", "v1", "resourcequotas"), client.namespace):
        status = child(quota, "status")
        used, hard = child(status, "used"), child(status, "hard")
        # A limit of 0 forbids a kind of object, and says nothing of room.
        full = [
            f"{key} {used.get(key)} of {limit}"
            for key, limit in hard.items()
            if _is_used_up(str(used.get(key)), str(limit))
        ]
        name = quota["metadata"]["name"]
        if full:
            advice = "delete finished jobs, or ask for more; jobs wait until there is room"
            findings.append(Finding("Quota", f"{name} is used up: {', '.join(full)}", advice))
        else:
            findings.append(Finding("Quota", f"{name} has room"))
    return findings or [Finding("Quota", f"namespace {client.namespace} has none")]


def _is_used_up(used: str, limit: str) -> bool:
    if used.isdecimal() and limit.isdecimal():
        return int(used) >= int(limit) > 0
    # Quantities such as 8Gi: the API server writes equal ones alike.
    return used == limit and limit != "0"


async def check_devices(client: AsyncClient) -> Sequence[Finding]:
    """Check which devices the nodes have, and that there is a node to run on."""
    nodes = [node for node in await _list(client, NODES) if _is_usable(node)]
    if not nodes:
        advice = "add a node, or uncordon one: kubectl get nodes"
        return [Finding("Nodes", "no node is ready and takes pods", advice)]
    totals: dict[str, int] = {}
    for node in nodes:
        allocatable = child(child(node, "status"), "allocatable")
        for device in profiles.all_devices():
            count = str(allocatable.get(device, "0"))
            totals[device] = totals.get(device, 0) + (int(count) if count.isdecimal() else 0)
    found = [
        f"{count} {device} ({', '.join(profiles.profiles_with(device))})"
        for device, count in totals.items()
        if count
    ]
    devices = ", ".join(found) or f"no {either(totals)}, so only accelerator {profiles.DEFAULT}"
    return [Finding("Nodes", f"{len(nodes)} ready, {devices}")]


def _is_usable(node: Dict) -> bool:
    if child(node, "spec").get("unschedulable"):
        return False
    for taint in children(child(node, "spec"), "taints"):
        if taint.get("key") == "node-role.kubernetes.io/control-plane":
            return False
    conditions = children(child(node, "status"), "conditions")
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


async def check_storage(client: AsyncClient) -> Sequence[Finding]:
    """Check that several nodes can share a claim for checkpoints."""
    claims = await _list(client, Kind("", "v1", "persistentvolumeclaims"), client.namespace)
    shared = [
        claim["metadata"]["name"]
        for claim in claims
        if "ReadWriteMany" in child(claim, "spec").get("accessModes", ())
        and child(claim, "status").get("phase") == "Bound"
    ]
    if shared:
        return [Finding("Storage", f"claims that all nodes can mount: {', '.join(shared)}")]
    classes = await _list(client, Kind("storage.k8s.io", "v1", "storageclasses", namespaced=False))
    fitting = [
        one["metadata"]["name"]
        for one in classes
        if any(words in str(one.get("provisioner")) for words in SHARED_PROVISIONERS)
    ]
    if fitting:
        found = f"no claim with ReadWriteMany is bound, but class {', '.join(fitting)} can give one"
        return [Finding("Storage", found)]
    advice = (
        "jobs of several nodes with spec.checkpoint need one, such as EFS, FSx or NFS; see "
        "docs/users/storage.md"
    )
    return [Finding("Storage", "no claim or class with ReadWriteMany is known", advice)]


async def check_dns(client: AsyncClient) -> Sequence[Finding]:
    """Check that the cluster's DNS answers, by which the nodes of a job find each other."""
    slices = await _list(
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
        return [Finding("DNS", "there is no kube-dns in kube-system", is_hidden=True)]
    advice = "see kubectl -n kube-system get pods -l k8s-app=kube-dns"
    return [Finding("DNS", "no server of kube-dns is ready", advice)]


async def check_networks(client: AsyncClient) -> Sequence[Finding]:
    """Check that no NetworkPolicy keeps the pods of a job from each other, or from the DNS."""
    kind = Kind("networking.k8s.io", "v1", "networkpolicies")
    policies = await _list(client, kind, client.namespace)
    namespace = None
    # Who may not read it knows one of its labels: its name.
    with suppress(ClientError), client_errors():
        namespace = await client.api.read(Request(Verb.GET, NAMESPACES, name=client.namespace))
    labels = child(child(namespace or {}, "metadata"), "labels")
    findings = [
        Finding("Networks", _describe_gap(gap), NETWORK_ADVICE)
        for gap in find_gaps(policies, {NAMESPACE_LABEL: client.namespace, **labels})
    ]
    if findings:
        return findings
    if not policies:
        return [Finding("Networks", f"namespace {client.namespace} has no NetworkPolicy")]
    return [Finding("Networks", "no NetworkPolicy keeps the pods of a job apart")]


def _describe_gap(gap: Gap) -> str:
    whose = f"the pods of job {gap.job}" if gap.job else "the pods of a job"
    kind = "NetworkPolicy" if len(gap.policies) == 1 else "NetworkPolicies"
    verb = "admits" if len(gap.policies) == 1 else "admit"
    return (
        f"{whose} cannot reach {gap.target}: {kind} {', '.join(gap.policies)} {verb} no such "
        f"{gap.direction}"
    )


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
}
CHECKS: Iterable[Check] = tuple(SUBJECTS)
