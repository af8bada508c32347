"""Jobs with pods refused by a quota are looked at again when pods go, one job for each pod."""

from gang import a_job

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache


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
