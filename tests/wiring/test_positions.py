"""The positions in queues, as shown by `ddpjob list` and `status`, and the requests to Kueue."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest
from aiohttp import web
from fake_api import Answer, FakeApi, Proceed, refusal

from ddpjob import DDPJob
from ddpjob.cli.commands.list import list_jobs
from ddpjob.cli.commands.status import show_status
from ddpjob.client import AsyncClient, positions
from ddpjob.client.positions import Positions
from ddpjob.core.api.kueue import workload_name

PENDING = r"/apis/visibility\.kueue\.x-k8s\.io/v1beta2/namespaces/.*/pendingworkloads"
ALWAYS = float("inf")


def a_waiting_job(fake: FakeApi, name: str, queue: str = "team") -> str:
    """Create a job waiting for room. Return the name of its Workload."""
    labels = {"kueue.x-k8s.io/queue-name": queue}
    conditions = [{"type": "Suspended", "status": "True", "reason": "Queued"}]
    operator = {"place": {"number": 2}}
    status = {"phase": "Pending", "reason": "Queued", "conditions": conditions}
    body = DDPJob.create(name, image="i", args=["train.py"]).manifest()
    body["metadata"]["labels"] = labels
    made = fake.create("ddpjobs", {**body, "status": {**status, "operator": operator}})
    return workload_name(name, made["metadata"]["uid"], 2)


async def at_once() -> None:
    """Let an answer come without a wait."""


class Kueue:
    """The visibility API. Its queues have the names of Workloads, in the order of the queue."""

    def __init__(self, fake: FakeApi) -> None:
        self.queues: dict[str, list[str]] = {}
        self.queries: list[dict[str, str]] = []
        # Awaited before each answer.
        self.before: Callable[[], Awaitable[object]] = at_once
        fake.fault("GET", PENDING, self._answer, ALWAYS)

    async def _answer(self, request: web.Request, _: Proceed) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        await self.before()
        *_, namespace, _, queue, _ = request.path.split("/")
        start, limit = (int(request.query[key]) for key in ("offset", "limit"))
        waiting = list(enumerate(self.queues.get(queue, ())))[start : start + limit]
        return web.json_response({"items": [_item(namespace, *one) for one in waiting]})


def _item(namespace: str, position: int, name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace},
        "positionInLocalQueue": position,
        "positionInClusterQueue": position + 10,
    }


def others(number: int) -> Iterable[str]:
    return (f"other-{place}" for place in range(number))


@pytest.fixture
async def client(fake: FakeApi, kubeconfig: Any) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(kubeconfig=kubeconfig, namespace="ml") as client:
        yield client


@pytest.fixture(autouse=True)
def enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Kueue more time than a busy machine needs."""
    monkeypatch.setattr(positions, "TIME_LIMIT", 30.0)


Capture = pytest.CaptureFixture[str]


async def listed(client: AsyncClient, capsys: Capture, form: str = "table") -> str:
    await list_jobs(client, all_namespaces=False, form=form, watch=False)
    return capsys.readouterr().out


async def test_a_list_and_a_status_show_the_position_of_a_job_that_waits(
    fake: FakeApi, client: AsyncClient, capsys: Capture
) -> None:
    Kueue(fake).queues["team"] = [*others(2), a_waiting_job(fake, "digits")]
    header, row = (await listed(client, capsys)).splitlines()
    assert header.endswith("QUEUE")
    assert row.endswith("team (3rd)")
    await show_status(client, "digits", "table", watch=False)
    shown = capsys.readouterr().out
    assert "Queue       team, position 3 in the LocalQueue and 13 in its ClusterQueue\n" in shown


async def test_kueue_is_not_asked_if_no_job_waits(
    fake: FakeApi, client: AsyncClient, capsys: Capture
) -> None:
    a_waiting_job(fake, "runs")
    a_waiting_job(fake, "is-suspended")
    a_waiting_job(fake, "has-no-queue")
    fake.change(
        "ddpjobs", "runs", status={"phase": "Running", "operator": {"place": {"number": 2}}}
    )
    fake.change("ddpjobs", "is-suspended", spec={}, status={"phase": "Suspended"})
    fake.change("ddpjobs", "has-no-queue", metadata={"labels": {}})
    await listed(client, capsys)
    await show_status(client, "runs", "table", watch=False)
    assert not fake.reads(PENDING)


@pytest.mark.parametrize("form", ["json", "yaml", "name"])
async def test_kueue_is_not_asked_for_the_output_of_programs(
    fake: FakeApi, client: AsyncClient, capsys: Capture, form: str
) -> None:
    a_waiting_job(fake, "digits")
    assert "digits" in await listed(client, capsys, form)
    assert not fake.reads(PENDING)


async def never(request: web.Request, proceed: Proceed) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("an event that is never set")


def a_body(text: str) -> Answer:
    async def answer(_: web.Request, __: Proceed) -> web.StreamResponse:
        return web.Response(text=text)

    return answer


