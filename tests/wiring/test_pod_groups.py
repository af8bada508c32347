"""The PodGroup of a job's new pods, and the requests to the API server for it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from extensions import pod_groups

from ddpjob.controller.cache import Cache
from ddpjob.controller.errors import Refused
from ddpjob.core.api.job import Job
from ddpjob.core.api.pod_groups import GroupName
from ddpjob.core.api.status import Attempt
from ddpjob.core.observe.observation import ApiState
from ddpjob.kube.errors import ApiError, Unreachable

NATIVE = {"Kubernetes": ApiState.SERVED}
QUEUE = {"kueue.x-k8s.io/queue-name": "team"}
FIRST = GroupName("Kubernetes", "digits-0")


class Server:
    """An API server that notes writes, and has the objects of `existing`."""

    def __init__(self, **existing: dict[str, Any]) -> None:
        self.existing = existing
        self.written: list[Any] = []
        self.error: Exception | None = None
        self.drops_topology = False

    async def write(self, request: Any) -> dict[str, Any]:
        self.written.append(request)
        if self.error:
            raise self.error
        body = request.body or {}
        name = request.name or body.get("metadata", {}).get("name", "")
        if request.verb.name == "CREATE" and name in self.existing:
            raise ApiError(409, "AlreadyExists", f"{name} already exists")
        old: dict[str, Any] = self.existing.get(name, {})
        metadata = {**old.get("metadata", {}), **body.get("metadata", {})}
        metadata |= {"uid": f"uid-of-{name}", "resourceVersion": str(10 + len(self.written))}
        spec = dict(body.get("spec", {}))
        if self.drops_topology:
            spec.pop("schedulingConstraints", None)
        kinds = {"apiVersion": "scheduling.k8s.io/v1beta1"}
        return {**kinds, **old, **body, "metadata": metadata, "spec": spec}

    async def read(self, request: Any) -> dict[str, Any] | None:
        return self.existing.get(request.name)

    @property
    def asked(self) -> list[str]:
        return [
            f"{one.verb.name} {one.name or one.body['metadata']['name']}" for one in self.written
        ]


def a_job(labels: dict[str, str] | None = None, attempt: int = 0, **spec: Any) -> Job:
    metadata = {"name": "digits", "namespace": "ml", "uid": "uid", "labels": labels or {}}
    nodes = spec.get("nodes", 4)
    status = {"nodes": {"desired": nodes}}
    fields = {"nodes": nodes, "image": "i", "args": ["train.py"], **spec}
    job = Job.from_dict({"metadata": metadata, "spec": fields, "status": status})
    return replace(job, status=replace(job.status, attempt=Attempt(attempt)))


def a_group(name: str, count: int = 4, uid: str = "uid") -> dict[str, Any]:
    owner = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "name": "digits",
        "uid": uid,
        "controller": True,
    }
    return {
        "apiVersion": "scheduling.k8s.io/v1beta1",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-of-{name}",
            "resourceVersion": "1",
            "ownerReferences": [owner],
        },
        "spec": {"schedulingPolicy": {"gang": {"minCount": count}}},
    }


def with_group(*bodies: dict[str, Any]) -> Cache:
    cache = Cache()
    for body in bodies:
        cache.pod_groups["Kubernetes"].see(body)
    return cache


def see_pod(cache: Cache, index: int, group: str, attempt: int = 0) -> None:
    """Take in a running pod."""
    body = a_group(f"digits-{attempt}-{index}")
    labels = {
        "ddpjob.dev/job-name": "digits",
        "ddpjob.dev/attempt": str(attempt),
        "ddpjob.dev/index": str(index),
    }
    spec = {"schedulingGroup": {"podGroupName": group}} if group else {}
    metadata = {**body["metadata"], "labels": labels}
    state = {"name": "trainer", "state": {"running": {}}}
    status = {"phase": "Running", "containerStatuses": [state]}
    cache.pods.see({"metadata": metadata, "spec": spec, "status": status})
    assert len(cache.pods.objects) > 0


async def test_new_pods_get_a_group_for_all_of_them() -> None:
    server = Server()
    job = a_job(priorityClassName="urgent", scheduling={"topology": {"required": "rack"}})
    assert await pod_groups(server, Cache(), **NATIVE).group_for(job) == FIRST
    (request,) = server.written
    assert request.resource == "podgroups"
    assert request.body["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 4}},
        "disruptionMode": {"all": {}},
        "priorityClassName": "urgent",
        "schedulingConstraints": {"topology": [{"key": "rack"}]},
    }
    assert request.body["metadata"]["ownerReferences"][0]["uid"] == "uid"


OTHER_SCHEDULER = {"spec": {"schedulerName": "volcano"}}
OWN_GROUP = {"spec": {"schedulingGroup": {"podGroupName": "mine"}}}


@pytest.mark.parametrize(
    ("job", "states"),
    [
        pytest.param(a_job(), {}, id="Kubernetes serves none"),
        pytest.param(a_job(), {"Kubernetes": ApiState.UNREADABLE}, id="they cannot be read"),
        pytest.param(a_job(nodes=1), NATIVE, id="one pod"),
        pytest.param(a_job(), {"Kubernetes": ApiState.UNKNOWN}, id="it is not known"),
        pytest.param(a_job(scheduling={"gang": "Off"}), NATIVE, id="switched off"),
        pytest.param(a_job(podTemplate=OTHER_SCHEDULER), NATIVE, id="another scheduler"),
        pytest.param(a_job(podTemplate=OWN_GROUP), NATIVE, id="a group of the user's"),
    ],
)
async def test_pods_get_no_group(job: Job, states: dict[str, ApiState]) -> None:
    server = Server()
    assert await pod_groups(server, Cache(), **states).group_for(job) is None
    assert server.written == []


@pytest.mark.parametrize("labels", [{}, QUEUE])
async def test_a_scheduler_that_the_job_names_is_used_beside_a_queue_too(
    labels: dict[str, str],
) -> None:
    server = Server()
    annotation = {"metadata": {"annotations": {"scheduling.volcano.sh/queue-name": "team"}}}
    job = a_job(labels, scheduling={"gang": "Volcano"}, podTemplate=annotation)
    found = await pod_groups(server, Cache(), Volcano=ApiState.SERVED).group_for(job)
    assert found == GroupName("Volcano", "digits-0")
    assert server.written[0].body["spec"] == {"minMember": 4, "queue": "team"}


@pytest.mark.parametrize(
    ("gang", "state", "words"),
    [
        ("Volcano", ApiState.UNKNOWN, "has not read yet whether the cluster serves"),
        ("Volcano", ApiState.ABSENT, "does not serve PodGroups of scheduling.volcano.sh/v1beta1"),
        ("Coscheduling", ApiState.UNREADABLE, "may not read the PodGroups"),
    ],
)
async def test_a_job_waits_for_the_scheduler_that_it_names(
    gang: str, state: ApiState, words: str
) -> None:
    job = a_job(scheduling={"gang": gang})
    with pytest.raises(Refused, match=words):
        await pod_groups(Server(), Cache(), **{gang: state}).group_for(job)


async def test_a_named_scheduler_that_the_pods_do_not_use_is_no_silent_lack_of_a_gang() -> None:
    template = {"spec": {"schedulerName": "volcano-gpu"}}
    job = a_job(scheduling={"gang": "Volcano"}, podTemplate=template)
    with pytest.raises(Refused, match="volcano-gpu of the pods knows no PodGroups of Volcano"):
        await pod_groups(Server(), Cache(), Volcano=ApiState.SERVED).group_for(job)


async def test_a_replaced_pod_gets_the_group_of_those_that_stay() -> None:
    cache = with_group(a_group("digits-0"))
    see_pod(cache, 0, "digits-0")
    server = Server()
    assert await pod_groups(server, cache, **NATIVE).group_for(a_job()) == FIRST
    assert server.written == []


async def test_a_deleted_group_of_pods_that_stay_is_created_again_before_a_pod_joins_it() -> None:
    cache = Cache()
    see_pod(cache, 0, "digits-7")
    server = Server()
    found = await pod_groups(server, cache, **NATIVE).group_for(a_job())
    assert found == GroupName("Kubernetes", "digits-7")
    assert server.asked == ["CREATE digits-7"]


async def test_a_pod_joins_its_group_also_if_groups_cannot_be_read() -> None:
    cache = Cache()
    see_pod(cache, 0, "digits-0")
    server = Server()
    found = await pod_groups(server, cache, Kubernetes=ApiState.UNREADABLE).group_for(a_job())
    assert (found, server.asked) == (FIRST, [])


async def test_a_pod_that_joins_pods_without_a_group_has_none_either() -> None:
    # It would wait for ever for others in its group.
    cache = Cache()
    see_pod(cache, 0, "")
    server = Server()
    assert await pod_groups(server, cache, **NATIVE).group_for(a_job()) is None
    assert server.written == []


async def test_the_group_of_pods_that_stay_gets_the_new_number_of_nodes() -> None:
    cache = with_group(a_group("digits-0", count=4))
    see_pod(cache, 0, "digits-0")
    server = Server(**{"digits-0": a_group("digits-0")})
    assert await pod_groups(server, cache, **NATIVE).group_for(a_job(nodes=2)) == FIRST
    assert server.asked == ["MERGE digits-0"]
    assert server.written[0].body == {"spec": {"schedulingPolicy": {"gang": {"minCount": 2}}}}


async def test_a_whole_new_set_of_pods_has_a_new_group_and_the_old_one_goes() -> None:
    cache = with_group(a_group("digits-0"))
    server = Server()
    groups = pod_groups(server, cache, **NATIVE)
    found = await groups.group_for(a_job(attempt=2))
    assert found == GroupName("Kubernetes", "digits-2")
    await groups.delete_unused(a_job(attempt=2), found)
    assert server.asked == ["CREATE digits-2", "DELETE digits-0"]


async def test_a_group_that_exists_is_the_answer_to_a_request_before() -> None:
    server = Server(**{"digits-0": a_group("digits-0")})
    assert await pod_groups(server, Cache(), **NATIVE).group_for(a_job()) == FIRST


async def test_a_group_that_exists_with_another_size_gets_that_of_the_job() -> None:
    server = Server(**{"digits-0": a_group("digits-0", count=2)})
    assert await pod_groups(server, Cache(), **NATIVE).group_for(a_job()) == FIRST
    assert server.asked == ["CREATE digits-0", "MERGE digits-0"]


async def test_a_job_that_a_queue_has_admitted_needs_no_group() -> None:
    server = Server()
    groups = pod_groups(server, Cache(), **NATIVE)
    assert await groups.group_for(a_job(QUEUE), has_place=True) is None
    assert server.written == []


async def test_a_pod_that_joins_pods_of_a_group_of_the_users_is_left_alone() -> None:
    cache = Cache()
    see_pod(cache, 0, "mine")
    assert await pod_groups(Server(), cache, **NATIVE).group_for(a_job()) is None


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (ApiError(404, "NotFound", "not found"), False),
        # The group is there again when its kind is.
        (ApiError(404, "", "404 page not found"), True),
    ],
)
async def test_pods_go_on_without_a_group_that_is_gone(error: ApiError, is_kept: bool) -> None:
    cache = with_group(a_group("digits-0", count=2))
    see_pod(cache, 0, "digits-0")
    server = Server()
    server.error = error
    groups = pod_groups(server, cache, **NATIVE)
    assert await groups.group_for(a_job()) == FIRST
    assert bool(cache.pod_groups["Kubernetes"].objects) is is_kept


async def test_a_write_without_an_answer_is_a_reason() -> None:
    server = Server()
    server.error = Unreachable("no answer")
    with pytest.raises(Refused, match="does not answer"):
        await pod_groups(server, Cache(), **NATIVE).group_for(a_job())


async def test_a_group_says_whether_it_keeps_its_pods_near() -> None:
    # Without its gate, the API server drops the constraint.
    job = a_job(scheduling={"topology": {"required": "rack"}})
    for drops, is_near in ((False, True), (True, False)):
        server = Server()
        server.drops_topology = drops
        groups = pod_groups(server, Cache(), **NATIVE)
        assert groups.is_near(job, await groups.group_for(job)) is is_near


async def test_a_group_of_somebody_else_is_named() -> None:
    server = Server(**{"digits-0": a_group("digits-0", uid="another")})
    with pytest.raises(Refused, match="PodGroup digits-0 exists and does not belong to this job"):
        await pod_groups(server, Cache(), **NATIVE).group_for(a_job())


def test_the_words_of_the_scheduler_are_those_of_the_group_that_waits() -> None:
    waiting = a_group("digits-0")
    condition = {
        "type": "PodGroupInitiallyScheduled",
        "status": "False",
        "message": "minCount (4) cannot be satisfied: 2 scheduled",
    }
    waiting["status"] = {"conditions": [condition]}
    groups = pod_groups(Server(), with_group(waiting), **NATIVE)
    pod: Any = SimpleNamespace(group=FIRST, node_name="", active=True)
    assert groups.why_it_waits(a_job(), [pod]) == condition["message"]
    pod.node_name = "worker-1"
    assert groups.why_it_waits(a_job(), [pod]) == ""
