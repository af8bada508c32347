"""Carry out a plan's step for the Workload of a job, and read where its pods may run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from ddpjob.controller.cache import Cache, Key
from ddpjob.controller.errors import Refused
from ddpjob.controller.extension import Extension
from ddpjob.controller.refusals import refused_or_error, told_refusals
from ddpjob.controller.writer import Writer, is_gone
from ddpjob.core.api import kueue, names
from ddpjob.core.api.job import Job
from ddpjob.core.api.kueue import Demand, Placement, Priority, Workload, free_places, placement_of
from ddpjob.core.api.names import Condition, Identity
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.queue import LABEL_QUEUE, Queue
from ddpjob.core.api.readers import Dict, SpecError, child
from ddpjob.core.api.reasons import Reason
from ddpjob.core.observe.observation import ApiState, Node, NodeHealth
from ddpjob.core.observe.pods import uses_quota
from ddpjob.core.plan import PlaceAction, PlaceStep
from ddpjob.core.render.merged_pod import HOST_NAME
from ddpjob.core.render.objects import pod_template
from ddpjob.core.render.pod_context import Settings
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import (
    FLAVORS,
    JOBS,
    PODS,
    PRIORITY_CLASSES,
    WORKLOAD_PRIORITIES,
    WORKLOADS,
)
from ddpjob.kube.request import Request, Verb

log = logging.getLogger(__name__)

NO_PLACE = "the room that the queue {queue} has given to the job cannot be read; it is tried again"

OTHER_NODE = "the queue {queue} looks for another node in the place of {node}"


class Outcome(Enum):
    """The outcome of a step.

    CHANGED: the cluster was not as it was seen, or has changed by the step. IN_USE: a pod uses the
    room.
    """

    DONE = "done"
    CHANGED = "changed"
    IN_USE = "in use"


@dataclass
class Places:
    """The Workloads of jobs, each written only as it was seen."""

    writer: Writer
    cache: Cache
    settings: Settings
    now: Callable[[], datetime]
    queues: Extension

    async def take(self, job: Job, step: PlaceStep) -> Outcome:
        """Carry out a step. `job` has its whole spec. Raises Refused, CallFailed or LeaseLost."""
        workload = step.workload
        if step.action is PlaceAction.CREATE:
            await self._create(job)
            return Outcome.CHANGED
        assert workload is not None
        if step.action.frees_room and not await self._is_unused(job.identity):
            return Outcome.IN_USE
        try:
            await self._change(job, workload, step.action)
        except ApiError as error:
            if not is_gone(error):
                raise
            await self._read(workload)
            return Outcome.CHANGED
        return Outcome.DONE

    async def recover(self, job: Job) -> bool:
        """Find the Workload of a job's place again, if it only seems to be gone.

        Return True if it was found: the operator watches it again.
        """
        place = job.status.place
        if not place.number or self.cache.workload_of(job):
            return False
        if self.queues.state_in(job.namespace) is not ApiState.SERVED:
            return False
        name = kueue.workload_name(job.name, job.uid, place.number)
        request = Request(Verb.GET, WORKLOADS, job.namespace, name)
        body = await self.writer.read(request) or {}
        found = kueue.read_workload(body)
        if found is None or found.job != job.identity or place.uid not in ("", found.uid):
            return False
        return self.cache.workloads.restore(await self._with_label(body, found))

    async def recover_if_possible(self, job: Job) -> bool:
        """Do the same for a job that ends or is held, which must not wait for Kueue."""
        try:
            return await self.recover(job)
        except CallFailed as error:
            log.warning("%s/%s: cannot read its Workload: %s", job.namespace, job.name, error)
            return False

    async def _with_label(self, body: Dict, workload: Workload) -> Dict:
        """Return a Workload with the label by which the operator watches it.

        A person or a policy may have taken it off.
        """
        label = {names.LABEL_MANAGED_BY: names.MANAGER}
        if label.items() <= child(child(body, "metadata"), "labels").items():
            return body
        body = {"metadata": {**_as_seen(workload), "labels": label}}
        place = (workload.namespace, workload.name)
        written: Dict = await self.writer.write(Request(Verb.MERGE, WORKLOADS, *place, body=body))
        return written

    async def _create(self, job: Job) -> None:
        """Ask for room. An existing Workload of this number is the answer to an earlier request."""
        assert job.spec
        assert job.queue
        # Kueue does not allow the operator's own metadata here.
        template = {"spec": pod_template(job, self.settings)["spec"]}
        priority = await self._priority(job.queue, template)
        topology = job.spec.scheduling.topology
        demand = Demand(job.queue, job.spec.nodes, template, priority, topology)
        try:
            body = kueue.new_workload(job.identity, job.status.place.number, demand)
        except SpecError as error:
            raise Refused(Reason.NO_QUEUE, str(error)) from error
        name = str(body["metadata"]["name"])
        request = Request(Verb.CREATE, WORKLOADS, job.namespace, body=body)
        created: Dict | None
        try:
            created = await self.writer.write(request)
        except ApiError as error:
            if error.status != 409:
                raise refused_or_error(error) from error
            created = await self.writer.read(Request(Verb.GET, WORKLOADS, job.namespace, name))
        if created is None:
            # It was removed meanwhile.
            return
        found = kueue.read_workload(created)
        if found is None or found.job != job.identity:
            raise Refused(
                Reason.NO_QUEUE,
                f"Workload {name} exists, and is not of this job; delete it",
            )
        try:
            created = await self._with_label(created, found)
        except ApiError as error:
            raise refused_or_error(error) from error
        self.cache.workloads.restore(created)

    async def _priority(self, queue: Queue, template: Dict) -> Priority | None:
        """Return the priority of a Workload: of the job's label, or else of its pods."""
        if queue.priority_class:
            kind, name = WORKLOAD_PRIORITIES, queue.priority_class
            word = "WorkloadPriorityClass"
        else:
            kind, name = PRIORITY_CLASSES, str(template["spec"].get("priorityClassName") or "")
            word = "PriorityClass"
        if not name:
            return None
        found = await self.writer.read(Request(Verb.GET, kind, name=name))
        if found is None:
            raise Refused(Reason.NO_QUEUE, f"{word} {name} does not exist; choose another one")
        return Priority(int(found.get("value", 0)), kind.group, word, name)

    async def _is_unused(self, job: Identity, *, is_orphaned: bool = False) -> bool:
        """Return True if the API server has no pod of a job that uses room.

        The running pods of the job enter the cache. Room in use by a pod must not be given to
        others. If the job `is_orphaned`, its pods may have lost their owner too.
        """
        query = {
            "labelSelector": f"{names.LABEL_JOB_UID}={job.uid}",
            "fieldSelector": "status.phase!=Succeeded,status.phase!=Failed",
        }
        answer = await self.writer.read(Request(Verb.GET, PODS, job.namespace, query=query))
        owners = (job, None) if is_orphaned else (job,)
        is_unused = True
        for body in (answer or {}).get("items", ()):
            if owner_of(body) in owners and uses_quota(body):
                self.cache.pods.restore(body)
                is_unused = False
        return is_unused

    async def _change(self, job: Job, workload: Workload, action: PlaceAction) -> None:
        now = self.now()
        if action is PlaceAction.GIVE_BACK:
            await self._write_status(workload, kueue.given_back(workload, now))
        elif action is PlaceAction.FINISH:
            if not workload.finished:
                succeeded = job.status.has(Condition.COMPLETE)
                change = kueue.ended(workload, succeeded, job.status.message, now)
                workload = await self._write_status(workload, change)
            await self._let_go(workload)
        elif action is PlaceAction.REMOVE:
            await self._remove(workload)
        else:
            is_ready = action is PlaceAction.READY
            await self._write_status(workload, kueue.pods_ready(workload, is_ready, now))

    async def _write_status(self, workload: Workload, status: dict[str, Any]) -> Workload:
        """Change the status of a Workload if it still has the seen version, and return it."""
        body = {"metadata": _as_seen(workload), "status": status}
        return await self._patch(workload, body, "status")

    async def _let_go(self, workload: Workload) -> None:
        """Take the operator's finalizer off."""
        metadata = {**_as_seen(workload), "finalizers": list(workload.finalizers)}
        await self._patch(workload, {"metadata": metadata})
        if workload.deleting and not workload.finalizers:
            self.cache.workloads.drop(workload.uid)

    async def _patch(self, workload: Workload, body: Dict, subresource: str = "") -> Workload:
        place = (workload.namespace, workload.name, subresource)
        written = await self.writer.write(Request(Verb.MERGE, WORKLOADS, *place, body=body))
        self.cache.workloads.see(written)
        return kueue.read_workload(written) or workload

    async def _remove(self, workload: Workload) -> None:
        if not workload.deleting:
            body = {"preconditions": {"uid": workload.uid}}
            place = (workload.namespace, workload.name)
            answer = await self.writer.write(Request(Verb.DELETE, WORKLOADS, *place, body=body))
            held = kueue.read_workload(answer)
            if held is None:
                # Without a finalizer it is gone, and the answer is not the Workload.
                self.cache.workloads.drop(workload.uid)
                return
            workload = held
            self.cache.workloads.see(answer)
        await self._let_go(workload)

    async def _read(self, workload: Workload) -> None:
        """Read a Workload again after an unknown change."""
        request = Request(Verb.GET, WORKLOADS, workload.namespace, workload.name)
        found = await self.writer.read(request)
        if found and child(found, "metadata").get("uid") == workload.uid:
            self.cache.workloads.see(found)
        else:
            self.cache.workloads.drop(workload.uid)

    async def placement(self, job: Job, missing: Sequence[int] = ()) -> Placement | None:
        """Return where the new pods of a job may run; None for a job without a queue.

        `missing` are their indices. Raises Refused if the place is not known, or has been taken
        away meanwhile.
        """
        state = self.queues.state_in(job.namespace)
        if job.queue is None or state is ApiState.OFF:
            return None
        assert job.spec
        workload = self.cache.workload_of(job)
        wanted = (job.queue, job.status.pods.desired, job.spec.scheduling.topology)
        is_fit = workload is not None and workload.is_for(*wanted)
        is_known = is_fit and state is ApiState.SERVED
        if workload is None or not (is_known and workload.may_run):
            # A running job goes on without Kueue, and its new pods wait.
            raise Refused(Reason.NO_QUEUE, NO_PLACE.format(queue=job.queue))
        lost = workload.unhealthy or self._lost_nodes(workload)
        if lost:
            message = OTHER_NODE.format(queue=job.queue, node=lost[0])
            raise Refused(Reason.NO_QUEUE, message, passes=True)
        domains = self._domains(job, workload, missing)
        flavors = []
        for name in workload.flavors:
            with told_refusals():
                found = await self.writer.read(Request(Verb.GET, FLAVORS, name=name))
            if found is None:
                raise Refused(Reason.NO_QUEUE, f"ResourceFlavor {name} does not exist any more")
            flavors.append(found)
        return placement_of(workload, flavors, domains)

    def _domains(
        self, job: Job, workload: Workload, missing: Sequence[int]
    ) -> dict[int, Mapping[str, str]]:
        """Return the labels of the nodes for each new pod. Raises Refused if there is no place."""
        if not workload.domains and not workload.topology:
            return {}
        born = job.status.attempt.born
        others = [pod for pod in self.cache.pods_of(job.identity) if pod.active]
        taken = [pod.place for pod in others if pod.born == born(pod.index)]
        free = free_places(workload, taken)
        if len(free) < len(missing):
            raise Refused(Reason.NO_QUEUE, NO_PLACE.format(queue=job.queue), passes=True)
        return dict(zip(missing, free, strict=False))

    def _lost_nodes(self, workload: Workload) -> list[str]:
        """Return the nodes of a place that are not ready. Kueue replaces them.

        It does so a moment after the pod of such a node was deleted.
        """
        nodes = self.cache.nodes.by_name
        if not nodes:
            # With Roles only, nodes are not read.
            return []
        chosen = (domain.labels.get(HOST_NAME) for domain in workload.domains)
        return [name for name in chosen if name and not _is_ready(nodes.get(name))]

    async def join(self, body: Dict, queue: str) -> None:
        """Give a job the label of a queue if it still has the seen version."""
        seen = child(body, "metadata")
        metadata = {
            "uid": seen["uid"],
            "resourceVersion": seen["resourceVersion"],
            "labels": {LABEL_QUEUE: queue},
        }
        place = (str(seen["namespace"]), str(seen["name"]))
        request = Request(Verb.MERGE, JOBS, *place, body={"metadata": metadata})
        try:
            written = await self.writer.write(request)
        except ApiError as error:
            if not is_gone(error):
                raise refused_or_error(error) from error
            # The job has changed: the next look decides anew.
            return
        self.cache.jobs.see(written)
        labels = child(child(written, "metadata"), "labels")
        if labels.get(LABEL_QUEUE) != queue:
            message = f"the label {LABEL_QUEUE} is taken off the job by a webhook or a policy"
            raise Refused(Reason.NO_QUEUE, message)

    async def let_orphans_go(self, key: Key) -> None:
        """Remove the finalizer from Workloads of removed jobs, once none of their pods runs.

        A job may be deleted while no operator is running.
        """
        for workload in self.cache.orphans_of(key):
            try:
                await self._let_orphan_go(key, workload)
            except CallFailed as error:
                # The error must not stop the look at a new job of this name.
                log.warning("%s/%s: cannot let Workload %s go: %s", *key, workload.name, error)

    async def _let_orphan_go(self, key: Key, workload: Workload) -> None:
        job = workload.job
        if any(not pod.released for pod in self.cache.pods_of(job)):
            return
        found = await self.writer.read(Request(Verb.GET, JOBS, *key))
        exists = found is not None and child(found, "metadata").get("uid") == job.uid
        if exists or not await self._is_unused(job, is_orphaned=True):
            return
        log.info("%s/%s: its Workload %s is removed", *key, workload.name)
        try:
            # Without an owner, the garbage collector does not delete it.
            await self._remove(workload)
        except ApiError as error:
            if not is_gone(error):
                raise
            await self._read(workload)


def _as_seen(workload: Workload) -> dict[str, Any]:
    return {"uid": workload.uid, "resourceVersion": workload.version}


def _is_ready(node: Node | None) -> bool:
    return node is not None and node.health is NodeHealth.READY
