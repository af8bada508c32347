"""The periodic LIST: page by page, in the order of the namespaces, and never back in time."""

import asyncio
import time
from pathlib import Path

import pytest
from fake_api import refusal
from gang import a_job

from ddpjob.controller import lister
from ddpjob.controller.cache import Cache
from ddpjob.controller.errors import CannotRun, MoreIsReadable
from ddpjob.controller.lister import Lister
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.core.api import names
from ddpjob.kube import api as client
from ddpjob.kube.errors import ApiError
from ddpjob.kube.kinds import JOBS, NODES, PODS, WATCHED

PODS_PATH = "/api/v1/pods"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def a_lister(api):
    """Return a function for making a Lister for some namespaces, or for all."""

    def make(*namespaces):
        queue = WorkQueue(time.monotonic)
        found = Lister(api, Cache(), queue, lambda: None, namespaces)
        for kind in WATCHED:
            found.note_event(kind, is_listed=False)
        return found

    return make


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAGE", 1)
    monkeypatch.setattr(client, "LONGEST_PAGE", 1)


def create_in(fake, namespace):
    """Create a job and one pod of it in a namespace."""
    job = a_job()
    job["metadata"] |= {"namespace": namespace}
    made = fake.create("ddpjobs", job)
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "controller": True,
        "name": "digits",
        "uid": made["metadata"]["uid"],
    }
    labels = {names.LABEL_JOB: "digits", names.LABEL_ATTEMPT: "0", names.LABEL_INDEX: "0"}
    metadata = {"name": "digits-0-0", "namespace": namespace, "ownerReferences": [owner]}
    fake.create("pods", {"metadata": {**metadata, "labels": labels}, "spec": {}, "status": {}})


# In the order of etcd's keys, `ml-dev/` comes before `ml/`.
@pytest.mark.parametrize("namespaces", [("a", "b", "c"), ("ml-dev", "ml", "ops")])
async def test_a_namespace_is_served_once_the_list_has_passed_it(
    fake, a_lister, small_pages, namespaces
):
    for namespace in namespaces:
        create_in(fake, namespace)
    arrived, proceed_now = asyncio.Event(), asyncio.Event()

    async def hold(request, proceed):
        if request.query.get("continue") == "2":
            arrived.set()
            await proceed_now.wait()
        return await proceed()

    fake.fault("GET", PODS_PATH, hold, times=float("inf"))
    found = a_lister()
    listing = asyncio.create_task(found.list_once())
    await asyncio.wait_for(arrived.wait(), 10)
    assert [found.knows_pods_of(namespace) for namespace in namespaces] == [
        True,
        False,
        False,
    ]
    assert await asyncio.wait_for(found.queue.get(), 10) == (namespaces[0], "digits")
    assert not found.synced
    proceed_now.set()
    await asyncio.wait_for(listing, 10)
    assert found.synced
    assert found.knows_pods_of(namespaces[2])


async def test_a_watched_namespace_that_cannot_be_read_stops_no_other_one(
    fake, a_lister, monkeypatch, caplog
):
    monkeypatch.setattr(lister, "PAGE_TRIES", 2)
    monkeypatch.setattr(client, "FIRST_PAGE_RETRY", 0)
    # Each of two LISTs sends one request at first, and two more after the other namespaces.
    fake.fault("GET", ".*/broken/ddpjobs", refusal(500, "InternalError", "damaged"), times=6)
    create_in(fake, "ml")
    found = a_lister("broken", "ml")
    await found.list_once()
    # The readable namespace is listed before the other one is tried again.
    paths = [asked.path for asked in fake.log if asked.path.endswith("/ddpjobs")]
    assert [path.split("/")[-2] for path in paths] == ["broken", "ml", "broken", "broken"]
    assert found.synced
    assert (found.readable, found.knows_pods_of("broken")) == (["ml"], False)
    assert await asyncio.wait_for(found.queue.get(), 10) == ("ml", "digits")
    await found.list_once()
    assert caplog.text.count("cannot read namespace broken: 500 InternalError: damaged") == 1
    await found.list_once()
    assert found.readable == ["broken", "ml"]


