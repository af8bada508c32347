"""Where the pods of a job may run, as the cache and the API server say."""

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from extensions import Known

from ddpjob.controller.cache import Cache
from ddpjob.controller.errors import Refused
from ddpjob.controller.places import Outcome, Places
from ddpjob.core.api.history import Place
from ddpjob.core.api.job import Job
from ddpjob.core.api.kueue import LABEL_JOB_UID, Demand, new_workload, read_workload
from ddpjob.core.api.status import PodCounts
from ddpjob.core.observe.observation import ApiState
from ddpjob.core.plan import PlaceAction, PlaceStep
from ddpjob.core.render.pod_context import Settings
from ddpjob.kube.errors import ApiError
from ddpjob.kube.request import Verb

TEAM = {"kueue.x-k8s.io/queue-name": "team"}
FLAVOR = {"metadata": {"name": "workers"}, "spec": {"nodeLabels": {"pool": "training"}}}


def a_job(labels: dict[str, str] | None = None) -> Job:
    metadata = {"name": "digits", "namespace": "ml", "uid": "uid", "labels": labels or {}}
    status = {"operator": {"place": {"number": 1}}, "nodes": {"desired": 2}}
    spec = {"nodes": 2, "image": "i", "args": ["train.py"]}
    return Job.from_dict({"metadata": metadata, "spec": spec, "status": status})


def places(cache: Cache, state: ApiState, flavor: dict[str, Any] | None = None) -> Places:
    async def read(request: Any) -> dict[str, Any] | None:
        return flavor

    writer: Any = SimpleNamespace(read=read)
    queues: Any = Known(state)
    return Places(writer, cache, Settings(), lambda: datetime.now(UTC), queues)


def a_workload(job: Job, *kinds: str) -> dict[str, Any]:
    """Return the Workload of a job, with these conditions True."""
    assert job.queue
    body = new_workload(job.identity, 1, Demand(job.queue, 2, {}))
    body["metadata"] |= {"uid": "w", "resourceVersion": "1"}
    assignment = {"name": "main", "flavors": {"cpu": "workers"}, "count": 2}
    conditions = [{"type": kind, "status": "True"} for kind in kinds]
    body["status"] = {
        "admission": {"podSetAssignments": [assignment]},
        "conditions": conditions,
    }
    return body


def with_workload(job: Job, *kinds: str) -> Cache:
    """Return a cache with the Workload of a job, with these conditions True."""
    cache = Cache()
    cache.workloads.see(a_workload(job, *kinds))
    return cache


async def test_a_job_without_a_queue_may_run_anywhere() -> None:
    assert await places(Cache(), ApiState.SERVED).placement(a_job()) is None
    assert await places(Cache(), ApiState.OFF).placement(a_job(TEAM)) is None


async def test_the_nodes_are_those_of_the_flavor() -> None:
    job = a_job(TEAM)
    cache = with_workload(job, "QuotaReserved", "Admitted")
    found = await places(cache, ApiState.SERVED, FLAVOR).placement(job)
    assert found
    assert found.node_labels == {"pool": "training"}


@pytest.mark.parametrize("kinds", [(), ("QuotaReserved",), ("Admitted", "Evicted")])
async def test_without_room_no_pod_is_created(kinds: tuple[str, ...]) -> None:
    job = a_job(TEAM)
    with pytest.raises(Refused, match="the room that the queue team has given"):
        await places(with_workload(job, *kinds), ApiState.SERVED, FLAVOR).placement(job)


@pytest.mark.parametrize("state", [ApiState.UNKNOWN, ApiState.ABSENT, ApiState.REFUSED])
async def test_a_job_that_runs_waits_with_its_new_pods_while_kueue_is_away(state: ApiState) -> None:
    job = a_job(TEAM)
    for cache in (Cache(), with_workload(job, "Admitted")):
        with pytest.raises(Refused, match="it is tried again"):
            await places(cache, state, FLAVOR).placement(job)


