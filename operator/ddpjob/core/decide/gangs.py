"""Gangs waiting for each other: each holds a part of the room needed by both.

The older job keeps its pods. The younger one gives its pods back, see rules.py. This is the last
resort: it happens only if the pods of the younger job use the room that the older one lacks.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ddpjob.core.api.history import OlderGang
from ddpjob.core.api.job import Job
from ddpjob.core.api.names import Identity
from ddpjob.core.api.reasons import Reason
from ddpjob.core.observe.observation import Pod, Refusal

# A job with an unreadable creation time is the youngest.
NEVER = datetime.max.replace(tzinfo=UTC)

# The scheduler's words for a lack of a resource on the nodes, and for their limit of pods.
INSUFFICIENT = re.compile(r"\bInsufficient ([\w./-]*\w)")
TOO_MANY_PODS = "Too many pods"

# Outdated entries allowed in a queue before it is cleaned up.
STALE_ENTRIES = 64

# A job's creation time and UID: of two jobs, the one with the smaller age is the older.
Age = tuple[datetime, str]


class Room(NamedTuple):
    """Room needed by two gangs: the quota of a namespace, or a resource on the same nodes.

    `namespace` is empty for gangs of all namespaces. `placement` is equal for pods with the same
    choice of nodes, see Pod. It is empty for a quota.
    """

    namespace: str
    resource: str
    placement: str


@dataclass(frozen=True)
class Gang:
    """A gang, the room that it lacks, and the room that its pods use.

    Only a gang with both can be in conflict with others.
    """

    job: Identity
    age: Age
    priority: int
    lacks: frozenset[Room]
    holds: frozenset[Room]


def read_gang(job: Job, pods: Iterable[Pod], refusal: Refusal | None) -> Gang:
    """Return the gang of a job. `refusal` is the API server's, such as for a quota.

    A gang under a quota may hold room on nodes for jobs of its own namespace only: it waits for
    another job there, and not for the nodes.
    """
    pods = list(pods)
    quota = Room(job.namespace, "", "")
    is_refused = refusal is not None and refusal.reason == Reason.QUOTA
    for_whom = job.namespace if is_refused else ""
    lacks: set[Room] = set()
    holds: set[Room] = set()
    if _is_incomplete(job):
        for pod in pods:
            for namespace in ("", job.namespace):
                lacks |= _rooms(namespace, shortages(pod), pod)
        if is_refused:
            lacks.add(quota)
    if lacks:
        for pod in pods_with_room(pods, under_quota=False):
            holds |= _rooms(for_whom, pod.requests, pod)
        if pods_with_room(pods, under_quota=True):
            holds.add(quota)
    return Gang(
        job=job.identity,
        age=(job.created or NEVER, job.uid),
        priority=max((pod.priority for pod in pods), default=0),
        lacks=frozenset(lacks),
        holds=frozenset(holds),
    )


def _rooms(namespace: str, resources: Iterable[str], pod: Pod) -> set[Room]:
    """Return the room of resources on the nodes of a pod's choice."""
    return {Room(namespace, resource, pod.placement) for resource in resources}


def shortages(pod: Pod) -> set[str]:
    """Return the resources that no node has enough of for a pending pod, as its scheduler says."""
    blocked = pod.blocked
    if blocked is None or blocked.reason != Reason.UNSCHEDULABLE:
        return set()
    resources = set(INSUFFICIENT.findall(blocked.message))
    if TOO_MANY_PODS in blocked.message:
        resources.add("pods")
    return resources


def pods_with_room(pods: Iterable[Pod], under_quota: bool) -> list[Pod]:
    """Return the unfinished pods that use room: all under a quota, otherwise those with a node."""
    unfinished = [pod for pod in pods if not pod.ended]
    if under_quota:
        return unfinished
    return [pod for pod in unfinished if pod.node_name]


@dataclass
class Queue:
    """The gangs of one priority waiting for the same room, the oldest first.

    `current` are those still waiting. Outdated entries stay until they come first, or until there
    are too many of them.
    """

    current: set[Identity] = field(default_factory=set)
    entries: list[tuple[Age, Identity]] = field(default_factory=list)

    def add(self, gang: Gang) -> None:
        self.current.add(gang.job)
        heappush(self.entries, (gang.age, gang.job))

    def oldest(self) -> tuple[Age, Identity] | None:
        if len(self.entries) > STALE_ENTRIES + 2 * len(self.current):
            self._remove_outdated()
        while self.entries:
            first = self.entries[0]
            _, job = first
            if job in self.current:
                return first
            heappop(self.entries)
        return None

    def _remove_outdated(self) -> None:
        self.entries = [entry for entry in set(self.entries) if entry[1] in self.current]
        heapify(self.entries)


@dataclass
class Contests:
    """The incomplete gangs, each with some room and a need for more.

    For each room and priority, the oldest gang is known.
    """

    gangs: dict[Identity, Gang] = field(default_factory=dict)
    queues: dict[Room, dict[int, Queue]] = field(default_factory=dict)

    def see(self, gang: Gang) -> None:
        """Take in a gang as it is now."""
        if self.gangs.get(gang.job) == gang:
            return
        self.forget(gang.job)
        if not gang.lacks or not gang.holds:
            return
        self.gangs[gang.job] = gang
        for room in gang.lacks:
            of_room = self.queues.setdefault(room, {})
            queue = of_room.setdefault(gang.priority, Queue())
            queue.add(gang)

    def forget(self, job: Identity) -> None:
        gang = self.gangs.pop(job, None)
        if gang is None:
            return
        for room in gang.lacks:
            of_room = self.queues[room]
            waiting = of_room[gang.priority].current
            waiting.discard(job)
            if not waiting:
                del of_room[gang.priority]
            if not of_room:
                del self.queues[room]

    def in_the_way_of(self, gang: Gang) -> Identity | None:
        """Return the oldest job that needs room held by a younger gang of no higher priority."""
        if not gang.lacks:
            return None
        found = []
        for room in gang.holds:
            of_room = self.queues.get(room, {})
            for priority, queue in of_room.items():
                oldest = queue.oldest()
                if oldest and priority >= gang.priority:
                    age, _ = oldest
                    if age < gang.age:
                        found.append(oldest)
        if not found:
            return None
        _, job = min(found)
        return job


def older_gang(job: Job, contender: Identity | None, yielded_to: Job | None) -> OlderGang | None:
    """Return the older job with precedence over `job`, or None.

    `contender` needs room held by `job`. `yielded_to` is the job for which `job` has given its pods
    back. It has precedence until all its nodes run.
    """
    if yielded_to and _is_incomplete(yielded_to):
        contender = yielded_to.identity
    if contender is None:
        return None
    # A reader of this job may have no right to read jobs of other namespaces.
    is_visible = contender.namespace == job.namespace
    return OlderGang(contender.uid, contender.name if is_visible else "")


def _is_incomplete(job: Job) -> bool:
    """Return True if a gang is incomplete: its clock of starting runs."""
    status = job.status
    return status.attempt.starting_since is not None and not status.finished