async def test_every_try_of_a_page_is_a_turn(fake, a_lister, monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAGE_RETRY", 0)
    found = a_lister()
    turns = []

    async def fail(request, proceed):
        turns.append(found.last_request)
        return await refusal(500, "InternalError")(request, proceed)

    fake.fault("GET", f"/{JOBS.api}/ddpjobs", fail, times=2)
    await found.list_once()
    assert len(set(turns)) == 2


async def test_every_page_is_a_turn(fake, a_lister, small_pages):
    for number in range(3):
        fake.create("ddpjobs", a_job(f"job-{number}"))
    found = a_lister()
    turns = []

    async def note(request, proceed):
        turns.append(found.last_request)
        return await proceed()

    fake.fault("GET", f"/{JOBS.api}/ddpjobs", note, times=float("inf"))
    await found.list_once()
    assert len(set(turns)) == 3


async def test_a_replica_that_lags_behind_for_a_moment_ends_nothing(fake, a_lister):
    found = a_lister()
    old = fake.snapshot()
    fake.create("ddpjobs", a_job())
    await found.list_once()
    fake.stale_list = old
    await found.list_once()
    assert found.cache.job(("ml", "digits"))
    assert found.versions[JOBS, None] > old[0]


# With 0, a turn without a gap reads only one object.
@pytest.mark.parametrize("few", [0, client.FIRST_PAGE])
async def test_an_etcd_that_was_restored_ends_the_operator_with_a_sentence(
    fake, a_lister, monkeypatch, few
):
    monkeypatch.setattr(lister, "LONGEST_LAG", 0)
    monkeypatch.setattr(lister, "FIRST_PAGE", few)
    found = a_lister()
    old = fake.snapshot()
    fake.create("ddpjobs", a_job())
    await found.take_turn()
    fake.stale_list = old
    with pytest.raises(CannotRun, match="as after etcd was restored from a backup"):
        await found.take_turn()


async def test_nodes_are_read_with_rights_in_all_namespaces(fake, a_lister):
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    fake.create("nodes", {"metadata": {"name": "node-1"}, "spec": {}, "status": status})
    found = a_lister()
    await found.list_once()
    assert found.reads_nodes
    assert list(found.cache.nodes.by_name) == ["node-1"]


async def test_without_the_right_to_read_nodes_the_rest_works_and_the_log_says_what_does_not(
    fake, a_lister, caplog
):
    fake.fault("GET", f"/{NODES.api}/nodes", refusal(403, "Forbidden", "no"), times=2)
    create_in(fake, "ml")
    found = a_lister()
    await found.list_once()
    await found.list_once()
    assert found.reads_nodes is False
    assert found.knows_pods_of("ml")
    assert caplog.text.count("cannot read Kubernetes nodes") == 1


async def test_with_roles_only_nodes_are_not_asked_for(fake, a_lister):
    found = a_lister("ml")
    await found.list_once()
    assert found.reads_nodes is False
    assert fake.reads(f"/{NODES.api}/nodes") == []


# A turn without a gap


def lists(fake):
    """Return the limits of the LISTs so far, by their plurals."""
    return [(asked.path.rpartition("/")[2], asked.limit) for asked in fake.log if asked.limit]


@pytest.fixture
def many(monkeypatch):
    """Let a single object count as too many for a LIST of all in each turn."""
    monkeypatch.setattr(lister, "FIRST_PAGE", 0)


async def test_a_turn_without_a_gap_reads_one_object_of_a_kind_with_many(fake, a_lister):
    for number in range(2 * client.FIRST_PAGE):
        fake.create("ddpjobs", a_job(f"job-{number}"))
    found = a_lister()
    await found.take_turn()
    assert (found.synced, len(found.queue)) == (True, 2 * client.FIRST_PAGE)
    before = len(lists(fake))
    await found.take_turn()
    few = client.FIRST_PAGE
    assert sorted(lists(fake)[before:]) == [("ddpjobs", 1), ("nodes", few), ("pods", few)]


async def lister_of_two_jobs(fake, a_lister):
    """Return a lister after its first turn, with the jobs `one` and `two`."""
    for name in ("one", "two"):
        fake.create("ddpjobs", a_job(name))
    found = a_lister()
    await found.take_turn()
    return found


async def test_after_a_gap_a_turn_finds_what_has_gone(fake, a_lister, many):
    found = await lister_of_two_jobs(fake, a_lister)
    fake.remove("ddpjobs", "one")
    await found.take_turn()
    assert found.cache.job(("ml", "one"))
    found.note_gap()
    await found.take_turn()
    assert not found.cache.job(("ml", "one"))
    assert found.cache.job(("ml", "two"))


async def test_a_turn_finds_which_of_few_objects_have_gone(fake, a_lister):
    # kopf tells nothing of an empty LIST, as after a gap with the loss of all objects.
    fake.create("ddpjobs", a_job("one"))
    found = a_lister()
    await found.take_turn()
    await asyncio.wait_for(found.queue.get(), 10)
    fake.remove("ddpjobs", "one")
    fake.create("ddpjobs", a_job("two"))
    await found.take_turn()
    assert not found.cache.job(("ml", "one"))
    # Every job gets a look.
    assert await asyncio.wait_for(found.queue.get(), 10) == ("ml", "two")


async def test_a_turn_finds_that_all_of_many_objects_have_gone(fake, a_lister, many):
    """A version alone would not show it, and kopf tells nothing of an empty LIST."""
    found = await lister_of_two_jobs(fake, a_lister)
    fake.remove("ddpjobs", "one")
    fake.remove("ddpjobs", "two")
    await found.take_turn()
    await found.take_turn()
    assert not found.cache.jobs.objects


async def test_a_list_that_fails_is_made_again_at_the_next_turn(fake, a_lister, many, monkeypatch):
    monkeypatch.setattr(lister, "PAGE_TRIES", 1)
    found = await lister_of_two_jobs(fake, a_lister)
    fake.remove("ddpjobs", "one")
    found.note_gap()
    fake.fault("GET", f"/{JOBS.api}/ddpjobs", refusal(500, "InternalError"), times=float("inf"))
    with pytest.raises(ApiError):
        await found.take_turn()
    fake.faults.clear()
    await found.take_turn()
    assert not found.cache.job(("ml", "one"))


async def test_nodes_that_can_be_read_later_are_watched_by_the_next_start(fake, a_lister):
    fake.fault("GET", f"/{NODES.api}/nodes", refusal(403, "Forbidden", "no"))
    found = a_lister()
    await found.take_turn()
    with pytest.raises(MoreIsReadable, match="nodes can be read now"):
        await found.take_turn()


async def test_everything_is_listed_once_an_hour(fake, a_lister, many, monkeypatch):
    found = await lister_of_two_jobs(fake, a_lister)
    fake.remove("ddpjobs", "one")
    monkeypatch.setattr(lister, "COMPLETE_INTERVAL", 0)
    await found.take_turn()
    assert not found.cache.job(("ml", "one"))


async def test_a_watched_namespace_that_can_be_read_again_is_listed(fake, a_lister):
    create_in(fake, "ml")
    create_in(fake, "other")
    found = a_lister("ml", "other")
    fake.fault("GET", ".*/other/ddpjobs", refusal(403, "Forbidden", "no"))
    await found.take_turn()
    assert (found.readable, found.cache.job(("other", "digits"))) == (["ml"], None)
    await found.take_turn()
    assert (found.readable, found.knows_pods_of("other")) == (["ml", "other"], True)
    assert found.cache.job(("other", "digits"))


async def test_a_turn_forgets_removals_of_which_no_answer_can_arrive_any_more(fake, a_lister):
    found = a_lister()
    body = fake.create("ddpjobs", a_job())
    await found.take_turn()
    found.cache.jobs.forget(body)
    for number in range(2):
        fake.create("ddpjobs", a_job(f"job-{number}"))
        await found.take_turn()
    assert found.cache.jobs.gone == {}


@pytest.mark.parametrize("heard", [(), (PODS,)])
async def test_everything_is_listed_until_the_watches_have_begun(fake, api, many, heard):
    for name in ("one", "two"):
        fake.create("ddpjobs", a_job(name))
    found = Lister(api, Cache(), WorkQueue(time.monotonic), lambda: None)
    await found.take_turn()
    for kind in heard:
        found.note_event(kind, is_listed=False)
    fake.remove("ddpjobs", "one")
    await found.take_turn()
    assert not found.cache.job(("ml", "one"))


async def test_everything_is_listed_once_more_after_kopf_has_listed(fake, a_lister, many):
    found = await lister_of_two_jobs(fake, a_lister)
    fake.remove("ddpjobs", "one")
    found.note_event(JOBS, is_listed=True)
    await found.take_turn()
    assert not found.cache.job(("ml", "one"))


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("developers/evidence.md", "one object of each kind with more than {number},"),
        ("decisions/0002-kopf-only-watches.md", "Of a kind with at most {number} objects the"),
    ],
)
def test_the_number_of_objects_that_are_all_listed_each_minute_is_told(page, sentence):
    words = (DOCS / page).read_text().split()
    assert sentence.format(number=client.FIRST_PAGE) in " ".join(words)
