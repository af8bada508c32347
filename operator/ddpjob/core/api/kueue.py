"""Kueue's Workload, `kueue.x-k8s.io/v1beta2`. Its fields are known only here.

A Workload asks for the room of one job. Kueue admits it, or takes the room back (evicts it). The
operator makes the Workload of a job, and gives the room back once no pod of the job uses it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from ddpjob.core.api import names
from ddpjob.core.api.owned import owned_metadata, owner_of
from ddpjob.core.api.queue import GROUP, Queue
from ddpjob.core.api.readers import (
    Dict,
    child,
    children,
    integer_or_none,
    integer_or_zero,
    integers_or_empty,
    strings_or_empty,
)
from ddpjob.core.api.scheduling import Topology
from ddpjob.core.api.times import format_time, parse_time

VERSION = "v1beta2"
API_VERSION = f"{GROUP}/{VERSION}"

# What Kueue expects of a Workload and of its pods.
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_POD_SET = f"{GROUP}/podset"
TOPOLOGY_KINDS = ("required", "preferred", "unconstrained")
TOPOLOGY_OF_POD = f"{GROUP}/podset-{{}}-topology"
ANNOTATION_WORKLOAD = f"{GROUP}/workload"
POD_SET = "main"

# It holds a deleted Workload, with its quota, until no pod uses the quota.
FINALIZER = f"{GROUP}/resource-in-use"

# So many places of a job are looked at if the status of the job was lost.
MAX_PLACES = 1000

# How Kueue's pod integration marks a pod that it takes for one of its own.
POD_GATE = f"{GROUP}/admission"
POD_FINALIZER = f"{GROUP}/managed"

# Kueue's webhook for pods. Without its answer, the API server refuses all pods of the cluster.
POD_WEBHOOK = "mpod.kb.io"

# Types of conditions, and a reason of an eviction.
ADMITTED, QUOTA_RESERVED, EVICTED, FINISHED = "Admitted", "QuotaReserved", "Evicted", "Finished"
PODS_READY, REQUEUED = "PodsReady", "Requeued"
PREEMPTED = "Preempted"

# After these evictions, Kueue itself queues the Workload again, once the room is given back.
REQUEUED_AFTER = (PREEMPTED, "NodeFailures")


# The values of the labels of a domain, in their order. All domains of a Workload have equal labels.
PlaceKey = tuple[str | None, ...]


def place_key(labels: Iterable[str], selector: Mapping[str, str]) -> PlaceKey:
    """Return the values of a node selector for the labels of a domain."""
    return tuple(selector.get(label) for label in labels)


class Domain(NamedTuple):
    """A part of the cluster, by the labels of its nodes, and how many nodes of a job it has."""

    labels: Mapping[str, str]
    size: int

    @property
    def key(self) -> PlaceKey:
        return place_key(self.labels, self.labels)


@dataclass(frozen=True)
class Workload:
    """What the operator keeps of a Workload.

    - `job_uid`: UID of the owning job. `count`: the number of requested nodes.
    - `held`: it has the operator's finalizer, and `finalizers` are the others.
    - `has_quota`: Kueue has reserved quota for it, and the quota is not given back.
    - `flavors`: the ResourceFlavors of its place. `updates`: what its admission checks ask of pods.
    - `checks`: its admission checks that are not ready, with their words.
    - `topology`: the kind and the label of the requested topology, if any.
    - `domains`: the parts of the cluster with its room, in the order of the nodes of the job.
      `unhealthy`: nodes of these that Kueue is about to replace.
    - `past_seconds`: for how long it had room before. This counts for the longest time.
    """

    name: str
    namespace: str
    uid: str
    version: str
    job_name: str
    job_uid: str
    queue: str
    count: int
    deleting: bool
    held: bool
    finalizers: tuple[str, ...]
    has_quota: bool
    conditions: tuple[Dict, ...]
    flavors: tuple[str, ...]
    updates: tuple[Dict, ...]
    past_seconds: int = 0
    checks: tuple[str, ...] = ()
    topology: tuple[str, str] | None = None
    domains: tuple[Domain, ...] = ()
    unhealthy: tuple[str, ...] = ()

    @property
    def job(self) -> names.Identity:
        return names.Identity(self.namespace, self.job_name, self.job_uid)

    def condition(self, kind: str) -> Dict:
        return next((one for one in self.conditions if one.get("type") == kind), {})

    def holds(self, kind: str) -> bool:
        return self.condition(kind).get("status") == "True"

    @property
    def finished(self) -> bool:
        return self.holds(FINISHED)

    @property
    def evicted(self) -> bool:
        return self.holds(EVICTED)

    @property
    def may_run(self) -> bool:
        """Return True if the pods of the job may exist."""
        return self.holds(ADMITTED) and not (self.evicted or self.deleting or self.finished)

    def is_for(self, queue: Queue | None, count: int, topology: Topology | None) -> bool:
        """Return True if it asks a queue for such a room. Without a queue, any will do."""
        is_same = self.count == count and self.topology == _request_of(topology)
        return is_same and (queue is None or self.queue == queue.name)


def read_workload(body: Dict) -> Workload | None:
    """Return what is kept of a Workload; None for one that is of no DDPJob."""
    metadata = child(body, "metadata")
    owner = job_of(body)
    if owner is None:
        return None
    spec, status = child(body, "spec"), child(body, "status")
    finalizers = [str(one) for one in metadata.get("finalizers") or ()]
    admission = child(status, "admission")
    conditions = tuple(children(status, "conditions"))
    is_reserved = any(
        one.get("type") == QUOTA_RESERVED and one.get("status") == "True" for one in conditions
    )
    return Workload(
        name=str(metadata.get("name")),
        namespace=str(metadata.get("namespace")),
        uid=str(metadata.get("uid")),
        version=str(metadata.get("resourceVersion")),
        job_name=owner.name,
        job_uid=owner.uid,
        queue=str(spec.get("queueName", "")),
        count=sum(integer_or_none(one.get("count")) or 0 for one in children(spec, "podSets")),
        deleting=bool(metadata.get("deletionTimestamp")),
        held=FINALIZER in finalizers,
        finalizers=tuple(one for one in finalizers if one != FINALIZER),
        has_quota=bool(admission) or is_reserved,
        conditions=conditions,
        flavors=tuple(dict.fromkeys(_flavors(admission))),
        updates=tuple(_updates(status)),
        checks=tuple(_checks(status)),
        topology=_read_request(spec),
        domains=tuple(_domains(admission)),
        unhealthy=tuple(str(one.get("name")) for one in children(status, "unhealthyNodes")),
        past_seconds=integer_or_none(status.get("accumulatedPastExecutionTimeSeconds")) or 0,
    )


def job_of(body: Dict) -> names.Identity | None:
    """Return the DDPJob that owns a Workload, or None.

    Without any owner, it is the job in the labels: if a job is deleted with `--cascade=orphan`, the
    garbage collector takes the owner off.
    """
    metadata = child(body, "metadata")
    if metadata.get("ownerReferences"):
        return owner_of(body)
    labels = child(metadata, "labels")
    job, uid = labels.get(names.LABEL_JOB), labels.get(LABEL_JOB_UID)
    if not (job and uid):
        return None
    return names.Identity(str(metadata.get("namespace")), str(job), str(uid))


def _flavors(admission: Dict) -> Iterator[str]:
    for assignment in children(admission, "podSetAssignments"):
        for flavor in child(assignment, "flavors").values():
            yield str(flavor)


def _request_of(topology: Topology | None) -> tuple[str, str] | None:
    return (topology.kind, topology.key) if topology else None


def _read_request(spec: Dict) -> tuple[str, str] | None:
    for pod_set in children(spec, "podSets"):
        for kind, key in child(pod_set, "topologyRequest").items():
            if kind in ("required", "preferred"):
                return kind, str(key)
    return None


def _domains(admission: Dict) -> Iterator[Domain]:
    """Yield the domains of a topology assignment, from its compressed values.

    A slice has a list of domains. Each value is `universal` for all of them, or `individual`.
    """
    for assignment in children(admission, "podSetAssignments"):
        found = child(assignment, "topologyAssignment")
        levels = strings_or_empty(found.get("levels"))
        for one in children(found, "slices"):
            size = min(integer_or_zero(one.get("domainCount")), names.MAX_NODES)
            counts = _expanded(child(one, "podCounts"), size)
            values = [_expanded(level, size) for level in children(one, "valuesPerLevel")]
            for count, *place in zip(counts, *values, strict=False):
                labels = dict(zip(levels, map(str, place), strict=False))
                yield Domain(labels, integer_or_zero(count))


def _expanded(values: Dict, size: int) -> Sequence[Any]:
    if "universal" in values:
        return [values["universal"]] * size
    individual = values.get("individual")
    if not isinstance(individual, Mapping):
        return integers_or_empty(individual)
    prefix, suffix = individual.get("prefix") or "", individual.get("suffix") or ""
    return [f"{prefix}{root}{suffix}" for root in strings_or_empty(individual.get("roots"))]


def _checks(status: Dict) -> Iterator[str]:
    for check in children(status, "admissionChecks"):
        if check.get("state") != "Ready":
            words = str(check.get("message") or "")
            yield f"{check.get('name')} ({words})" if words else str(check.get("name"))


def _updates(status: Dict) -> Iterator[Dict]:
    """Yield what the admission checks ask of the pods."""
    for check in children(status, "admissionChecks"):
        for update in children(check, "podSetUpdates"):
            if update.get("name") == POD_SET:
                yield update


def workload_name(job: str, uid: str, number: int) -> str:
    """Return the name of a job's Workload. A repeated request finds the same one.

    The hash tells apart the places of one job, and jobs of the same name.
    """
    digest = hashlib.sha256(f"{uid}/{number}".encode()).hexdigest()[:8]
    return f"ddpjob-{job}-{digest}"


def workload_of_place(
    workloads: Iterable[Workload], job: names.Identity, number: int, uid: str
) -> Workload | None:
    """Return the Workload of a job's place, or None. `uid` is empty until it was admitted."""
    name = workload_name(job.name, job.uid, number)
    named = (one for one in workloads if one.name == name)
    return next((one for one in named if uid in ("", one.uid)), None)


