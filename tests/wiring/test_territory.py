"""Two installations that watch one namespace: the later one does nothing there."""

import asyncio
from datetime import UTC, datetime

import pytest
from aiohttp import web
from fake_api import FakeApi, hanging_webhook, refusal, unanswered
from gang import a_job, is_running, status, until

from ddpjob.controller import reconcile, territory
from ddpjob.controller.territory import (
    CHECK_AFTER,
    DURATION,
    MARK,
    RENEW_AFTER,
    UNSERVED_AFTER_MARK,
    UNSERVED_WITHOUT_MARK,
    Territory,
)
from ddpjob.kube.api import ApiClient


class Clock:
    """Monotonic seconds, set by a test."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class AnyWriter:
    """A writer that needs no Lease."""

    def __init__(self, api: ApiClient) -> None:
        self.read = api.read
        self.write = api.call


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def installed(api, clock):
    """Return a function for making the territory of an installation."""
    return lambda name, *excluded: Territory(AnyWriter(api), name, clock, frozenset(excluded))


def holder(fake: FakeApi) -> str:
    return fake.get("leases", MARK)["spec"]["holderIdentity"]


async def test_the_first_installation_serves_a_namespace_and_the_second_does_not(
    fake, installed, caplog
):
    first, second = installed("a/one"), installed("b/two")
    assert await first.serves("ml")
    assert not await second.serves("ml")
    assert await second.serves("other")
    assert "namespace ml is served by another installation of the operator, a/one" in caplog.text


async def test_the_processes_of_one_installation_both_serve(fake, installed):
    assert await installed("a/one").serves("ml")
    assert await installed("a/one").serves("ml")


async def test_a_mark_is_not_read_at_every_look(fake, installed):
    first = installed("a/one")
    assert await first.serves("ml")
    asked = len(fake.log)
    assert await first.serves("ml")
    assert len(fake.log) == asked


async def test_a_mark_that_is_renewed_keeps_the_namespace(fake, installed, clock):
    first, second = installed("a/one"), installed("b/two")
    for _ in range(int(2 * DURATION / RENEW_AFTER)):
        assert await first.serves("ml")
        assert not await second.serves("ml")
        clock.now += RENEW_AFTER
    assert holder(fake) == "a/one"


async def test_a_namespace_that_was_left_is_taken_over(fake, installed, clock):
    first, second = installed("a/one"), installed("b/two")
    assert await first.serves("ml")
    assert not await second.serves("ml")
    clock.now += DURATION + CHECK_AFTER
    assert await second.serves("ml")
    assert holder(fake) == "b/two"
    # The first one was only cut off. It finds out before it acts again.
    assert not await first.serves("ml")


async def test_without_the_right_to_mark_a_namespace_is_served(fake, installed):
    fake.fault("GET", ".*/leases/.*", refusal(403, "Forbidden"))
    assert await installed("a/one").serves("ml")


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_a_namespace_whose_mark_a_webhook_refuses_is_served(fake, installed, status):
    fake.fault("POST", ".*/leases", refusal(status, "Denied"), times=float("inf"))
    first = installed("a/one")
    assert await first.serves("ml")
    before = len(fake.log)
    assert await first.serves("ml")
    assert len(fake.log) == before


async def test_a_namespace_of_another_installation_is_not_served_if_its_mark_cannot_be_read(
    fake, installed, clock
):
    assert await installed("a/one").serves("ml")
    second = installed("b/two")
    assert not await second.serves("ml")
    fake.fault("GET", ".*/leases/.*", refusal(500, "Broken"))
    clock.now += CHECK_AFTER
    assert not await second.serves("ml")


async def test_a_namespace_whose_mark_cannot_be_read_may_be_that_of_another_installation(
    fake, installed, clock
):
    first = installed("a/one")
    fake.fault("GET", ".*/leases/.*", unanswered, times=float("inf"))
    assert await first.serves("ml") is None
    faults, fake.faults = fake.faults, []
    assert await first.serves("ml") is True
    # A mark of its own is enough if it is not too old.
    fake.faults = faults
    clock.now += RENEW_AFTER
    assert await first.serves("ml") is True
    clock.now += DURATION
    assert await first.serves("ml") is None


async def test_looks_at_other_jobs_do_not_wait_for_a_mark_that_hangs(fake, installed, clock):
    fake.fault("GET", ".*/leases/.*", hanging_webhook(seconds=0.3))
    first = installed("a/one")
    claim = asyncio.create_task(first.serves("ml"))
    await until(lambda: fake.log)
    assert await first.serves("ml") is None
    assert await claim
    clock.now += RENEW_AFTER
    assert await first.serves("ml")
    clock.now += RENEW_AFTER
    fake.fault("GET", ".*/leases/.*", hanging_webhook(seconds=0.3))
    asked = len(fake.log)
    renewal = asyncio.create_task(first.serves("ml"))
    await until(lambda: len(fake.log) > asked)
    assert await first.serves("ml") is True
    assert await renewal


# The mark changes between its GET and its PUT or POST


def meanwhile(change):
    """Return an answer of the API server after something else has changed."""

    async def answer(request, proceed):
        change()
        return await proceed()

    return answer


@pytest.fixture
def mark(fake):
    """Return a function for writing the mark of an installation, as another process does."""

    def write(holder):
        metadata, spec = {"name": MARK, "namespace": "ml"}, {"holderIdentity": holder}
        if fake.get("leases", MARK):
            fake.change("leases", MARK, spec={**spec, "renewTime": str(fake.version)})
        else:
            fake.create("leases", {"metadata": metadata, "spec": spec})

    return write


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_conflict_with_a_mark_of_the_same_installation_changes_nothing(
    fake, installed, clock, mark, is_new
):
    first = installed("a/one")
    if not is_new:
        assert await first.serves("ml")
        clock.now += RENEW_AFTER
    fake.fault("PUT|POST", ".*/leases.*", meanwhile(lambda: mark("a/one")))
    assert await first.serves("ml") is True
    assert first.uid_of_mark("ml") == fake.get("leases", MARK)["metadata"]["uid"]


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_conflict_with_a_mark_of_another_installation_ends_the_work(
    fake, installed, clock, mark, is_new
):
    first = installed("a/one")
    if not is_new:
        assert await first.serves("ml")
        clock.now += RENEW_AFTER
    fake.fault("PUT|POST", ".*/leases.*", meanwhile(lambda: mark("b/two")))
    assert await first.serves("ml") is False
    assert "another installation of the operator, b/two" in await first.why_not("ml")


async def test_after_a_conflict_with_a_mark_that_cannot_be_read_the_holder_is_unknown(
    fake, installed, mark
):
    def change():
        mark("b/two")
        fake.fault("GET", ".*/leases/.*", refusal(500, "Broken"))

    fake.fault("POST", ".*/leases", meanwhile(change))
    first = installed("a/one")
    assert await first.serves("ml") is None
    assert await first.serves("ml") is False


async def test_a_mark_without_a_holder_names_no_other_installation(fake, installed, mark):
    mark("")
    first = installed("a/one")
    fake.fault("PUT", ".*/leases/.*", hanging_webhook(seconds=0.3))
    claim = asyncio.create_task(first.serves("ml"))
    await until(lambda: [asked for asked in fake.log if asked.method == "PUT"])
    assert await first.serves("ml") is None
    assert await claim


async def test_a_mark_written_anew_has_its_uid_although_another_look_is_at_it(
    fake, installed, clock
):
    first = installed("a/one")
    assert await first.serves("ml")
    old = first.uid_of_mark("ml")
    clock.now += RENEW_AFTER
    fake.fault("PUT", ".*/leases/.*", hanging_webhook(seconds=0.3))
    asked = len(fake.log)
    renewal = asyncio.create_task(first.serves("ml"))
    await until(lambda: len(fake.log) == asked + 2)
    anew = asyncio.create_task(first.mark_anew("ml"))
    await asyncio.sleep(0)
    # An object made meanwhile gets this owner.
    assert first.uid_of_mark("ml") == old
    await renewal
    fake.remove("leases", MARK)
    await anew
    assert first.uid_of_mark("ml") == fake.get("leases", MARK)["metadata"]["uid"] != old


async def test_a_mark_that_is_gone_and_cannot_be_written_has_no_uid(fake, installed):
    first = installed("a/one")
    assert await first.serves("ml")
    fake.remove("leases", MARK)
    fake.fault("POST", ".*/leases", refusal(422, "Denied"))
    await first.mark_anew("ml")
    # Objects with an owner that does not exist would be removed.
    assert first.uid_of_mark("ml") == ""
    assert await first.serves("ml")


async def test_the_time_of_the_take_over_is_told(fake, installed, clock):
    first, second = installed("a/one"), installed("b/two")
    second.now = lambda: datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
    assert await first.serves("ml")
    assert not await second.serves("ml")
    clock.now += 60
    assert "which is after 2026-11-21T12:02:00Z" in await second.why_not("ml")
    clock.now += DURATION
    assert "which is after 2026-11-21T12:00:00Z" in await second.why_not("ml")


async def test_marks_of_namespaces_without_jobs_are_forgotten(installed):
    first = installed("a/one")
    assert await first.serves("ml")
    assert await first.serves("empty")
    first.forget_others({"ml"})
    assert list(first.marks) == ["ml"]


def test_a_mark_is_checked_more_often_than_it_ends():
    assert CHECK_AFTER < RENEW_AFTER < territory.DURATION / 2


async def test_a_job_of_another_installations_namespace_is_told_so(fake, operator):
    # Whoever may write Leases in the namespace, or restores a backup, can cause this.
    metadata = {"name": MARK, "namespace": "ml"}
    fake.create("leases", {"metadata": metadata, "spec": {"holderIdentity": "gone/operator"}})
    fake.create("ddpjobs", a_job())
    await until(lambda: fake.all("events"))
    (event,) = fake.all("events")
    assert event["reason"] == "NotServed"
    assert "another installation of the operator, gone/operator" in event["message"]
    assert "takes over 180 s after that Lease was last renewed" in event["message"]
    assert (status(fake), fake.all("pods")) == ({}, [])


def events_not_served(fake):
    return [event for event in fake.all("events") if event["reason"] == "NotServed"]


async def test_a_lease_that_another_installation_renews_is_one_obstacle(
    fake, impatient, operator, mark
):
    mark("b/two")
    fake.create("ddpjobs", a_job())
    reads = set()

    def was_renewed_often():
        mark("b/two")
        reads.add(sum(asked.method == "GET" and MARK in asked.path for asked in fake.log))
        return len(reads) > 5

    await until(was_renewed_often)
    assert len(events_not_served(fake)) == 1


async def test_a_job_that_was_served_in_between_is_told_again(
    fake, impatient, operator, options, mark
):
    mark("b/two")
    fake.create("ddpjobs", a_job())
    await until(lambda: len(events_not_served(fake)) == 1)
    mark(f"{options.lease_namespace}/{options.lease_name}")
    await is_running(fake)
    mark("b/two")
    await until(lambda: len(events_not_served(fake)) == 2)


# --- excluded namespaces


async def test_an_excluded_namespace_is_neither_served_nor_marked(fake, installed):
    first = installed("a/one", "ml")
    assert await first.serves("ml") is False
    assert await first.serves("other")
    assert [request.path for request in fake.log if "/ml/" in request.path] == []


async def test_nothing_is_told_while_another_installation_may_begin_to_serve_a_namespace(
    installed, clock
):
    first, second = installed("a/one", "ml"), installed("b/two")
    assert await first.why_not("ml") == ""
    assert await second.serves("ml")
    for _ in range(int(2 * DURATION / RENEW_AFTER)):
        clock.now += RENEW_AFTER
        assert await second.serves("ml")
        assert await first.why_not("ml") == ""


async def test_an_excluded_namespace_that_nobody_serves_is_told_so(installed, clock):
    first = installed("a/one", "ml")
    await first.why_not("ml")
    clock.now += UNSERVED_WITHOUT_MARK
    message = await first.why_not("ml")
    assert "a/one excludes the namespace ml, and no other installation" in message


@pytest.mark.parametrize("holder", ["a/one", "b/two"])
async def test_an_excluded_namespace_that_was_left_is_told_so(installed, clock, holder):
    assert await installed(holder).serves("ml")
    first = installed("a/one", "ml")
    assert await first.why_not("ml") == ""
    clock.now += UNSERVED_AFTER_MARK - 1
    assert await first.why_not("ml") == ""
    clock.now += 1
    assert "no other installation" in await first.why_not("ml")


async def test_the_mark_of_an_excluded_namespace_is_not_read_at_every_look(fake, installed):
    first = installed("a/one", "ml")
    await first.why_not("ml")
    asked = len(fake.log)
    await first.why_not("ml")
    assert len(fake.log) == asked


async def test_nothing_is_told_if_the_mark_of_an_excluded_namespace_cannot_be_read(
    fake, installed, clock
):
    first = installed("a/one", "ml")
    await first.why_not("ml")
    clock.now += UNSERVED_WITHOUT_MARK
    fake.fault("GET", ".*/leases/.*", refusal(500, "Broken"))
    assert await first.why_not("ml") == ""


@pytest.fixture
def impatient(monkeypatch):
    """Let the operator look at unserved jobs, and renew its marks, after a short time."""
    monkeypatch.setattr(reconcile, "CHECK_AFTER", 0.05)
    monkeypatch.setattr(territory, "CHECK_AFTER", 0.05)
    monkeypatch.setattr(territory, "RENEW_AFTER", 0.05)
    monkeypatch.setattr(territory, "UNSERVED_WITHOUT_MARK", 0.05)


@pytest.mark.parametrize("excluded", [frozenset({"ml"})])
async def test_a_job_in_an_excluded_namespace_gets_an_event_and_no_pods(fake, impatient, operator):
    fake.create("ddpjobs", a_job())
    other = a_job("other")
    other["metadata"]["namespace"] = "served"
    fake.create("ddpjobs", other)
    await until(lambda: any(event["reason"] == "NotServed" for event in fake.all("events")))
    await until(lambda: fake.all("pods"))
    (event,) = (event for event in fake.all("events") if event["reason"] == "NotServed")
    assert event["involvedObject"]["name"] == "digits"
    assert "remove this one from excludedNamespaces" in event["message"]
    assert {pod["metadata"]["namespace"] for pod in fake.all("pods")} == {"served"}
    assert (status(fake), fake.get("leases", MARK)) == ({}, None)


# Marks have a clock of their own


async def test_a_mark_is_renewed_without_any_look_at_a_job(fake, impatient, operator):
    job = fake.create("ddpjobs", a_job())
    await until(lambda: fake.all("pods"))
    # A finished job gets no look either.
    fake.change("ddpjobs", "digits", status={"phase": "Complete"}, metadata=job["metadata"])
    versions = set()

    def renewed():
        versions.add(fake.get("leases", MARK)["metadata"]["resourceVersion"])
        return len(versions) >= 4

    await until(renewed)


async def test_a_job_that_needs_no_look_is_told_that_its_namespace_was_taken(
    fake, impatient, operator
):
    fake.create("ddpjobs", a_job())
    await is_running(fake)
    spec = {**fake.get("leases", MARK)["spec"], "holderIdentity": "b/other"}
    fake.change("leases", MARK, spec=spec)
    await until(lambda: any(event["reason"] == "NotServed" for event in fake.all("events")))


async def test_an_odd_mark_does_not_end_the_operator(fake, impatient, operator, caplog):
    async def odd(request, proceed):
        return web.json_response({"kind": "Lease"})

    fake.fault("GET", f".*/leases/{MARK}", odd, times=3)
    fake.create("ddpjobs", a_job())
    await until(lambda: fake.all("pods"))
