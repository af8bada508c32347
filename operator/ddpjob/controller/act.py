"""Carry out plans: first the status, under the version it was computed from, then the pods."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from ddpjob.controller.cache import Cache, SeenJob
from ddpjob.controller.creator import Creator
from ddpjob.controller.deleter import Deleter
from ddpjob.controller.errors import GaveWay, NotSent, Refused
from ddpjob.controller.events import Reporter
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.places import Outcome, Places
from ddpjob.controller.pod_groups import PodGroups
from ddpjob.controller.writer import Writer, is_gone, run_all
from ddpjob.core.api import names
from ddpjob.core.api.backoff import exponential_delay
from ddpjob.core.api.job import Job
from ddpjob.core.api.names import Condition
from ddpjob.core.api.owned import owner_of
from ddpjob.core.api.readers import Dict, SpecError
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.resolved import Spec
from ddpjob.core.api.status import Status
from ddpjob.core.observe.observation import LONGEST_RETRY, Node, Refusal, is_of_gang
from ddpjob.core.plan import Assign, Create, PlaceAction, PlaceStep, Plan
from ddpjob.core.render.merged_pod import Constraints
from ddpjob.kube.errors import ApiError, CallFailed
from ddpjob.kube.kinds import JOBS, NODES, PODS
from ddpjob.kube.request import Request, Verb

log = logging.getLogger(__name__)

# Shortest time in seconds between two status writes with nothing but progress. If many jobs have
# progress to report, each waits longer, up to a limit: so many writes a second. A write costs the
# API server as much as three pods.
PROGRESS_INTERVAL = 2.0
LONGEST_PROGRESS_INTERVAL = 20.0
PROGRESS_RATE = 10

# The same for the words of a queue. They may change whenever another job begins or ends.
QUEUE_INTERVAL = 60.0

# Seconds before a refused object is tried again.
FIRST_RETRY = 1.0

# Seconds before the next try if the obstacle may be gone.
SOON = 0.5

# Seconds for the deletion of ended pods, before the job goes on without it.
ENDED_PODS_TIMEOUT = 2.0

# Seconds before a refused assignment is tried again.
REFUSED_ASSIGNMENT_RETRY = 5.0

# Shortest time in seconds between two looks for the agent's ConfigMap for one job.
AGENT_INTERVAL = 25.0

# Seconds before the next look at the job: at once, and for a problem that only a person can solve.
AGAIN = 0.0
LATER = 30.0

# Seconds until the room of a job is looked at again. The last container of a pod ends before the
# pod does, and no event of the job follows.
ROOM_INTERVAL = 2.0


@dataclass(slots=True)
class Memory:
    """The last write and refusals of a job. A restart of the process may lose them."""

    last_write: float = float("-inf")
    refusal: Refusal | None = None
    refusals: int = 0
    refused_orders: int = 0


@dataclass(slots=True)
class AgentCheck:
    """A look for the agent's ConfigMap: its time, and the problem found, if any."""

    time: float
    problem: str = ""