def newest_number(job: str, uid: str, found: Iterable[str]) -> int:
    """Return the largest place number among Workloads of these names; 0 for none."""
    known = set(found)
    numbers = range(MAX_PLACES, 0, -1) if known else ()
    return next((number for number in numbers if workload_name(job, uid, number) in known), 0)


@dataclass(frozen=True)
class Priority:
    """The priority of a Workload, and the priority class behind it."""

    value: int
    group: str
    kind: str
    name: str


@dataclass(frozen=True)
class Demand:
    """What a job asks a queue for: the room of `count` pods like `template`."""

    queue: Queue
    count: int
    template: Dict
    priority: Priority | None = None
    topology: Topology | None = None


def new_workload(owner: names.Identity, number: int, demand: Demand) -> dict[str, Any]:
    """Return the Workload of a job. `number` is the number of its place.

    Raises SpecError for a wrong label of the queue.
    """
    queue, priority = demand.queue, demand.priority
    pod_set = {"name": POD_SET, "count": demand.count, "template": demand.template}
    if demand.topology:
        level = {demand.topology.kind: demand.topology.key}
        pod_set["topologyRequest"] = {**level, "podIndexLabel": names.LABEL_INDEX}
    spec: dict[str, Any] = {"queueName": queue.name, "active": True, "podSets": [pod_set]}
    if priority:
        reference = {"group": priority.group, "kind": priority.kind, "name": priority.name}
        spec |= {"priority": priority.value, "priorityClassRef": reference}
    max_seconds = queue.read_max_time()
    if max_seconds:
        spec["maximumExecutionTimeSeconds"] = max_seconds
    name = workload_name(owner.name, owner.uid, number)
    metadata = owned_metadata(owner, name, {LABEL_JOB_UID: owner.uid})
    return {
        "apiVersion": API_VERSION,
        "kind": "Workload",
        "metadata": {**metadata, "finalizers": [FINALIZER]},
        "spec": spec,
    }


