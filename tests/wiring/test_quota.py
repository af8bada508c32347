"""Jobs with pods refused by a quota are looked at again when pods go, one job for each pod."""

from types import SimpleNamespace

import pytest
from gang import a_job

from ddpjob.controller.act import SOON, Actor
from ddpjob.controller.cache import Cache
from ddpjob.controller.handlers import registry
from ddpjob.core.api import names
from ddpjob.kube.kinds import PODS


def an_actor(**jobs):
    """Return an actor after a quota has refused the pods of these jobs, by their namespace."""
    cache = Cache()
    actor = Actor(None, cache, *[None] * 8)
    for number, (name, namespace) in enumerate(jobs.items(), start=1):
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-of-{name}"}
        metadata["resourceVersion"] = str(number)
        cache.jobs.see({**a_job(), "metadata": metadata})
        actor.under_quota[namespace][metadata["uid"]] = None
    return actor


def woken(actor, namespace="ml"):
    seen = actor.next_under_quota(namespace)
    return seen and seen.value.key[1]


def test_each_pod_that_goes_is_for_the_next_job_of_its_namespace():
    actor = an_actor(first="ml", second="ml", other="elsewhere")
    assert [woken(actor) for _ in range(3)] == ["first", "second", "first"]
    assert woken(actor, "elsewhere") == "other"
    assert woken(actor, "unknown") is None
    assert "unknown" not in actor.under_quota


def test_a_job_that_was_deleted_takes_no_turn():
    actor = an_actor(first="ml", second="ml", third="ml")
    actor.cache.jobs.drop("uid-of-first")
    assert [woken(actor) for _ in range(3)] == ["second", "third", "second"]
    for name in ("second", "third"):
        actor.cache.jobs.drop(f"uid-of-{name}")
    actor.reporter = Nobody()
    actor.forget_removed_jobs()
    assert actor.under_quota == {}


class Nobody:
    """A reporter of events with nothing to forget."""

    def forget_others(self, existing):
        pass


def a_deleted_pod(index, namespace="ml"):
    """Return the DELETED event of a pod of the job `old`."""
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "controller": True}
    labels = {names.LABEL_JOB: "old", names.LABEL_ATTEMPT: "0", names.LABEL_INDEX: str(index)}
    metadata = {
        "name": f"old-0-{index}",
        "namespace": namespace,
        "uid": f"uid-of-pod-{index}",
        "resourceVersion": "100",
        "labels": labels,
        "ownerReferences": [{**owner, "name": "old", "uid": "uid-of-old"}],
    }
    return {"type": "DELETED", "object": {"metadata": metadata, "spec": {}}}


@pytest.fixture
def events_of_pods():
    """Return a function: the handler of events of pods, for an actor and a queue."""

    def make(actor, queue):
        lister = SimpleNamespace(
            cache=actor.cache, queue=queue, reads_nodes=False, note_event=lambda *_, **__: None
        )
        handlers = registry(lister, actor, None)._watching.get_all_handlers()
        (found,) = (handler.fn for handler in handlers if handler.id == PODS.plural)
        return found

    return make


async def test_as_many_waiting_jobs_are_woken_as_pods_went(events_of_pods):
    actor = an_actor(**{f"job-{number}": "ml" for number in range(50)}, other="elsewhere")
    added = []
    queue = SimpleNamespace(add=lambda key, delay=0.0: added.append((key, delay)))
    handle = events_of_pods(actor, queue)
    for index in range(3):
        await handle(event=a_deleted_pod(index))
    woken = [key for key, delay in added if delay == SOON]
    assert woken == [("ml", "job-0"), ("ml", "job-1"), ("ml", "job-2")]
    # Beside these, only the job of the pods is looked at.
    assert {key for key, delay in added if delay != SOON} == {("ml", "old")}


async def test_a_pod_that_changes_wakes_no_waiting_job(events_of_pods):
    actor = an_actor(first="ml")
    added = []
    queue = SimpleNamespace(add=lambda key, delay=0.0: added.append(key))
    event = {**a_deleted_pod(0), "type": "MODIFIED"}
    await events_of_pods(actor, queue)(event=event)
    assert added == [("ml", "old")]
