"""The requests of the operator: how many are under way, how long they wait, and how they end."""

import asyncio

import pytest
from fake_api import HANGING_WEBHOOK, hanging_webhook
from gang import a_job, until

from ddpjob.controller import slots
from ddpjob.controller import writer as module
from ddpjob.controller.errors import GaveWay, LeaseLost, NotSent, Refused
from ddpjob.controller.lease import Lease
from ddpjob.controller.writer import MAX_CALLS_PER_JOB, Writer, run_all
from ddpjob.kube.api import configuration
from ddpjob.kube.errors import ApiError, Unreachable
from ddpjob.kube.kinds import JOBS, LEASES, PODS
from ddpjob.kube.request import Request, Verb

FORBIDDEN = ApiError(403, "Forbidden", "a policy")
REFUSED = Refused("QuotaExceeded", "no room")
UNREACHABLE = Unreachable("no answer")
LOST = LeaseLost("led too long")

MANY = 5 * MAX_CALLS_PER_JOB


# --- the calls of one job


class Calls:
    """Calls that note when they are made and done; those named in `failing` raise.

    With `together`, the calls from `first_together` on wait until so many of them are under way.
    """

    def __init__(
        self,
        number: int,
        failing: dict[int, BaseException] | None = None,
        together: asyncio.Barrier | None = None,
        first_together: int = 0,
    ) -> None:
        self.number, self.failing = number, failing or {}
        self.together, self.first_together = together, first_together
        self.made = self.done = self.most = 0

    def __iter__(self):
        for number in range(self.number):
            self.made += 1
            self.most = max(self.most, self.made - self.done)
            yield self.call(number)

    async def call(self, number: int) -> None:
        if self.together and number >= self.first_together:
            await self.together.wait()
        self.done += 1
        if error := self.failing.get(number):
            raise error


async def test_so_many_calls_of_a_job_run_at_the_same_time():
    # The first answers let more calls run. From then on all permitted calls wait for each other.
    first = MAX_CALLS_PER_JOB - 1
    calls = Calls(first + MANY, together=asyncio.Barrier(MAX_CALLS_PER_JOB), first_together=first)
    await run_all(calls)
    assert (calls.done, calls.most) == (first + MANY, MAX_CALLS_PER_JOB)


async def test_a_second_call_runs_only_after_the_first_has_ended():
    first_may_end = asyncio.Event()
    begun = []

    async def call(number: int) -> None:
        begun.append(number)
        await first_may_end.wait()

    running = asyncio.create_task(run_all(call(number) for number in range(3)))
    await until(lambda: begun)
    assert begun == [0]
    first_may_end.set()
    await running
    assert begun == [0, 1, 2]


@pytest.mark.parametrize("failing", [{0: FORBIDDEN}, {0: FORBIDDEN, 3: FORBIDDEN}])
async def test_an_error_of_the_api_server_does_not_stop_the_other_calls(failing):
    calls = Calls(MANY, failing)
    with pytest.raises(ApiError):
        await run_all(calls)
    assert calls.done == MANY


@pytest.mark.parametrize("error", [REFUSED, UNREACHABLE, LOST, asyncio.CancelledError()])
async def test_no_call_starts_after_one_that_the_others_would_repeat(error):
    calls = Calls(100 * MANY, {20: error})
    with pytest.raises(type(error)):
        await run_all(calls)
    assert calls.done <= 20 + MAX_CALLS_PER_JOB


@pytest.mark.parametrize(
    ("failing", "raised"),
    [
        ({7: FORBIDDEN, 8: UNREACHABLE}, UNREACHABLE),
        ({7: UNREACHABLE, 8: REFUSED}, REFUSED),
        ({7: REFUSED, 8: UNREACHABLE}, REFUSED),
        ({7: REFUSED, 8: LOST}, LOST),
    ],
)
async def test_the_most_important_error_is_raised(failing, raised):
    together = asyncio.Barrier(MAX_CALLS_PER_JOB)
    calls = Calls(2 * MAX_CALLS_PER_JOB - 1, failing, together, MAX_CALLS_PER_JOB - 1)
    with pytest.raises(type(raised)) as caught:
        await run_all(calls)
    assert caught.value is raised


async def test_a_pod_that_cannot_be_rendered_leaves_no_call_behind():
    done = []

    async def call(number: int) -> None:
        done.append(number)

    def calls():
        yield call(0)
        yield call(1)
        raise ValueError("cannot render the third")

    with pytest.raises(ValueError, match="the third"):
        await run_all(calls())
    assert sorted(done) == [0, 1]


async def test_cancelling_the_run_cancels_its_calls(background):
    begun, ended = [], []

    async def call() -> None:
        begun.append(True)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    running = background(run_all(call() for _ in range(3)))
    await until(lambda: begun)
    running.cancel()
    await asyncio.wait([running])
    assert ended == begun == [True]


# --- requests


# The longest timeoutSeconds of an admission webhook.
LONGEST_WEBHOOK = 30


@pytest.fixture
def a_writer(api):
    """Return a function for making a Writer with a Lease, with the constants as set by then."""

    async def make():
        lease = Lease(api, "ml", "op", "first", lambda: 0.0)
        await lease.acquire()
        return Writer(api, lease)

    return make


def create_pod(writer, name, namespace="bad"):
    body = {"metadata": {"name": name}}
    return writer.write(Request(Verb.CREATE, PODS, namespace, body=body))


def write_status(fake, writer):
    job = fake.get("ddpjobs", "digits") or fake.create("ddpjobs", a_job())
    body = {"metadata": {"uid": job["metadata"]["uid"]}, "status": {"phase": "Pending"}}
    return writer.write(Request(Verb.UPDATE, JOBS, "ml", "digits", "status", body=body))


