"""Gives the pods of a job a PodGroup, so that the scheduler starts all of them or none."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddpjob.controller.cache import Cache
from ddpjob.controller.errors import Refused
from ddpjob.controller.extension import Extension
from ddpjob.controller.refusals import refused_or_error
from ddpjob.controller.writer import Writer, is_gone, run_all
from ddpjob.core.api import pod_groups
from ddpjob.core.api.job import Job
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.pod_groups import (
    BY_NAME,
    NATIVE,
    Backend,
    GangChoice,
    GangRequest,
    GroupName,
    PodGroup,
)
from ddpjob.core.api.readers import Dict, child
from ddpjob.core.api.reasons import Reason
from ddpjob.core.observe.observation import ApiState, Pod
from ddpjob.core.render.objects import pod_template
from ddpjob.core.render.pod_context import Settings
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import POD_GROUPS
from ddpjob.kube.request import Request, Verb

log = logging.getLogger(__name__)

# Why a job does not begin whose spec names a scheduler.
NOT_SERVED = {
    ApiState.UNKNOWN: "the operator has not read yet whether the cluster serves {api}",
    ApiState.ABSENT: (
        "the cluster does not serve PodGroups of {api}; install {name}, or set "
        "spec.scheduling.gang to Off"
    ),
    ApiState.UNREADABLE: (
        "the operator may not read the PodGroups of {api}; give it the rights of its chart, or set "
        "spec.scheduling.gang to Off"
    ),
}


@dataclass
class PodGroups:
    """The PodGroups of jobs. `extensions` has the watch of each kind, by the name of its row."""

    writer: Writer
    cache: Cache
    settings: Settings
    extensions: Mapping[str, Extension]

    async def group_for(self, job: Job) -> GroupName | None:
        """Return the group of the pods to create, which exists then; None if they need none.

        Pods that join others get the group of those. A whole new set of pods gets a new one, since
        a group that was scheduled once takes single pods. `job` has its whole spec.

        Raises Refused, SpecError or CallFailed.
        """
        others = self._others(job)
        if others:
            return await self._join(job, others)
        backend = await self._backend(job)
        if backend is None:
            return None
        template = pod_template(job, self.settings)
        if not _may_have_group(template, backend):
            return None
        group = await self._create(job, backend, template)
        await self._delete_others(job, group)
        return group

    def _others(self, job: Job) -> list[Pod]:
        """Return the pods of the current attempt that have not ended."""
        born = job.status.attempt.born
        pods = self.cache.pods_of(job.identity)
        return [pod for pod in pods if pod.active and pod.born == born(pod.index)]

    async def _join(self, job: Job, others: Iterable[Pod]) -> GroupName | None:
        """Return the group of other pods. If the job has another size now, so has the group."""
        name = next((pod.group for pod in others if pod.group), None)
        group = next((one for one in self._groups(job) if _name_of(one) == name), None)
        if group and group.count != job.status.pods.desired:
            backend = BY_NAME[group.backend]
            body = pod_groups.new_count(backend, job.status.pods.desired)
            place = (POD_GROUPS[group.backend], group.namespace, group.name)
            try:
                self.cache.pod_groups[group.backend].see(
                    await self.writer.write(Request(Verb.MERGE, *place, body=body))
                )
            except ApiError as error:
                raise refused_or_error(error) from error
        return name

    async def _backend(self, job: Job) -> Backend | None:
        """Return the kind of the group that a job needs, or None. Raises Refused."""
        assert job.spec
        choice = job.spec.scheduling.gang
        if choice == GangChoice.OFF or job.spec.nodes == 1:
            return None
        is_named = choice != GangChoice.AUTO
        if job.queue and not is_named:
            # The queue admits the whole job.
            return None
        backend = BY_NAME[choice] if is_named else NATIVE
        extension = self.extensions[backend.name]
        await extension.wait_for_first_look()
        if extension.state is ApiState.SERVED:
            return backend
        if not is_named and extension.state is not ApiState.UNKNOWN:
            return None
        words = NOT_SERVED[extension.state]
        raise Refused(
            Reason.NO_GANGS, words.format(api=backend.api_version, name=backend.name.lower())
        )

    async def _create(self, job: Job, backend: Backend, template: Dict) -> GroupName:
        """Create a group. One that exists is the answer to a request before."""
        assert job.spec
        topology = job.spec.scheduling.topology
        required = topology.required if topology and backend.topology else ""
        wanted = GangRequest(backend, job.status.pods.desired, required)
        attempt = job.status.attempt.number or 0
        body = pod_groups.new_pod_group(job.identity, attempt, wanted, template)
        name = str(body["metadata"]["name"])
        kind = POD_GROUPS[backend.name]
        found: Dict | None
        try:
            found = await self.writer.write(Request(Verb.CREATE, kind, job.namespace, body=body))
        except ApiError as error:
            if error.status != 409:
                raise refused_or_error(error) from error
            found = await self.writer.read(Request(Verb.GET, kind, job.namespace, name))
        if found is None or child(found, "metadata").get("deletionTimestamp"):
            raise Refused(Reason.NAME_IN_USE, f"an earlier PodGroup {name} is still being deleted")
        if owner_of(found) != job.identity:
            message = f"PodGroup {name} exists and does not belong to this job; delete it"
            raise Refused(Reason.NAME_IN_USE, message)
        self.cache.pod_groups[backend.name].restore(found)
        return GroupName(backend.name, name)

    async def _delete_others(self, job: Job, group: GroupName) -> None:
        """Delete the groups of earlier sets of pods, which have ended. They hold nothing."""
        others = [one for one in self._groups(job) if _name_of(one) != group]
        try:
            await run_all(self._delete(one) for one in others)
        except CallFailed as error:
            # The job owns them, so they go with it at last.
            log.warning("%s/%s: cannot delete its PodGroups: %s", job.namespace, job.name, error)

    async def _delete(self, group: PodGroup) -> None:
        body = {"preconditions": {"uid": group.uid}}
        place = (POD_GROUPS[group.backend], group.namespace, group.name)
        try:
            await self.writer.write(Request(Verb.DELETE, *place, body=body))
        except ApiError as error:
            if not is_gone(error):
                raise
        self.cache.pod_groups[group.backend].drop(group.uid)

    def why_it_waits(self, job: Job, pods: Iterable[Pod]) -> str:
        """Return why the scheduler has no nodes for the gang of these pods, in its words."""
        waiting = {pod.group for pod in pods if pod.group and not pod.node_name and pod.active}
        if not waiting:
            return ""
        return next((one.waits for one in self._groups(job) if _name_of(one) in waiting), "")

    def _groups(self, job: Job) -> tuple[PodGroup, ...]:
        return self.cache.pod_groups_of(job.identity)


def _name_of(group: PodGroup) -> GroupName:
    return GroupName(group.backend, group.name)


def _may_have_group(template: Dict, backend: Backend) -> bool:
    """Return False if the user's podTemplate names a group, or a scheduler that knows no such."""
    scheduler = str(child(template, "spec").get("schedulerName") or "")
    return backend.knows(scheduler) and pod_groups.group_of_pod(template) is None