@dataclass
class Actor:
    """Carries out plans. `clock` gives monotonic seconds, and `now` the time of day."""

    writer: Writer
    cache: Cache
    creator: Creator
    deleter: Deleter
    reporter: Reporter
    places: Places
    pod_groups: PodGroups
    clock: Callable[[], float]
    metrics: Metrics
    now: Callable[[], datetime]
    memories: dict[str, Memory] = field(default_factory=dict)
    # The UIDs of jobs whose pods a quota refuses, by namespace. The first has waited longest.
    under_quota: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    # The UIDs of jobs whose progress is not yet written.
    with_progress: set[str] = field(default_factory=set)
    # The last look for the agent's ConfigMap, by namespace.
    agent_checks: dict[str, AgentCheck] = field(default_factory=dict)

    def memory_of(self, uid: str) -> Memory:
        return self.memories.get(uid) or Memory()

    def forget_removed_jobs(self) -> None:
        existing = self.cache.jobs.objects
        self.memories = {uid: m for uid, m in self.memories.items() if uid in existing}
        self.with_progress &= existing.keys()
        namespaces = {seen.namespace for seen in existing.values()}
        self.agent_checks = {ns: one for ns, one in self.agent_checks.items() if ns in namespaces}
        for namespace, waiting in list(self.under_quota.items()):
            self.under_quota[namespace] = {uid: None for uid in waiting if uid in existing}
            if not self.under_quota[namespace]:
                del self.under_quota[namespace]
        self.reporter.forget_others(existing.keys())

    def retry_soon(self, uid: str) -> None:
        """Try a refused object again soon, because the obstacle may be gone."""
        memory = self.memories.get(uid)
        if memory and memory.refusal and not memory.refusal.final:
            soon = self.now() + timedelta(seconds=SOON)
            retry_at = min(memory.refusal.retry_at, soon)
            memory.refusal = replace(memory.refusal, retry_at=retry_at)

    def next_under_quota(self, namespace: str) -> SeenJob | None:
        """Return the next job of a namespace to get a free place in a quota, or None.

        One deleted pod frees a place for one job.
        """
        waiting = self.under_quota.get(namespace, {})
        while waiting:
            uid = next(iter(waiting))
            del waiting[uid]
            seen = self.cache.jobs.objects.get(uid)
            if seen:
                # Until it is refused again or has its pods, it waits as the last one.
                waiting[uid] = None
                return seen
        return None

    async def apply(self, seen: SeenJob, plan: Plan) -> float | None:
        """Carry out a plan for a job as it was seen. Raises CallFailed or LeaseLost.

        Returns the seconds until the next look at the job; None: when something changes.
        """
        job = seen.value.unpack()
        waits = plan.status.has(Condition.SUSPENDED) or plan.status.reason == Reason.YIELDED
        if plan.status.finished or waits:
            self.under_quota.get(job.namespace, {}).pop(job.uid, None)
        wait = await self._wait_if_outdated(job, plan)
        if wait is not None:
            return wait
        memory = self.memories.setdefault(job.uid, Memory())
        if plan.check_agent:
            await self._check_agent(job)
        body: Dict | None = None
        self.with_progress.discard(job.uid)
        # Most looks change nothing. Times are the same if they differ by less than a second.
        is_same = plan.status == job.status or plan.status.to_dict() == job.status.to_dict()
        if not is_same:
            wait = self._wait_with_progress(job, plan, memory)
            if wait is not None:
                return wait
            # The status is written first, under the version it was computed from. So neither two
            # operators nor a stale cache can begin the same attempt twice.
            body = await self._write_status(seen, plan.status, memory)
            if body is None:
                return AGAIN
            if body["metadata"]["generation"] != job.generation:
                # The answer was lost, and the spec has changed since. Only the events still hold.
                plan = Plan(plan.status, events=plan.events, wake_after=AGAIN)
        try:
            wake_after = await self._write_objects(seen, body, plan, memory)
        except Exception:
            await self._post_events(job, plan)
            raise
        await self._post_events(job, plan)
        return wake_after

    async def _wait_if_outdated(self, job: Job, plan: Plan) -> float | None:
        """Return when to decide again if the cluster is not as the plan assumes; None if it is.

        If a pod is missing in the cache, restart only if the API server confirms its absence.
        Delete a pod by force, or count a lost node, only if the API server confirms its state.
        """
        existing = await self._find_existing(job, plan.confirm)
        if existing:
            return await self._keep(job, existing)
        if plan.status.place.number > job.status.place.number and await self.places.recover(job):
            return AGAIN
        if _leaves_place(job.status, plan.status) and await self.places.recover_if_possible(job):
            return AGAIN
        nodes = {*plan.confirm_nodes, *(delete.node for delete in plan.delete if delete.node)}
        if await self._any_node_differs(nodes):
            return AGAIN
        return None

    def _wait_with_progress(self, job: Job, plan: Plan, memory: Memory) -> float | None:
        """Return when to write a status with nothing but progress; None for at once."""
        interval = max(PROGRESS_INTERVAL, len(self.with_progress) / PROGRESS_RATE)
        interval = min(interval, LONGEST_PROGRESS_INTERVAL)
        is_waiting = plan.status.has(Condition.SUSPENDED) and plan.status.reason != Reason.SUSPENDED
        if is_waiting and ":" in job.status.message:
            # It waits for its queue, and has words of the queue already.
            interval = QUEUE_INTERVAL
        wait = memory.last_write + interval - self.clock()
        if wait <= 0 or not plan.only_reports_progress(job.status):
            return None
        self.with_progress.add(job.uid)
        return _earliest(wait, plan.wake_after)

    async def _post_events(self, job: Job, plan: Plan) -> None:
        """Post the events of a plan. None is repeated: the status has the same information."""
        await run_all(self.reporter.post(job, event) for event in plan.events)

    async def _write_objects(
        self, seen: SeenJob, body: Dict | None, plan: Plan, memory: Memory
    ) -> float | None:
        """Carry out the rest of a plan, after the status. `body` is the job with its new status.

        It is None if the status was not written.
        """
        if not (plan.delete_job or plan.join_queue or plan.assign or plan.create or plan.place):
            await self.deleter.delete_pods(seen.value.unpack(), plan.delete)
            return plan.wake_after
        # If the status was not written, read the job again: a newer version may exist.
        body = body or await self.read_if_current(seen)
        if body is None:
            return AGAIN
        if plan.delete_job:
            await self.deleter.delete_job(body)
            return None
        if plan.join_queue:
            return await self._join(seen.value.unpack(), body, plan.join_queue, memory)
        # The cache keeps no fields for the pods alone.
        spec = Spec.from_dict(body.get("spec"))
        job = replace(seen.value.unpack(), spec=spec, status=plan.status)
        wake_after = plan.wake_after
        if plan.assign and not await self._assign(job, plan.assign, memory):
            wake_after = _earliest(wake_after, REFUSED_ASSIGNMENT_RETRY)
        if plan.create:
            await self._create(job, plan.create, memory)
            wake_after = AGAIN
            # Beside new pods, a plan deletes only ended ones, so nothing depends on the deletion.
            try:
                async with asyncio.timeout(ENDED_PODS_TIMEOUT):
                    await self.deleter.delete_pods(job, plan.delete)
            except (CallFailed, TimeoutError) as error:
                what = error or "no answer"
                log.warning("%s/%s: cannot delete ended pods: %s", job.namespace, job.name, what)
        else:
            await self.deleter.delete_pods(job, plan.delete)
        # At last, since Kueue may be away: nothing else waits for it.
        if plan.place:
            wake_after = _earliest(wake_after, await self._take_step(job, plan.place, memory))
        return wake_after

    async def _join(self, job: Job, body: Dict, queue: str, memory: Memory) -> float:
        """Give a job the label of a queue, and remember a refusal. Return when to look again."""
        memory.refusal = None
        try:
            await self.places.join(body, queue)
        except Refused as refused:
            refused.final = False
            self._remember(job, memory, refused)
        return AGAIN

    async def _take_step(self, job: Job, step: PlaceStep, memory: Memory) -> float | None:
        """Carry out a plan's step for the job's Workload. Return when to look at the job again."""
        is_new = step.action is PlaceAction.CREATE
        if is_new:
            memory.refusal = None
        try:
            outcome = await self.places.take(job, step)
        except SpecError as error:
            self._remember(job, memory, Refused(Reason.INVALID_POD, str(error)))
        except Refused as refused:
            # Such as a missing priority class. It may be created later.
            refused.final = False
            self._remember(job, memory, refused)
        except CallFailed as error:
            if is_new:
                # The status needs to know why the job does not wait in its queue.
                memory.refusal = Refusal(Reason.NO_ANSWER, str(error), self.now())
            raise
        else:
            if is_new:
                memory.refusals = 0
            waits = {Outcome.DONE: None, Outcome.CHANGED: AGAIN, Outcome.IN_USE: ROOM_INTERVAL}
            return waits[outcome]
        return AGAIN

    async def _check_agent(self, job: Job) -> None:
        """Create the agent's ConfigMap again if it is gone. A waiting pod is a sign of that.

        One look serves all jobs of a namespace, and each of them is told of a problem.
        """
        check = self.agent_checks.get(job.namespace)
        if check is None or self.clock() - check.time >= AGENT_INTERVAL:
            check = self.agent_checks[job.namespace] = AgentCheck(self.clock())
            try:
                await self.creator.check_agent(job.namespace)
            except (Refused, ApiError) as error:
                check.problem = f"the pods may wait for the ConfigMap of the agent: {error}"
        if check.problem:
            await self.reporter.post_once(job, "NoAgent", check.problem)

    async def _assign(self, job: Job, assigns: tuple[Assign, ...], memory: Memory) -> bool:
        """Assign the remaining pods. They begin to end the last attempt before anything else.

        Return False if the assignment is refused. The rest of the plan is carried out all the same.
        The pods get the assignment at a later look, or are replaced if they are silent for too
        long.
        """
        try:
            await self.creator.assign(job, assigns)
        except ApiError as error:
            message = f"a pod that stays cannot be assigned; it is tried again: {error}"
            await self.reporter.post_once(job, "AssignRefused", message)
            log.warning("%s/%s: %s", job.namespace, job.name, message)
            is_dump = any(assign.dump for assign in assigns)
            memory.refused_orders = memory.refused_orders + 1 if is_dump else 0
            return False
        memory.refused_orders = 0
        return True

    # The job

    async def _write_status(self, seen: SeenJob, status: Status, memory: Memory) -> Dict | None:
        """Write the status, and return the job. Return None if it has changed or is gone."""
        job = seen.value.unpack()
        metadata = {
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
            "resourceVersion": str(seen.version),
        }
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": metadata,
            "status": status.to_dict(),
        }
        request = Request(Verb.UPDATE, JOBS, job.namespace, job.name, "status", body=body)
        try:
            written: Dict = await self.writer.write(request)
        except NotSent:
            raise
        except CallFailed as error:
            found = await self._read(job)
            # If the answer was lost, the client repeats the request, and the second one conflicts.
            if not found or found.get("status") != body["status"]:
                if isinstance(error, ApiError) and is_gone(error) and not self._is_current(seen):
                    return None
                raise
            written = found
        self.cache.jobs.see(written)
        memory.last_write = self.clock()
        if status.finished:
            # If the job is retried later, the API server is asked again.
            memory.refusal = None
        self.metrics.count_restarts(job.status, status)
        self.metrics.count_seconds(job.status, status)
        return written

    async def read_if_current(self, seen: SeenJob) -> Dict | None:
        """Read the job again, and return it if it has not changed since `seen`."""
        found = await self._read(seen.value.unpack())
        return found if self._is_current(seen) else None

    async def _read(self, job: Job) -> Dict | None:
        found = await self.writer.read(Request(Verb.GET, JOBS, job.namespace, job.name))
        if found:
            self.cache.jobs.see(found)
        else:
            self.cache.jobs.drop(job.uid)
        return found

    def _is_current(self, seen: SeenJob) -> bool:
        return self.cache.job(seen.value.key) is seen

    # Pods

    async def _find_existing(self, job: Job, pod_names: tuple[str, ...]) -> list[str]:
        """Return the names of the job's existing pods, and add these pods to the cache.

        A pod without its labels is no longer one of the job's.
        """
        found = []

        async def look(name: str) -> None:
            pod = await self.writer.read(Request(Verb.GET, PODS, job.namespace, name))
            if pod and owner_of(pod) == job.identity and self.cache.pods.restore(pod):
                found.append(name)

        await run_all(look(name) for name in pod_names)
        return sorted(found)

    async def _keep(self, job: Job, existing: list[str]) -> float:
        """Decide again with the existing pods. Report pods with changed labels."""
        pods = self.cache.pods_of(job.identity)
        own = {pod.name for pod in pods if is_of_gang(pod, job)}
        changed = [name for name in existing if name not in own]
        if not changed:
            return AGAIN
        message = (
            f"the labels of pod {changed[0]} were changed and do not fit its name; delete the pod, "
            "or give it its labels back"
        )
        await self.reporter.post_once(job, "LabelsChanged", message)
        return LATER

    async def _any_node_differs(self, node_names: Set[str]) -> bool:
        """Return True if a Kubernetes node differs from the cache, and correct the cache.

        The watch of nodes may be interrupted. With Roles only, nodes are not read.
        """
        nodes = self.cache.nodes
        if not nodes.by_name:
            return False
        before = {name: nodes.by_name.get(name) for name in node_names}
        read: dict[str, Node | None] = {}

        async def look(name: str) -> None:
            query = {"fieldSelector": f"metadata.name={name}"}
            answer = await self.writer.read(Request(Verb.GET, NODES, query=query))
            items = (answer or {}).get("items", ())
            found = [node for node in items if node["metadata"]["name"] == name]
            read[name] = nodes.correct(name, found[0] if found else None)

        await run_all(look(name) for name in node_names)
        return read != before

    async def _create(self, job: Job, creates: tuple[Create, ...], memory: Memory) -> None:
        """Create the objects of a gang, and remember a refusal."""
        memory.refusal = None
        memory.refused_orders = 0
        self.under_quota.get(job.namespace, {}).pop(job.uid, None)
        try:
            constraints = await self._constraints(job, creates)
            await self.creator.create(job, creates, constraints)
            await self.pod_groups.delete_unused(job, constraints.group)
        except SpecError as error:
            log.exception("%s/%s: cannot render a pod", job.namespace, job.name)
            self._remember(job, memory, Refused(Reason.INVALID_POD, str(error), final=True))
        except Refused as refused:
            self._remember(job, memory, refused)
        except (ApiError, GaveWay) as error:
            # The status and the startup deadline need to know why pods are missing.
            reason = getattr(error, "reason", "") or Reason.NO_ANSWER
            memory.refusal = Refusal(reason, str(error), self.now())
            raise
        else:
            memory.refusals = 0

    async def _constraints(self, job: Job, creates: tuple[Create, ...]) -> Constraints:
        """Return the constraints on the nodes of new pods.

        Raises Refused, SpecError or CallFailed.
        """
        missing = [create.index for create in creates if create.index is not None]
        placement = await self.places.placement(job, missing)
        group = await self.pod_groups.group_for(job, has_place=placement is not None)
        return Constraints(placement, group, self.pod_groups.is_near(job, group))

    def _remember(self, job: Job, memory: Memory, refused: Refused) -> None:
        """Remember a refusal, and when to try again."""
        memory.refusals += 1
        if refused.reason == Reason.QUOTA:
            self.under_quota[job.namespace][job.uid] = None
        failures = 1 if refused.passes else memory.refusals
        delay = exponential_delay(failures, FIRST_RETRY, LONGEST_RETRY.total_seconds())
        memory.refusal = Refusal(
            refused.reason,
            refused.message,
            self.now() + timedelta(seconds=delay),
            refused.final,
            refused.counts_ended_pods,
        )


def _leaves_place(before: Status, after: Status) -> bool:
    """Return True if a job no longer needs the place that it has asked for."""
    ends = after.finished and not before.finished
    is_held = after.has(Condition.SUSPENDED) and not before.has(Condition.SUSPENDED)
    return ends or is_held


def _earliest(*waits: float | None) -> float | None:
    """Return the shortest of some waits; None is one without an end."""
    return min((wait for wait in waits if wait is not None), default=None)