async def test_room_for_another_number_of_nodes_is_none() -> None:
    job = a_job(TEAM)
    grown = replace(job, status=replace(job.status, pods=PodCounts(desired=4)))
    with pytest.raises(Refused):
        await places(with_workload(job, "Admitted"), ApiState.SERVED, FLAVOR).placement(grown)


async def test_an_orphan_that_cannot_be_let_go_does_not_keep_others_from_it(caplog: Any) -> None:
    cache = with_workload(a_job(TEAM), "Admitted")
    sent: list[str] = []

    async def read(request: Any) -> dict[str, Any] | None:
        return None

    async def write(request: Any) -> dict[str, Any]:
        sent.append(request.name)
        raise ApiError(500, "InternalError", "failed calling webhook vworkload.kb.io")

    found = places(cache, ApiState.SERVED)
    found.writer = cast(Any, SimpleNamespace(read=read, write=write))
    await found.let_orphans_go(("ml", "digits"))
    assert len(sent) == 1
    assert "cannot let Workload" in caplog.text


async def test_a_flavor_that_is_gone_is_named() -> None:
    job = a_job(TEAM)
    with pytest.raises(Refused, match="ResourceFlavor workers does not exist any more"):
        await places(with_workload(job, "Admitted"), ApiState.SERVED).placement(job)