# Changes of the status. Kueue replaces what is not in a list of conditions, so each change has all.


def given_back(workload: Workload, now: datetime) -> dict[str, Any]:
    """Return the change of a status that gives the room of an evicted Workload back."""
    reason = str(workload.condition(EVICTED).get("reason", ""))
    message = str(workload.condition(EVICTED).get("message", ""))
    requeued = reason in REQUEUED_AFTER
    return {
        "admission": None,
        # Kueue ends a job that has had room for longer than its label allows.
        "accumulatedPastExecutionTimeSeconds": _used_seconds(workload, now),
        "conditions": _with_conditions(
            workload,
            now,
            (QUOTA_RESERVED, False, "Pending", message),
            (ADMITTED, False, "NoReservation", "The workload has no reservation"),
            (REQUEUED, requeued, reason, message),
            (PODS_READY, False, "WaitForStart", "the pods of the attempt have ended"),
        ),
    }


def _used_seconds(workload: Workload, now: datetime) -> int:
    """Return for how long a Workload has had room, in all its admissions."""
    since = parse_time(workload.condition(ADMITTED).get("lastTransitionTime"))
    if since is None or not workload.holds(ADMITTED):
        return workload.past_seconds
    return workload.past_seconds + max(0, int((now - since).total_seconds()))


