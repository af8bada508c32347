"""A job with creates hanging in an admission webhook harms no other job, and its status says why.

The bad jobs are in namespaces of the webhook, and the healthy job is in another. The times are
shorter than in production. No test waits until the webhook gives up, except for its words.
"""

import asyncio
from collections import Counter
from dataclasses import fields

import pytest
from fake_api import HANGING_WEBHOOK, hanging_webhook
from gang import a_job, is_running, until

from ddpjob.controller import act, reconcile, slots, workqueue, writer
from ddpjob.controller.errors import NotSent
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.reconcile import Reconciler
from ddpjob.controller.workqueue import WorkQueue
from ddpjob.kube.errors import Unreachable

# Seconds in which a healthy job must run, on a busy machine.
SOON = 100
# A hanging request takes longer.
HANGING = 2 * SOON

BAD_PODS = "/api/v1/namespaces/bad/pods"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Scale the times down, except for those of hanging requests."""
    for name in ("CREATE_TIMEOUT", "SHORTEST_TIMEOUT", "LONGEST_TIMEOUT"):
        monkeypatch.setattr(writer, name, HANGING)
    monkeypatch.setattr(slots, "LONGEST_LOAD", 0.1)
    monkeypatch.setattr(slots, "HANG_SECONDS", 1)
    monkeypatch.setattr(act, "FIRST_RETRY", 0.2)
    monkeypatch.setattr(workqueue, "FIRST_RETRY", 0.05)


@pytest.fixture
def webhook_hangs(fake):
    fake.fault("POST", BAD_PODS, hanging_webhook(), times=float("inf"))


def a_bad_job(fake, name="bad", nodes=200, namespace="bad"):
    job = a_job(name, nodes)
    job["metadata"]["namespace"] = namespace
    return fake.create("ddpjobs", job)


def bad_status(fake, name="bad"):
    return fake.get("ddpjobs", name, "bad").get("status", {})


async def runs_soon(fake):
    """Create a healthy job, and wait until its status reports running pods."""
    async with asyncio.timeout(SOON):
        fake.create("ddpjobs", a_job())
        await is_running(fake)


async def test_a_job_of_200_nodes_that_hangs_delays_no_other_job(fake, webhook_hangs, operator):
    a_bad_job(fake)
    await until(lambda: fake.writes(BAD_PODS))
    await runs_soon(fake)


async def test_a_job_that_begins_to_hang_in_its_middle_delays_no_other_job(fake, operator):
    a_bad_job(fake)
    await until(lambda: len(fake.writes(BAD_PODS)) > 100)
    fake.fault("POST", BAD_PODS, hanging_webhook(), times=float("inf"))
    await runs_soon(fake)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", ".*/namespaces/bad-.*/pods"), ("PUT", ".*/namespaces/bad-.*/status")],
    ids=["creates", "statuses"],
)
async def test_a_webhook_that_hangs_in_many_namespaces_delays_no_other_job(
    fake, operator, monkeypatch, method, path
):
    # In none of them alone are there more requests than may hang.
    monkeypatch.setattr(slots, "HANG_SECONDS", 5)
    monkeypatch.setattr(slots, "HANGS_AFTER", 0.5)
    fake.fault(method, path, hanging_webhook(), times=float("inf"))
    for number in range(200):
        a_bad_job(fake, f"bad-{number}", nodes=4, namespace=f"bad-{number % 20}")
    await until(lambda: len(fake.writes(path)) >= writer.MAX_HANGING)
    await runs_soon(fake)


async def test_more_jobs_of_one_namespace_than_may_hang_are_refused_and_delay_no_other_job(
    fake, webhook_hangs, operator, monkeypatch
):
    monkeypatch.setattr(slots, "HANGS_AFTER", 0)
    names = [f"bad-{number}" for number in range(2 * writer.MAX_CREATES)]
    for name in names:
        a_bad_job(fake, name, nodes=4)
    await until(lambda: "NoAnswer" in {bad_status(fake, name).get("reason") for name in names})
    assert len(fake.writes(BAD_PODS)) < writer.MAX_CREATES
    await runs_soon(fake)


async def test_a_create_that_was_not_sent_is_tried_again_after_the_same_time(
    fake, webhook_hangs, operator, monkeypatch
):
    monkeypatch.setattr(slots, "HANGS_AFTER", 0.1)
    monkeypatch.setattr(reconcile, "GAVE_WAY_INTERVAL", 0.3)
    names = [f"bad-{number}" for number in range(2 * writer.MAX_HANGING_CREATES)]
    for name in names:
        a_bad_job(fake, name, nodes=1)
    refused = lambda: [name for name in names if bad_status(fake, name).get("reason") == "NoAnswer"]  # noqa: E731
    await until(refused)
    # Meanwhile the delay of a refusal, doubled each time from 0.2 s on, would be 12.8 s.
    await asyncio.sleep(3)
    fake.faults.clear()
    async with asyncio.timeout(SOON):
        await until(lambda: len(fake.writes(BAD_PODS)) >= len(names))


async def test_a_healthy_job_is_restarted_while_others_hang(fake, webhook_hangs, operator):
    await runs_soon(fake)
    for number in range(writer.MAX_HANGING_CREATES):
        a_bad_job(fake, f"bad-{number}")
    await until(lambda: len(fake.writes(BAD_PODS)) >= writer.MAX_HANGING_CREATES)
    async with asyncio.timeout(SOON):
        fake.remove("pods", "digits-0-0")
        fake.remove("pods", "digits-0-1")
        await is_running(fake, attempt=1)


@pytest.mark.parametrize(
    "requests",
    [("PUT", ".*/namespaces/bad/ddpjobs/.*/status"), ("POST|PUT|DELETE", ".*/namespaces/bad/.*")],
    ids=["statuses", "all-writes"],
)
async def test_jobs_whose_other_writes_hang_delay_no_other_job(fake, operator, requests):
    fake.fault(*requests, hanging_webhook(), times=float("inf"))
    for number in range(100):
        a_bad_job(fake, f"bad-{number}")
    await until(lambda: any("/namespaces/bad/" in asked.path for asked in fake.log))
    await runs_soon(fake)


async def test_jobs_whose_deletions_hang_delay_no_other_job(fake, operator):
    for number in range(30):
        a_bad_job(fake, f"bad-{number}", nodes=1)
    await runs_soon(fake)
    await until(lambda: len(fake.writes(BAD_PODS)) == 30)
    fake.fault("DELETE", f"{BAD_PODS}/.*", hanging_webhook(), times=float("inf"))
    for job in fake.all("ddpjobs"):
        if job["metadata"]["namespace"] == "bad":
            spec = {**job["spec"], "suspend": True}
            fake.change("ddpjobs", job["metadata"]["name"], "bad", spec=spec)
    await until(lambda: len(fake.writes(f"{BAD_PODS}/.*")) >= writer.MAX_DELETES)
    async with asyncio.timeout(SOON):
        fake.remove("pods", "digits-0-0")
        await until(lambda: fake.writes("/api/v1/namespaces/ml/pods/digits-0-1"))


async def test_the_words_of_a_webhook_that_hangs_reach_the_status(fake, operator, monkeypatch):
    # Every other request must be answered much sooner.
    monkeypatch.setattr(writer, "SHORTEST_TIMEOUT", 0.5)
    monkeypatch.setattr(writer, "LONGEST_TIMEOUT", 0.5)
    fake.fault("POST", BAD_PODS, hanging_webhook(seconds=1.5), times=float("inf"))
    a_bad_job(fake)
    await until(lambda: bad_status(fake).get("reason") == "Forbidden", seconds=SOON)
    assert HANGING_WEBHOOK in bad_status(fake)["message"]


async def test_few_creates_of_a_job_hang_at_the_same_time(fake, operator):
    fake.fault("POST", BAD_PODS, hanging_webhook(seconds=0.5), times=3)
    a_bad_job(fake)
    await until(lambda: HANGING_WEBHOOK in bad_status(fake).get("message", ""))
    assert len(fake.writes(BAD_PODS)) == 1


# --- the workers


class Jobs(Reconciler):
    """A Reconciler with looks at the key `bad` that hang until the test ends."""

    looks: Counter
    hang: asyncio.Event

    async def look_at(self, key):
        self.looks[key] += 1
        if key[1] == "bad":
            await self.hang.wait()
            raise Unreachable("no answer")


@pytest.fixture
async def jobs(api):
    """Return a Reconciler with two workers."""
    queue = WorkQueue(asyncio.get_running_loop().time)
    # `look_at` is replaced, so the other parts are not used.
    parts = dict.fromkeys(part.name for part in fields(Reconciler))
    parts |= {"api": api, "queue": queue, "metrics": Metrics(None, queue), "gave_way": set()}
    made = Jobs(**parts)
    made.looks, made.hang = Counter(), asyncio.Event()
    workers = [asyncio.create_task(made.work()) for _ in range(2)]
    yield made
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


async def test_a_worker_whose_job_hangs_lets_the_next_job_begin(jobs):
    jobs.queue.add(("ml", "bad"))
    jobs.queue.add(("ml", "good"))
    await until(lambda: jobs.looks["ml", "good"])


async def test_a_job_that_hangs_is_never_reconciled_twice_at_once(jobs):
    jobs.queue.add(("ml", "bad"))
    await until(lambda: jobs.looks["ml", "bad"])
    jobs.queue.add(("ml", "bad"))
    jobs.queue.add(("ml", "good"), after=0.1)
    await until(lambda: jobs.looks["ml", "good"])
    assert jobs.looks["ml", "bad"] == 1
    jobs.hang.set()
    await until(lambda: jobs.looks["ml", "bad"] > 1)


async def test_a_request_that_was_not_sent_does_not_count_as_a_failure(jobs, monkeypatch):
    monkeypatch.setattr(reconcile, "GAVE_WAY_INTERVAL", 0.05)
    looks = []

    async def look_at(key):
        looks.append(key)
        if len(looks) < 6:
            raise NotSent("others hang")

    jobs.look_at = look_at
    jobs.queue.add(("ml", "one"))
    # With a delay growing from 0.05 s, the sixth look would come after 1.5 s.
    async with asyncio.timeout(1):
        await until(lambda: len(looks) == 6)


async def test_jobs_of_which_requests_are_not_sent_do_not_use_up_the_cpu(jobs, monkeypatch):
    monkeypatch.setattr(reconcile, "GAVE_WAY_INTERVAL", 0.01)
    monkeypatch.setattr(reconcile, "GAVE_WAY_RATE", 2)
    looks = Counter()

    async def look_at(key):
        looks[key] += 1
        raise NotSent("others hang")

    jobs.look_at = look_at
    for number in range(100):
        jobs.queue.add(("ml", f"bad-{number}"))
    await until(lambda: len(looks) == 100)
    # The first keys were tried again while few waited, and the last one waits for 50 s.
    again = looks.copy()
    jobs.queue.add(("ml", "good"))
    await until(lambda: looks["ml", "good"])
    assert again["ml", "bad-99"] == looks["ml", "bad-99"] == 1
