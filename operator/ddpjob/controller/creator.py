"""Create the objects of a job, assign its pods, and explain refusals of the API server."""

import asyncio
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ddpjob.controller.cache import Cache
from ddpjob.controller.errors import Refused
from ddpjob.controller.refusals import told_refusals
from ddpjob.controller.territory import Territory
from ddpjob.controller.writer import Writer, run_all
from ddpjob.core.api import names
from ddpjob.core.api.job import Job
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.readers import Dict
from ddpjob.core.api.reasons import Reason
from ddpjob.core.plan import Assign, Create, Owned
from ddpjob.core.render import objects
from ddpjob.core.render.assignment import assignment
from ddpjob.core.render.merged_pod import NO_CONSTRAINTS, Constraints
from ddpjob.core.render.pod_context import Settings
from ddpjob.kube.errors import ApiError
from ddpjob.kube.kinds import CONFIG_MAPS, PODS, Kind
from ddpjob.kube.request import Request, Verb

# The API server then refuses a misspelt field of a pod by name. By default it would drop the field.
STRICT = {"fieldValidation": "Strict"}

# The kinds of a job's objects, as the API server serves them.
KINDS = {one: Kind(one.group, one.version, one.plural) for one in Owned}

# The labels needed to find a pod.
OWN_LABELS = (names.LABEL_JOB, names.LABEL_ATTEMPT, names.LABEL_INDEX)