NONSENSE = '{"items": [7, {"metadata": 3}, {"metadata": {"name": "a", "namespace": "ml"}}]}'


@pytest.mark.parametrize(
    "answer",
    [
        refusal(403, "Forbidden"),
        refusal(404, "NotFound", "the server could not find the requested resource"),
        refusal(503, "ServiceUnavailable"),
        a_body("<html>a proxy's page</html>"),
        a_body('{"items": 5}'),
        a_body(NONSENSE),
    ],
    ids=["forbidden", "missing", "down", "a page of a proxy", "no list", "nonsense"],
)
async def test_without_an_answer_the_output_has_no_position_and_no_error(
    fake: FakeApi, client: AsyncClient, capsys: Capture, answer: Answer
) -> None:
    a_waiting_job(fake, "digits")
    fake.fault("GET", PENDING, answer, ALWAYS)
    await shows_no_position(client, capsys)
    assert len(fake.reads(PENDING)) == 2


async def test_an_answer_that_is_late_is_not_waited_for(
    fake: FakeApi, client: AsyncClient, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "TIME_LIMIT", 0.2)
    a_waiting_job(fake, "digits")
    fake.fault("GET", PENDING, never, ALWAYS)
    async with asyncio.timeout(10):
        await shows_no_position(client, capsys)


async def shows_no_position(client: AsyncClient, capsys: Capture) -> None:
    """Require the same output of both commands as in a cluster without the API."""
    assert (await listed(client, capsys)).splitlines()[1].endswith("   team")
    await show_status(client, "digits", "table", watch=False)
    shown = capsys.readouterr()
    assert "Queue       team\n" in shown.out
    assert not shown.err


async def test_several_queues_are_asked_at_the_same_time_and_each_once(
    fake: FakeApi, client: AsyncClient
) -> None:
    kueue = Kueue(fake)
    kueue.queues = {
        "a": [a_waiting_job(fake, "one", "a")],
        "b": [a_waiting_job(fake, "two", "b"), a_waiting_job(fake, "three", "b")],
    }
    # Each answer waits for the other request.
    kueue.before = asyncio.Barrier(2).wait
    jobs = await Positions(client.api).add_to(await client.list())
    found = {job.name: job.position.in_local_queue for job in jobs if job.position}
    assert found == {"one": 1, "two": 1, "three": 2}


async def test_a_slow_queue_does_not_hide_the_positions_in_another_one(
    fake: FakeApi, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other queue has to answer in this time.
    monkeypatch.setattr(positions, "TIME_LIMIT", 2.0)
    fake.fault("GET", ".*/localqueues/slow/.*", never, ALWAYS)
    a_waiting_job(fake, "slow", "slow")
    Kueue(fake).queues["team"] = [a_waiting_job(fake, "digits")]
    jobs = await Positions(client.api).add_to(await client.list())
    assert [bool(job.position) for job in jobs] == [True, False]


async def test_a_long_queue_is_read_in_pages_until_all_jobs_are_found(
    fake: FakeApi, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "PAGE", 10)
    kueue = Kueue(fake)
    kueue.queues["team"] = [*others(14), a_waiting_job(fake, "digits"), *others(20)]
    (job,) = await Positions(client.api).add_to(await client.list())
    assert job.position == (15, 25)
    assert kueue.queries == [{"limit": "10", "offset": "0"}, {"limit": "10", "offset": "10"}]


async def test_the_pages_of_a_queue_are_limited(
    fake: FakeApi, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "PAGE", 2)
    kueue = Kueue(fake)
    kueue.queues["team"] = [*others(40), a_waiting_job(fake, "digits")]
    (job,) = await Positions(client.api).add_to(await client.list())
    assert job.position is None
    assert len(kueue.queries) == positions.MAX_PAGES


async def test_a_workload_of_the_same_name_in_another_namespace_is_not_the_jobs(
    fake: FakeApi, client: AsyncClient
) -> None:
    name = a_waiting_job(fake, "digits")
    body = web.json_response({"items": [_item("another", 0, name)]}).text
    assert body
    fake.fault("GET", PENDING, a_body(body), ALWAYS)
    (job,) = await Positions(client.api).add_to(await client.list())
    assert job.position is None


@pytest.mark.parametrize(
    ("answers", "period"),
    [(True, positions.PERIOD), (False, positions.PERIOD_WITHOUT_ANSWER)],
)
async def test_while_a_command_watches_kueue_is_asked_once_in_a_period(
    fake: FakeApi, client: AsyncClient, answers: bool, period: float
) -> None:
    now = 100.0
    shown = Positions(client.api, lambda: now)
    name = a_waiting_job(fake, "digits")
    if answers:
        Kueue(fake).queues["team"] = [name]
    jobs = await client.list()
    for later, asked in ((0.0, 1), (period - 0.1, 1), (period, 2)):
        now = 100.0 + later
        (job,) = await shown.add_to(jobs)
        assert bool(job.position) == answers
        assert len(fake.reads(PENDING)) == asked