class Server:
    """An API server with one Workload, one job or none, and some pods."""

    def __init__(self, workload: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        self.workload = workload
        self.pods = pods
        self.written: list[dict[str, Any]] = []
        self.verbs: list[Verb] = []

    async def read(self, request: Any) -> dict[str, Any] | None:
        answers = {"workloads": self.workload, "pods": {"items": self.pods}}
        return answers.get(request.kind.plural)

    async def write(self, request: Any) -> dict[str, Any]:
        self.verbs.append(request.verb)
        if request.verb is Verb.CREATE:
            raise ApiError(409, "AlreadyExists", "it exists")
        self.written.append(request.body)
        metadata = {**self.workload["metadata"], "resourceVersion": "9"}
        return {**self.workload, "metadata": metadata}


def without_owner(body: dict[str, Any]) -> dict[str, Any]:
    metadata = {key: value for key, value in body["metadata"].items() if key != "ownerReferences"}
    return {**body, "metadata": metadata}


def without_label(body: dict[str, Any]) -> dict[str, Any]:
    metadata = {**body["metadata"], "labels": {LABEL_JOB_UID: "uid"}}
    return {**body, "metadata": metadata}


def with_server(cache: Cache, server: Server) -> Places:
    found = places(cache, ApiState.SERVED)
    found.writer = cast(Any, server)
    return found


def a_pod_without_owner(runs: bool) -> dict[str, Any]:
    labels = {"ddpjob.dev/attempt": "0", "ddpjob.dev/index": "0"}
    metadata = {
        "name": "digits-0-0",
        "namespace": "ml",
        "uid": "p",
        "labels": labels,
        "resourceVersion": "1",
    }
    end = {"running": {}} if runs else {"terminated": {"exitCode": 0}}
    statuses = [{"name": "trainer", "state": end}]
    phase = "Running" if runs else "Succeeded"
    return {"metadata": metadata, "status": {"phase": phase, "containerStatuses": statuses}}


@pytest.mark.parametrize("runs", [True, False])
async def test_a_workload_orphaned_with_its_pods_is_let_go_after_them(runs: bool) -> None:
    """`kubectl delete --cascade=orphan` takes the owner off the Workload and off the pods."""
    job = a_job(TEAM)
    body = without_owner(a_workload(job))
    cache = Cache()
    cache.workloads.see(body)
    assert cache.key_of_owned(body) == ("ml", "digits")
    server = Server(body, [a_pod_without_owner(runs)])
    await with_server(cache, server).let_orphans_go(("ml", "digits"))
    # Without an owner, the garbage collector does not delete it.
    assert server.verbs == ([] if runs else [Verb.DELETE, Verb.MERGE])


async def test_a_workload_without_its_label_gets_it_again_and_is_no_lost_place() -> None:
    job = a_job(TEAM)
    body = without_label(a_workload(job))
    placed = replace(job, status=replace(job.status, place=Place(1, "w")))
    cache = Cache()
    server = Server(body, [])
    assert await with_server(cache, server).recover(placed)
    labels = server.written[0]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/managed-by": "ddpjob-operator"}
    assert cache.workload_of(placed)
    other = replace(job, status=replace(job.status, place=Place(1, "another")))
    assert not await with_server(Cache(), server).recover(other)


@pytest.mark.parametrize("state", [ApiState.OFF, ApiState.ABSENT, ApiState.UNREADABLE])
async def test_without_kueue_no_workload_is_looked_for(state: ApiState) -> None:
    job = a_job(TEAM)
    found = places(Cache(), state)
    found.writer = cast(Any, None)
    assert not await found.recover(job)


async def test_a_workload_that_lost_its_label_before_it_was_admitted_gets_it_again() -> None:
    job = a_job(TEAM)
    server = Server(without_label(a_workload(job)), [])
    cache = Cache()
    await with_server(cache, server).take(job, PlaceStep(PlaceAction.CREATE))
    assert server.verbs == [Verb.CREATE, Verb.MERGE]
    assert cache.workload_of(job)


async def test_a_workload_of_the_same_name_and_another_owner_is_refused() -> None:
    job = a_job(TEAM)
    body = without_owner(a_workload(job))
    # Only the label with the UID is that of the job.
    body["metadata"]["labels"] = {"ddpjob.dev/job": "other", LABEL_JOB_UID: "uid"}
    step = PlaceStep(PlaceAction.CREATE)
    with pytest.raises(Refused, match="is not of this job; delete it"):
        await with_server(Cache(), Server(body, [])).take(job, step)


# Somebody may have changed its labels.
@pytest.mark.parametrize("labels", [{"ddpjob.dev/attempt": "0", "ddpjob.dev/index": "0"}, {}])
async def test_room_is_in_use_until_all_containers_of_a_pod_have_ended(
    labels: dict[str, str],
) -> None:
    """A native sidecar may run on after the trainer."""
    job = a_job(TEAM)
    pod = a_pod_without_owner(runs=False)
    owner = a_workload(job)["metadata"]["ownerReferences"]
    pod["metadata"] |= {"labels": labels, "ownerReferences": owner}
    body = a_workload(job, "Finished")
    (workload,) = filter(None, [read_workload(body)])
    step = PlaceStep(PlaceAction.FINISH, workload)
    for phase, outcome in (("Running", Outcome.IN_USE), ("Succeeded", Outcome.DONE)):
        pod["status"]["phase"] = phase
        found = with_server(Cache(), Server(body, [pod]))
        assert await found.take(job, step) is outcome


async def test_a_job_that_ends_does_not_wait_for_kueue(caplog: Any) -> None:
    async def read(request: Any) -> dict[str, Any] | None:
        raise ApiError(500, "InternalError", "failed calling webhook")

    found = places(Cache(), ApiState.SERVED)
    found.writer = cast(Any, SimpleNamespace(read=read))
    assert not await found.recover_if_possible(a_job(TEAM))
    assert "cannot read its Workload" in caplog.text
    with pytest.raises(ApiError):
        await found.recover(a_job(TEAM))


async def test_a_workload_is_kept_while_its_kind_is_not_served() -> None:
    """An upgrade of Kueue may stop serving it for a moment. A running job must not stop then."""
    job = a_job(TEAM)
    cache = with_workload(job, "QuotaReserved", "Admitted")
    (workload,) = cache.workloads_of(job.identity)

    async def unserved(request: Any) -> dict[str, Any]:
        raise ApiError(404, "", "404 page not found")

    found = places(cache, ApiState.SERVED)
    found.writer = cast(Any, SimpleNamespace(read=found.writer.read, write=unserved))
    with pytest.raises(ApiError):
        await found.take(job, PlaceStep(PlaceAction.READY, workload))
    assert cache.workloads_of(job.identity) == (workload,)