@dataclass
class Creator:
    """Creates the objects of jobs, with the administrator's settings.

    - `territory`: has the Lease of each namespace. The Lease owns the agent's ConfigMap.
    - `with_agent`: the namespaces that have this ConfigMap, each with the UID of its Lease.
    - `providing`: the current requests for it, by namespace.
    """

    writer: Writer
    cache: Cache
    settings: Settings
    territory: Territory
    with_agent: dict[str, str] = field(default_factory=dict)
    providing: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def create(
        self, job: Job, creates: Iterable[Create], constraints: Constraints = NO_CONSTRAINTS
    ) -> None:
        """Create objects in their order, and those of one kind side by side.

        `constraints` restrict the nodes of the pods. The pods need the agent's ConfigMap.
        Raises Refused or SpecError.
        """
        for kind, group in groupby(creates, key=lambda create: create.kind):
            if kind is Owned.POD:
                await self._require_agent(job.namespace)
            indices = [create.index for create in group if create.index is not None]
            bodies = objects.rendered(job, kind, indices, self.settings, constraints)
            await run_all(self._create_object(job, KINDS[kind], body) for body in bodies)

    async def _require_agent(self, namespace: str) -> None:
        """Provide the ConfigMap unless the namespace has it. Raises Refused.

        It is large, and many jobs of a namespace may begin at once: they share one request.
        """
        if self.with_agent.get(namespace) == self.territory.uid_of_mark(namespace):
            return
        if namespace not in self.providing:
            task = asyncio.create_task(self.provide_agent(namespace))
            self.providing[namespace] = task
            task.add_done_callback(lambda _: self.providing.pop(namespace))
        # The other jobs need it too, so it goes on if this job's work is cancelled.
        await asyncio.shield(self.providing[namespace])

    async def provide_agent(self, namespace: str) -> None:
        """Create the ConfigMap with the agent. Raises Refused.

        An existing one is compared: anybody with the right to write ConfigMaps could have made it.
        """
        lease = self.territory.uid_of_mark(namespace)
        body = objects.agent_config_map(namespace, lease)
        name = body["metadata"]["name"]
        with told_refusals():
            found: Dict | None
            try:
                request = Request(Verb.CREATE, CONFIG_MAPS, namespace, body=body)
                found = await self.writer.write(request)
            except ApiError as error:
                if not _exists(error):
                    raise
                found = await self.writer.read(Request(Verb.GET, CONFIG_MAPS, namespace, name))
        _compare(found, body)
        self.with_agent[namespace] = lease

    async def check_agent(self, namespace: str) -> None:
        """Create the ConfigMap with the agent again if it is gone. Raises Refused."""
        body = objects.agent_config_map(namespace, self.territory.uid_of_mark(namespace))
        request = Request(Verb.GET, CONFIG_MAPS, namespace, body["metadata"]["name"])
        with told_refusals():
            found = await self.writer.read(request)
        if found is None:
            # It may have gone with its Lease.
            await self.territory.mark_anew(namespace)
            await self.provide_agent(namespace)
        else:
            _compare(found, body)

    def forget_others(self, namespaces: Set[str]) -> None:
        """Forget all other namespaces. `namespaces` are those with jobs."""
        self.with_agent = {name: uid for name, uid in self.with_agent.items() if name in namespaces}

    async def assign(self, job: Job, assigns: Iterable[Assign]) -> None:
        """Give remaining pods the assignment of the current attempt, side by side."""
        await run_all(self._assign(job, assign) for assign in assigns)

    async def _assign(self, job: Job, assign: Assign) -> None:
        """Change the label and the assignment of a pod in one request. Ignore a removed pod."""
        text = assignment(job, assign.index, self.settings.addresses, assign)
        annotations = {names.ANNOTATION_ASSIGNMENT: text}
        if assign.ready_since is not None:
            annotations[names.ANNOTATION_READY_BEFORE] = assign.ready_since
        body = {
            "metadata": {
                "uid": assign.uid,
                "labels": {names.LABEL_ATTEMPT: str(job.status.attempt.number)},
                "annotations": annotations,
            }
        }
        request = Request(Verb.MERGE, PODS, job.namespace, assign.name, body=body)
        try:
            self.cache.pods.see(await self.writer.write(request))
        except ApiError as error:
            if not error.is_absent:
                raise
            self.cache.pods.drop(assign.uid)

    async def _create_object(self, job: Job, kind: Kind, body: Mapping[str, Any]) -> None:
        created = None
        request = Request(Verb.CREATE, kind, job.namespace, body=body, query=STRICT)
        with told_refusals(restricted=self.settings.of_job(job.spec).restricted):
            try:
                created = await self.writer.write(request)
            except ApiError as error:
                if not _exists(error):
                    raise
        if created is None:
            created = await self._require_own(job, kind, str(body["metadata"]["name"]))
        if kind == PODS:
            _require_labels(body, created)
            self.cache.pods.see(created)

    async def _require_own(self, job: Job, kind: Kind, name: str) -> dict[str, Any]:
        """Return the existing object of this name. Raises Refused if it is not the job's.

        It is the job's if an earlier request succeeded and its answer was lost.
        """
        what = f"{kind.plural.removesuffix('s')} {name}"
        found = await self.writer.read(Request(Verb.GET, kind, job.namespace, name))
        if found is None or found["metadata"].get("deletionTimestamp"):
            raise Refused(Reason.NAME_IN_USE, f"an earlier {what} is still being deleted")
        owner = owner_of(found)
        if owner == job.identity:
            # A pod that lost its labels for a moment was taken for gone.
            if kind == PODS:
                self.cache.pods.restore(found)
            return found
        if owner and owner.name == job.name:
            message = f"{what} of an earlier job with this name is still being deleted"
            raise Refused(Reason.NAME_IN_USE, message)
        message = (
            f"{what} exists and does not belong to this job; delete it or give the job another name"
        )
        raise Refused(Reason.NAME_IN_USE, message)


def _exists(error: ApiError) -> bool:
    return error.status == 409 and error.reason == "AlreadyExists"


def _compare(found: Dict | None, wanted: Dict) -> None:
    """Raise Refused if the ConfigMap of this name is being deleted or has other content."""
    name = wanted["metadata"]["name"]
    if found is None or found["metadata"].get("deletionTimestamp"):
        raise Refused(Reason.NAME_IN_USE, f"ConfigMap {name} is being deleted")
    # Python would also import an added file.
    is_same = found.get("data") == wanted["data"] and not found.get("binaryData")
    if not is_same or not found.get("immutable"):
        message = f"ConfigMap {name} exists with other content; delete it"
        raise Refused(Reason.NAME_IN_USE, message)


def _require_labels(sent: Mapping[str, Any], created: Mapping[str, Any]) -> None:
    """Raise Refused if a created pod lacks one of OWN_LABELS.

    Otherwise the operator would create the pod again and again.
    """
    labels = created["metadata"].get("labels", {})
    for label in OWN_LABELS:
        if labels.get(label) != sent["metadata"]["labels"][label]:
            message = (
                f"pod {created['metadata']['name']} exists without the operator's label {label}; "
                "let the policy or webhook that changes labels leave it alone, then delete the pod"
            )
            raise Refused(Reason.FORBIDDEN, message)
