"""Give the pods of a job a PodGroup. The scheduler then starts all of them or none."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddpjob.controller.cache import Cache
from ddpjob.controller.errors import Refused
from ddpjob.controller.extension import Extension
from ddpjob.controller.refusals import told_refusals
from ddpjob.controller.writer import Writer, is_gone, run_all
from ddpjob.core.api import names, pod_groups
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

# Why a job cannot begin with the kind of PodGroups in its spec.scheduling.gang.
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
    """The PodGroups of jobs. `extensions` has the watch of each kind, by its backend's name."""

    writer: Writer
    cache: Cache
    settings: Settings
    extensions: Mapping[str, Extension]

    async def group_for(self, job: Job, *, has_place: bool = False) -> GroupName | None:
        """Create the group of the new pods if necessary, and return it; None if they need none.

        Pods that join others get the group of those. A whole new set of pods gets a new group: one
        that was scheduled once also takes single pods. `job` has its whole spec. `has_place`: a
        queue has admitted the whole job.

        Raises Refused, SpecError or CallFailed.
        """
        others = self._others(job)
        if others:
            return await self._join(job, others)
        backend = await self._backend(job, has_place)
        if backend is None:
            return None
        template = pod_template(job, self.settings)
        if pod_groups.group_of_pod(template):
            # The user's own.
            return None
        scheduler = str(child(template, "spec").get("schedulerName") or "")
        if not backend.knows(scheduler):
            if backend is NATIVE:
                return None
            message = f"the scheduler {scheduler} of the pods knows no PodGroups of {backend.name}"
            raise Refused(Reason.NO_GANGS, message)
        attempt = job.status.attempt.number or 0
        return await self._create(job, backend, attempt, template)

    def is_near(self, job: Job, name: GroupName | None) -> bool:
        """Return True if a group keeps its pods in one domain of a topology."""
        return any(group.id == name and group.is_near for group in self._groups(job))

    def _others(self, job: Job) -> list[Pod]:
        """Return the active pods of the current attempt."""
        born = job.status.attempt.born
        pods = self.cache.pods_of(job.identity)
        return [pod for pod in pods if pod.active and pod.born == born(pod.index)]

    async def _join(self, job: Job, others: Iterable[Pod]) -> GroupName | None:
        """Return the group of other pods. Fit its size to the job's."""
        found = [pod.group for pod in others if pod.group]
        # Any other group is the user's, or comes from a scheduler that adds groups itself.
        own = [name for name in found if names.is_group_of(job.name, name.name)]
        if not own:
            return None
        backend = BY_NAME[own[0].backend]
        extension = self.extensions[backend.name]
        await extension.wait_for_first_look()
        for group in self._groups(job):
            if group.id == own[0]:
                await self._fit(job, group)
                return group.id
        if extension.state_in(job.namespace) is not ApiState.SERVED:
            return own[0]
        # Someone has deleted it. A scheduler binds no pod without its group.
        attempt = names.attempt_of_group(own[0].name)
        return await self._create(job, backend, attempt, pod_template(job, self.settings))

    async def _fit(self, job: Job, group: PodGroup) -> None:
        """Give a group the size of the job."""
        if group.count == job.status.pods.desired:
            return
        body = pod_groups.new_count(BY_NAME[group.backend], job.status.pods.desired)
        place = (POD_GROUPS[group.backend], group.namespace, group.name)
        store = self.cache.pod_groups[group.backend]
        with told_refusals():
            try:
                store.see(await self.writer.write(Request(Verb.MERGE, *place, body=body)))
            except ApiError as error:
                # Its pods go on without it.
                if is_gone(error):
                    store.drop(group.uid)
                elif not error.is_unserved:
                    raise

    async def _backend(self, job: Job, has_place: bool) -> Backend | None:
        """Return the kind of the group for a job, or None. Raises Refused."""
        assert job.spec
        choice = job.spec.scheduling.gang
        if choice == GangChoice.OFF or job.spec.nodes == 1:
            return None
        is_named = choice != GangChoice.AUTO
        if has_place and not is_named:
            return None
        backend = BY_NAME[choice] if is_named else NATIVE
        extension = self.extensions[backend.name]
        await extension.wait_for_first_look()
        state = extension.state_in(job.namespace)
        if state is ApiState.SERVED:
            return backend
        if not is_named:
            return None
        words = NOT_SERVED[state]
        raise Refused(
            Reason.NO_GANGS, words.format(api=backend.api_version, name=backend.name.lower())
        )

    async def _create(self, job: Job, backend: Backend, attempt: int, template: Dict) -> GroupName:
        """Create the group of an attempt's pods.

        An existing one may be the answer to an earlier request.
        """
        assert job.spec
        topology = job.spec.scheduling.topology
        required = topology.required if topology and backend.topology else ""
        wanted = GangRequest(backend, job.status.pods.desired, required)
        body = pod_groups.new_pod_group(job.identity, attempt, wanted, template)
        name = str(body["metadata"]["name"])
        kind = POD_GROUPS[backend.name]
        found: Dict | None
        with told_refusals():
            try:
                request = Request(Verb.CREATE, kind, job.namespace, body=body)
                found = await self.writer.write(request)
            except ApiError as error:
                if error.status != 409:
                    raise
                found = await self.writer.read(Request(Verb.GET, kind, job.namespace, name))
        if found is None or child(found, "metadata").get("deletionTimestamp"):
            raise Refused(Reason.NAME_IN_USE, f"an earlier PodGroup {name} is still being deleted")
        if owner_of(found) != job.identity:
            message = f"PodGroup {name} exists and does not belong to this job; delete it"
            raise Refused(Reason.NAME_IN_USE, message)
        self.cache.pod_groups[backend.name].restore(found)
        group = pod_groups.read_pod_group(found)
        assert group
        await self._fit(job, group)
        return group.id

    async def delete_unused(self, job: Job, name: GroupName | None) -> None:
        """Delete the groups without a pod of the job. They reserve nothing."""
        pods = self.cache.pods_of(job.identity)
        used = {name, *(pod.group for pod in pods if not pod.released)}
        others = [group for group in self._groups(job) if group.id not in used]
        try:
            await run_all(self._delete(group) for group in others)
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
        return next((one.waits for one in self._groups(job) if one.id in waiting), "")

    def _groups(self, job: Job) -> tuple[PodGroup, ...]:
        return self.cache.pod_groups_of(job.identity)