def pods_ready(workload: Workload, is_ready: bool, now: datetime) -> dict[str, Any]:
    """Return the change of a status that says whether the workers of all pods have met."""
    before = workload.condition(PODS_READY)
    if is_ready:
        reason = "Recovered" if before.get("reason") == "WaitForRecovery" else "Started"
        change = (PODS_READY, True, reason, "the workers of all pods have met")
    else:
        change = (PODS_READY, False, "WaitForRecovery", "an attempt has ended, another one begins")
    return {"conditions": _with_conditions(workload, now, change)}


def ended(workload: Workload, succeeded: bool, message: str, now: datetime) -> dict[str, Any]:
    """Return the change of a status that reports the end of the job."""
    reason = "Succeeded" if succeeded else "Failed"
    return {"conditions": _with_conditions(workload, now, (FINISHED, True, reason, message))}


def _with_conditions(
    workload: Workload,
    now: datetime,
    *changes: tuple[str, bool, str, str],
) -> Sequence[Dict]:
    """Return all conditions of a Workload. A time changes only with the status of its condition."""
    conditions: dict[str, Dict] = {str(one.get("type")): one for one in workload.conditions}
    for kind, holds, reason, message in changes:
        status = "True" if holds else "False"
        before = conditions.get(kind, {})
        is_same = before.get("status") == status
        conditions[kind] = {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": message[:32768],
            "lastTransitionTime": before["lastTransitionTime"] if is_same else format_time(now),
        }
    return list(conditions.values())


@dataclass(frozen=True)
class Placement:
    """Where the pods of an admitted Workload may run: labels of nodes, and taints to tolerate."""

    workload: str
    node_labels: Mapping[str, str]
    tolerations: Sequence[Dict]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    domains: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


def free_places(workload: Workload, taken: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the node labels of each free place of a Workload, in the order of the places.

    `taken` has the node selectors of the pods with places. Kueue sorts the places anew when it
    replaces a node, so the remaining pods decide what is free.
    """
    levels = list(workload.domains[0].labels) if workload.domains else []
    used = Counter(place_key(levels, selector) for selector in taken)
    left: list[Mapping[str, str]] = []
    for domain in workload.domains:
        count = min(domain.size, used[domain.key])
        used[domain.key] -= count
        left += [domain.labels] * (domain.size - count)
    return left


def placement_of(
    workload: Workload,
    flavors: Sequence[Dict],
    domains: Mapping[int, Mapping[str, str]] | None = None,
) -> Placement:
    """Return the placement of a Workload. `flavors` are the objects of its ResourceFlavors.

    `domains` has the labels of the nodes for each new pod, by its index.
    """
    node_labels: dict[str, str] = {}
    tolerations: list[Dict] = []
    labels = {LABEL_POD_SET: POD_SET}
    annotations = {ANNOTATION_WORKLOAD: workload.name}
    if workload.domains:
        # Without this annotation, Kueue counts the pod a second time.
        kind, key = workload.topology or ("unconstrained", "true")
        annotations[TOPOLOGY_OF_POD.format(kind)] = key
    for flavor in flavors:
        spec = child(flavor, "spec")
        node_labels |= child(spec, "nodeLabels")
        tolerations += children(spec, "tolerations")
    for update in workload.updates:
        node_labels |= child(update, "nodeSelector")
        tolerations += children(update, "tolerations")
        labels |= child(update, "labels")
        annotations |= child(update, "annotations")
    return Placement(workload.name, node_labels, tolerations, labels, annotations, domains or {})


def selector_of_place(pod: Dict) -> Dict:
    """Return the node selector of a pod with a place in a topology, or an empty one for others."""
    annotations = child(child(pod, "metadata"), "annotations")
    has_place = any(TOPOLOGY_OF_POD.format(kind) in annotations for kind in TOPOLOGY_KINDS)
    return child(child(pod, "spec"), "nodeSelector") if has_place else {}