async def test_a_create_waits_for_the_words_of_the_webhook(fake, a_writer, monkeypatch):
    monkeypatch.setattr(module, "SHORTEST_TIMEOUT", 0.1)
    monkeypatch.setattr(module, "LONGEST_TIMEOUT", 0.1)
    fake.fault("POST", ".*/pods", hanging_webhook(seconds=1))
    with pytest.raises(ApiError) as caught:
        await create_pod(await a_writer(), "a")
    assert caught.value.message == HANGING_WEBHOOK
    assert module.CREATE_TIMEOUT > LONGEST_WEBHOOK


async def test_a_status_without_an_answer_is_given_up_before_another_operator_may_lead(
    fake, a_writer, monkeypatch
):
    monkeypatch.setattr(module, "SHORTEST_TIMEOUT", 0.1)
    monkeypatch.setattr(module, "LONGEST_TIMEOUT", 0.1)
    fake.fault("PUT", ".*/status", hanging_webhook())
    with pytest.raises(Unreachable):
        await write_status(fake, await a_writer())


async def test_creates_that_hang_delay_no_status(fake, a_writer, background, monkeypatch):
    monkeypatch.setattr(slots, "SHORTEST_LOAD", 600)
    monkeypatch.setattr(slots, "LONGEST_LOAD", 600)
    fake.fault("POST", ".*/pods", hanging_webhook(), times=float("inf"))
    writer = await a_writer()
    for number in range(2 * module.MAX_LOADING):
        background(create_pod(writer, f"bad-{number}"))
    await until(lambda: len(fake.writes(".*/pods")) == module.MAX_LOADING)
    await asyncio.wait_for(write_status(fake, writer), 5)
    assert len(fake.writes(".*/pods")) == module.MAX_LOADING


async def test_creates_that_hang_delay_a_create_of_another_job_only_shortly(
    fake, a_writer, background, monkeypatch
):
    monkeypatch.setattr(slots, "LONGEST_LOAD", 0.1)
    monkeypatch.setattr(slots, "HANG_SECONDS", 1)
    fake.fault("POST", ".*/namespaces/bad/pods", hanging_webhook(), times=float("inf"))
    writer = await a_writer()
    for number in range(module.MAX_CREATES + module.MAX_LOADING):
        background(create_pod(writer, f"bad-{number}"))
    await asyncio.wait_for(create_pod(writer, "good", "ml"), 8)


async def test_creates_that_hang_in_one_namespace_are_limited_and_give_a_reason(
    fake, a_writer, background, monkeypatch
):
    monkeypatch.setattr(slots, "HANGS_AFTER", 0.1)
    monkeypatch.setattr(slots, "LONGEST_LOAD", 0.05)
    fake.fault("POST", ".*/namespaces/bad/pods", hanging_webhook(), times=float("inf"))
    writer = await a_writer()
    creates = [background(create_pod(writer, f"bad-{n}", "bad")) for n in range(100)]
    await until(lambda: sum(create.done() for create in creates) > 50)
    ended = [create.exception() for create in creates if create.done()]
    assert all(isinstance(error, GaveWay) for error in ended)
    # On a slow machine some were sent, and gave way to others later.
    not_sent = [error for error in ended if isinstance(error, NotSent)]
    assert len(not_sent) > len(ended) / 2
    assert "so this one was not sent" in str(not_sent[0])
    assert len(fake.writes(".*/namespaces/bad/pods")) < module.MAX_CREATES
    await asyncio.wait_for(create_pod(writer, "good", "ml"), 2)


async def test_statuses_that_hang_do_not_refuse_the_mark_of_their_namespace(
    fake, a_writer, background, monkeypatch
):
    monkeypatch.setattr(slots, "HANGS_AFTER", 0.1)
    monkeypatch.setattr(module, "SHORTEST_TIMEOUT", 0.5)
    monkeypatch.setattr(module, "LONGEST_TIMEOUT", 1.0)
    fake.fault("PUT", ".*/status", hanging_webhook(), times=float("inf"))
    writer = await a_writer()
    statuses = [Request(Verb.UPDATE, JOBS, "ml", str(n), "status", body={}) for n in range(50)]
    puts = [background(writer.write(request)) for request in statuses]
    await until(lambda: sum(put.done() for put in puts) > 20)
    lease = {"metadata": {"name": "ddpjob-installation"}, "spec": {}}
    mark = Request(Verb.CREATE, LEASES, "ml", body=lease)
    await asyncio.wait_for(writer.write(mark), 2)


async def test_a_create_that_hangs_beyond_the_share_can_be_retried(
    fake, a_writer, background, monkeypatch
):
    monkeypatch.setattr(module, "MAX_LOADING", 1)
    monkeypatch.setattr(module, "MAX_CREATES", 3)
    monkeypatch.setattr(module, "MAX_HANGING_CREATES", 2)
    monkeypatch.setattr(slots, "LONGEST_LOAD", 0.05)
    monkeypatch.setattr(slots, "HANGS_AFTER", 0.2)
    fake.fault("POST", ".*/pods", hanging_webhook(), times=float("inf"))
    writer = await a_writer()
    creates = [background(create_pod(writer, f"bad-{n}", f"ns-{n}")) for n in range(4)]
    with pytest.raises(Unreachable, match="newer requests wait"):
        await asyncio.wait_for(creates[2], 5)
    await until(lambda: len(fake.writes(".*/pods")) == 4)
    assert not any(creates[n].done() for n in (0, 1, 3))


async def test_the_pool_has_connections_left_for_the_lease_and_the_lists(kubeconfig):
    pool = (await configuration(kubeconfig)).connection_pool_maxsize
    writes = module.MAX_CREATES + module.MAX_DELETES + module.MAX_OTHER_WRITES
    assert pool - writes - module.MAX_READS >= 5
