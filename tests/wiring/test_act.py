"""The order in which a plan is carried out, and the consequences of a failure."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from extensions import without_extensions
from gang import a_job

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache
from ddpjob.controller.clock import wall_time
from ddpjob.controller.creator import Creator
from ddpjob.controller.deleter import Deleter
from ddpjob.controller.events import Reporter
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.places import Outcome
from ddpjob.core.api.conditions import set_condition, stamp_conditions
from ddpjob.core.api.history import Place
from ddpjob.core.api.names import Condition, Phase
from ddpjob.core.api.reasons import Reason
from ddpjob.core.api.status import Attempt
from ddpjob.core.plan import (
    Assign,
    Delete,
    Event,
    Owned,
    PlaceAction,
    PlaceStep,
    Plan,
    create_gang,
)
from ddpjob.core.render.pod_context import Settings
from ddpjob.kube.errors import ApiError

KEY = ("ml", "digits")
STARTING = Event("Normal", "Starting", "it starts")
OLD = Delete("digits-0-1", "uid-of-old")
SHARED = [f"CREATE {kind.plural}" for kind in Owned if kind is not Owned.POD]
STAYS = Assign("digits-0-0", "uid-of-0", 0, grace=30, start=True, ready_since="", time=wall_time())


def a_condition(kind):
    """Return the conditions of a job with only this one."""
    return stamp_conditions(set_condition((), kind, True, "Reason", "message"), 1, wall_time())


class Recorder:
    """A writer that notes each request, and answers it with its body. Some requests fail."""

    def __init__(self) -> None:
        self.sent = []
        self.errors = {}

    async def write(self, request):
        what = f"{request.verb.name} {request.resource}"
        self.sent.append(what)
        if what in self.errors:
            raise self.errors[what]
        metadata = {"namespace": request.namespace, **request.body.get("metadata", {})}
        metadata |= {"uid": metadata.get("uid", request.name), "resourceVersion": "2"}
        job = a_job() if request.resource == "ddpjobs/status" else {}
        return {**job, **request.body, "metadata": {**metadata, "generation": 1}}


@pytest.fixture
def writer():
    return Recorder()


class Clock:
    """A clock that stands still until it is set."""

    time = 0.0

    def __call__(self):
        return self.time


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def actor(writer, clock):
    """Return an Actor with one job in its cache."""
    cache = Cache()
    job = a_job()
    job["metadata"] |= {"uid": "uid", "resourceVersion": "1", "generation": 1}
    cache.jobs.see(job)
    reporter = Reporter(writer, "operator")
    territory = SimpleNamespace(uid_of_mark=lambda namespace: "")
    creator = Creator(writer, cache, Settings(), territory, {"ml": ""})
    places, pod_groups = without_extensions(writer, cache)
    return Actor(
        writer=writer,
        cache=cache,
        creator=creator,
        deleter=Deleter(writer, cache, reporter),
        reporter=reporter,
        places=places,
        pod_groups=pod_groups,
        clock=clock,
        metrics=Metrics(cache, ()),
        now=wall_time,
    )


@pytest.fixture
def carry_out(actor):
    """Return a function to carry out a plan with a new status for a job."""
    seen = actor.cache.job(KEY)
    status = replace(seen.value.unpack().status, attempt=Attempt(0), phase="Starting")
    return lambda **fields: actor.apply(seen, Plan(status, events=(STARTING,), **fields))


async def test_the_status_is_written_first_and_the_events_last(writer, carry_out):
    wake_after = await carry_out(
        assign=(STAYS,), create=create_gang((0, 1)), delete=(OLD,), wake_after=30
    )
    assert writer.sent == [
        "UPDATE ddpjobs/status",
        "MERGE pods",
        *SHARED,
        "CREATE pods",
        "CREATE pods",
        "DELETE pods",
        "CREATE events",
    ]
    assert wake_after == 0


async def test_pods_are_not_created_before_what_they_need(writer, carry_out):
    writer.errors = {SHARED[-1]: ApiError(403, "Forbidden", "exceeded quota: small")}
    await carry_out(create=create_gang((0, 1)))
    assert writer.sent == ["UPDATE ddpjobs/status", *SHARED, "CREATE events"]


async def test_the_events_of_a_status_are_posted_also_if_a_deletion_fails(writer, carry_out):
    writer.errors = {"DELETE pods": ApiError(500, "InternalError", "no")}
    with pytest.raises(ApiError):
        await carry_out(delete=(OLD,))
    # One event is about the deletion.
    assert writer.sent == ["UPDATE ddpjobs/status", "DELETE pods", *["CREATE events"] * 2]


async def test_an_operator_that_ends_posts_no_event(writer, carry_out):
    writer.errors = {"DELETE pods": asyncio.CancelledError()}
    with pytest.raises(asyncio.CancelledError):
        await carry_out(delete=(OLD,))
    assert writer.sent == ["UPDATE ddpjobs/status", "DELETE pods"]


async def test_a_refused_assignment_does_not_keep_the_rest_of_a_plan(writer, carry_out):
    writer.errors = {"MERGE pods": ApiError(422, "Invalid", "no")}
    assert await carry_out(assign=(STAYS,), delete=(OLD,), wake_after=30) == 5
    assert "DELETE pods" in writer.sent


async def test_a_job_that_has_gone_or_changed_is_not_logged_as_deleted(writer, caplog):
    caplog.set_level("INFO")
    deleter = Deleter(writer, Cache(), Reporter(writer, "first"))
    body = {"metadata": {**a_job()["metadata"], "uid": "uid-of-job", "resourceVersion": "1"}}
    for error in (ApiError(404, "NotFound", "gone"), ApiError(409, "Conflict", "changed")):
        writer.errors = {"DELETE ddpjobs": error}
        await deleter.delete_job(body)
    assert "deleted" not in caplog.text
    writer.errors = {}
    await deleter.delete_job(body)
    assert "ml/digits: deleted" in caplog.text


@pytest.mark.parametrize(
    ("message", "interval"),
    [
        # The words of the queue follow the colon.
        ("waits for room in the queue team: too few cpu", 60.0),
        # It has no words yet, so the first ones are written soon.
        ("waits for room in the queue team", 2.0),
    ],
)
async def test_the_words_of_a_queue_are_written_once_a_minute(
    writer, actor, clock, message, interval
):
    async def look(words):
        seen = actor.cache.job(KEY)
        before = seen.value.unpack().status.conditions
        conditions = set_condition(before, Condition.SUSPENDED, True, Reason.QUEUED, words)
        status = replace(
            seen.value.unpack().status,
            phase=Phase.PENDING,
            reason=Reason.QUEUED,
            message=words,
            conditions=stamp_conditions(conditions, 1, wall_time()),
        )
        return await actor.apply(seen, Plan(status))

    await look(message)
    assert await look(f"{message}, and memory") == interval
    clock.time = interval - 0.5
    assert await look("waits for room in the queue team: too few pods") == 0.5
    assert writer.sent == ["UPDATE ddpjobs/status"]
    clock.time = interval
    await look("waits for room in the queue team: too few pods")
    assert writer.sent == ["UPDATE ddpjobs/status"] * 2


async def is_found(job):
    return True


@pytest.mark.parametrize(
    ("look", "changes"),
    [
        ("recover", {"place": Place(2)}),
        ("recover_if_possible", {"conditions": a_condition(Condition.COMPLETE)}),
        ("recover_if_possible", {"conditions": a_condition(Condition.SUSPENDED)}),
    ],
)
async def test_a_place_that_exists_is_neither_replaced_nor_left(writer, actor, look, changes):
    """It only seemed to be gone, so the next look decides again."""
    actor.places = SimpleNamespace(**{look: is_found})
    seen = actor.cache.job(KEY)
    status = replace(seen.value.unpack().status, **changes)
    assert await actor.apply(seen, Plan(status)) == 0
    assert writer.sent == []


async def test_refused_orders_are_counted_until_pods_get_another_one(writer, actor, carry_out):
    async def refuse(job, assigns):
        raise ApiError(403, "Forbidden", "no")

    actor.creator.assign = refuse
    order = replace(STAYS, dump=True)
    for assign, count in ((order, 1), (order, 2), (STAYS, 0), (order, 1)):
        await carry_out(assign=(assign,))
        assert actor.memory_of("uid").refused_orders == count
    await carry_out(create=create_gang((0, 1)))
    assert actor.memory_of("uid").refused_orders == 0


async def test_room_in_use_is_looked_at_again_soon(actor, carry_out):
    """No event follows if the last container of a pod has ended before the pod does."""

    async def take(job, step):
        return Outcome.IN_USE

    actor.places = SimpleNamespace(take=take)
    assert await carry_out(place=PlaceStep(PlaceAction.CREATE)) <= 2.0
