"""The watch of a kind that a cluster may have or not."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from gang import a_job, until

from ddpjob.controller import extension as module
from ddpjob.controller.cache import Cache
from ddpjob.controller.extension import Extension, Extensions
from ddpjob.core.api.names import Identity
from ddpjob.core.api.owned import owned_metadata
from ddpjob.core.observe.observation import ApiState
from ddpjob.kube.errors import ApiError, Unreachable
from ddpjob.kube.kinds import WORKLOADS

SERVED = {"resources": [{"name": "workloads"}]}
FORBIDDEN = ApiError(403, "Forbidden", "workloads is forbidden")


class Api:
    """An API server: what each namespace answers to a LIST, and whether it has the kind."""

    def __init__(self, **answers: Any) -> None:
        self.document: Any = SERVED
        self.answers = answers
        self.reads = 0

    async def read(self, request: Any) -> Any:
        namespace = getattr(request, "namespace", None)
        self.reads += 1
        found = self.document if namespace is None else self.answers[namespace]
        if isinstance(found, Exception):
            raise found
        return found


def a_workload(namespace: str) -> dict[str, Any]:
    metadata = owned_metadata(Identity(namespace, "digits", "uid"), "ddpjob-digits")
    return {"metadata": {**metadata, "uid": "w", "resourceVersion": "1"}}


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch):
    """Return a function to watch two namespaces, each with its answer to a LIST."""
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    tasks = []

    async def watch(api: Api, kind: Any, namespace: str, query: Any, on_list: Any) -> Any:
        found = api.answers[namespace]
        if isinstance(found, Exception):
            raise found
        for body in found:
            yield "ADDED", body
        on_list({body["metadata"]["uid"] for body in found}, "5")
        yield None
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "watch", watch)

    def start(api: Api) -> tuple[Extension, list[Any]]:
        cache = Cache()
        for namespace in api.answers:
            job = a_job()
            job["metadata"] |= {"namespace": namespace, "uid": namespace, "resourceVersion": "1"}
            cache.jobs.see(job)
        looked: list[Any] = []
        queue: Any = SimpleNamespace(add=looked.append)
        watched: Any = (api, cache, queue, WORKLOADS, cache.workloads, list(api.answers))
        extension = Extension(*watched)
        tasks.append(asyncio.create_task(extension.run()))
        return extension, looked

    yield start
    for task in tasks:
        task.cancel()


async def test_a_namespace_that_cannot_be_read_stops_no_other(follow: Any) -> None:
    api = Api(a=[a_workload("a")], b=FORBIDDEN)
    extension, looked = follow(api)
    await until(lambda: extension.state is ApiState.SERVED)
    assert extension.state_in("a") is ApiState.SERVED
    assert extension.state_in("b") is ApiState.UNREADABLE
    looked.clear()
    api.answers["b"] = []
    await until(lambda: extension.state_in("b") is ApiState.SERVED)
    assert looked == [("b", "digits")]


async def test_the_objects_enter_the_store_and_their_jobs_are_looked_at(follow: Any) -> None:
    extension, looked = follow(Api(a=[a_workload("a")]))
    await until(lambda: extension.state is ApiState.SERVED)
    assert ("a", "digits") in looked
    assert extension.store.count("a") == 1


@pytest.mark.parametrize(
    ("document", "state"),
    [
        (None, ApiState.ABSENT),
        ({"resources": [{"name": "others"}]}, ApiState.ABSENT),
        (FORBIDDEN, ApiState.UNREADABLE),
    ],
)
async def test_what_is_known_after_the_first_look(
    follow: Any, document: Any, state: ApiState
) -> None:
    api = Api(a=[])
    api.document = document
    extension, _ = follow(api)
    assert not extension.has_looked
    await extension.wait_for_first_look()
    assert (extension.state, extension.has_looked) == (state, True)


async def test_a_look_without_an_answer_is_repeated_a_few_times(follow: Any) -> None:
    """Until then, a job without a queue waits: its namespace may have a default queue."""
    api = Api(a=[])
    api.document = Unreachable("no answer")
    extension, _ = follow(api)
    await until(lambda: extension.has_looked)
    assert extension.state is ApiState.UNKNOWN
    assert api.reads == module.FAILED_LOOKS


def known(state: ApiState, *looked: bool) -> Extensions:
    """Return the extensions of a cluster with a default queue in the namespace ml.

    `looked`: whether the Workloads and the default queues were looked for.
    """
    cache = Cache()
    cache.default_queues.see(a_default_queue("uid", "1"))
    both: list[Any] = [
        SimpleNamespace(state=state, has_looked=one, cache=cache, state_in=lambda namespace: state)
        for one in looked
    ]
    return Extensions(*both, {})


@pytest.mark.parametrize(
    ("state", "looked", "has_queue"),
    [
        (ApiState.UNKNOWN, (False, False), None),
        (ApiState.SERVED, (True, False), None),
        (ApiState.UNKNOWN, (False, True), None),
        (ApiState.SERVED, (True, True), True),
        (ApiState.UNKNOWN, (True, True), True),
        (ApiState.ABSENT, (True, True), False),
        (ApiState.UNREADABLE, (True, True), False),
        (ApiState.OFF, (False, False), False),
        (ApiState.REFUSED, (False, False), False),
    ],
)
def test_whether_a_namespace_has_a_default_queue(
    state: ApiState, looked: tuple[bool, bool], has_queue: bool | None
) -> None:
    extensions = known(state, *looked)
    assert extensions.has_default_queue("ml") is has_queue
    assert not extensions.has_default_queue("other")


async def test_an_api_that_is_installed_later_is_found(follow: Any) -> None:
    api = Api(a=[])
    api.document = None
    extension, looked = follow(api)
    await until(lambda: extension.state is ApiState.ABSENT)
    looked.clear()
    api.document = SERVED
    await until(lambda: extension.state is ApiState.SERVED)
    assert looked == [("a", "digits")]


def a_default_queue(uid: str, version: str, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "default",
            "namespace": "ml",
            "uid": uid,
            "resourceVersion": version,
            **metadata,
        }
    }


def test_a_local_queue_that_is_made_anew_takes_jobs_and_one_that_goes_takes_none() -> None:
    queues = Cache().default_queues
    queues.see(a_default_queue("old", "1"))
    queues.see(a_default_queue("new", "3"))
    queues.forget(a_default_queue("old", "2"))
    assert queues.count("ml") == 1
    queues.see(a_default_queue("new", "4", deletionTimestamp="2026-11-21T12:00:00Z"))
    assert queues.count("ml") == 0
