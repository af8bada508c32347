"""One leader at a time, by a clock of each candidate's own."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from aiohttp import web
from extensions import without_extensions
from fake_api import hanging_webhook, refusal, unanswered
from gang import a_job, until

from ddpjob.controller import lease as module
from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, identity_of
from ddpjob.controller.clock import wall_time
from ddpjob.controller.creator import Creator
from ddpjob.controller.deleter import Deleter
from ddpjob.controller.errors import CannotRun, LeaseLost
from ddpjob.controller.events import Reporter
from ddpjob.controller.lease import DEADLINE, DURATION, Lease
from ddpjob.controller.main import operate
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.probes import Probes
from ddpjob.controller.territory import Territory
from ddpjob.controller.writer import Writer
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import observe
from ddpjob.core.plan import Delete, Plan
from ddpjob.core.render.pod_context import Settings
from ddpjob.kube.kinds import PODS
from ddpjob.kube.request import Request, Verb

LEASE = ".*/leases/op"


class Clock:
    """A clock set by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "RETRY", 0.01)
    monkeypatch.setattr(module, "TIMEOUT", 0.5)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def a_lease(api, clock):
    return lambda identity="first": Lease(api, "ml", "op", identity, clock)


def holder(fake):
    return (fake.get("leases", "op") or {}).get("spec", {}).get("holderIdentity")


async def looked_at(fake, times=5):
    """Wait until the candidate has read the Lease some times more."""

    def reads():
        return sum(a.method == "GET" and a.path.endswith("/leases/op") for a in fake.log)

    enough = reads() + times
    await until(lambda: reads() >= enough)


async def test_a_free_lease_is_taken(fake, a_lease):
    lease = a_lease()
    await lease.acquire()
    assert holder(fake) == "first"
    lease.check()


async def test_of_many_candidates_one_gets_it(fake, a_lease, background):
    candidates = [background(a_lease(f"candidate-{n}").acquire()) for n in range(5)]
    await until(lambda: any(task.done() for task in candidates))
    await looked_at(fake, 20)
    assert sum(task.done() for task in candidates) == 1


async def test_a_candidate_waits_while_the_lease_is_renewed(fake, a_lease, background, clock):
    first = a_lease()
    await first.acquire()
    waiting = background(a_lease("second").acquire())
    for _ in range(4):
        await looked_at(fake)
        clock.now += DURATION - 1
        await first._renew()
        await looked_at(fake)
    assert not waiting.done()


async def test_a_candidate_takes_over_a_lease_that_was_not_renewed_for_its_duration(
    fake, a_lease, background, clock
):
    await a_lease().acquire()
    waiting = background(a_lease("second").acquire())
    await looked_at(fake)
    clock.now += DURATION
    await looked_at(fake)
    assert not waiting.done()
    clock.now += 1
    await asyncio.wait_for(waiting, 10)
    assert holder(fake) == "second"


async def test_a_released_lease_is_taken_at_once(fake, a_lease, background):
    first = a_lease()
    await first.acquire()
    waiting = background(a_lease("second").acquire())
    await looked_at(fake)
    await first.release()
    await asyncio.wait_for(waiting, 10)
    assert holder(fake) == "second"
    with pytest.raises(LeaseLost):
        first.check()


async def test_the_holder_stops_before_a_successor_may_start(a_lease, clock):
    lease = a_lease()
    await lease.acquire()
    clock.now = DEADLINE - 0.1
    lease.check()
    clock.now = DEADLINE
    with pytest.raises(LeaseLost):
        lease.check()
    assert DEADLINE < DURATION


@pytest.mark.parametrize("ill", ["refuses", "stalls"])
async def test_a_lease_that_cannot_be_renewed_in_time_is_lost(
    fake, a_lease, background, clock, ill
):
    lease = a_lease()
    await lease.acquire()
    keeping = background(lease.keep())
    if ill == "stalls":
        fake.stall()
    else:
        fake.fault("PUT", LEASE, refusal(500), times=float("inf"))
    before = len(fake.log)
    await until(lambda: len(fake.log) >= before + 2)
    assert not keeping.done()
    clock.now += DEADLINE
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(keeping, 10)


async def test_a_renewal_counts_from_when_it_was_sent(fake, a_lease, clock):
    lease = a_lease()
    await lease.acquire()
    fake.stall()
    renewing = asyncio.create_task(lease._renew())
    before = len(fake.log)
    await until(lambda: len(fake.log) > before)
    clock.now += 4
    fake.flow()
    await renewing
    assert lease.remaining == DEADLINE - 4


async def test_a_lease_of_another_holder_is_lost_at_once(fake, a_lease, background):
    lease = a_lease()
    await lease.acquire()
    fake.change("leases", "op", spec={"holderIdentity": "second"})
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(lease.keep(), 10)


async def test_a_deleted_lease_is_lost_at_once(fake, a_lease):
    lease = a_lease()
    await lease.acquire()
    fake.remove("leases", "op")
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(lease.keep(), 10)


async def test_a_renewal_whose_answer_was_lost_keeps_the_lease(fake, a_lease, background, clock):
    lease = a_lease()
    await lease.acquire()
    fake.fault("PUT", LEASE, unanswered)
    clock.now = 5
    keeping = background(lease.keep())
    await until(lambda: lease.remaining == DEADLINE)
    assert not keeping.done()


async def test_a_lease_deleted_during_a_conflict_can_be_created_again(fake, a_lease, background):
    fake.create("leases", {"metadata": {"name": "op"}, "spec": {"holderIdentity": ""}})
    fake.fault("PUT", LEASE, refusal(409, "Conflict"), times=float("inf"))
    waiting = background(a_lease().acquire())
    await looked_at(fake)
    fake.remove("leases", "op")
    await asyncio.wait_for(waiting, 10)
    assert holder(fake) == "first"


async def test_a_lost_lease_is_not_released(fake, a_lease, clock):
    lease = a_lease()
    await lease.acquire()
    clock.now = DEADLINE
    before = len(fake.log)
    await lease.release()
    assert len(fake.log) == before


def an_actor(writer, cache, clock):
    creator = Creator(writer, cache, Settings(), Territory(writer, "default/first", clock))
    reporter = Reporter(writer, "first")
    deleter = Deleter(writer, cache, reporter)
    parts = (writer, cache, creator, deleter, reporter, *without_extensions(writer, cache))
    return Actor(*parts, clock, Metrics(cache, ()), wall_time)


async def test_nothing_is_written_after_the_deadline(fake, api, a_lease, clock):
    lease, cache = a_lease(), Cache()
    await lease.acquire()
    cache.jobs.see(fake.create("ddpjobs", a_job()))
    seen = cache.job(("ml", "digits"))
    actor = an_actor(Writer(api, lease), cache, clock)
    plan = decide(observe(seen.value.unpack(), ()), datetime.now(UTC))
    clock.now = DEADLINE
    with pytest.raises(LeaseLost):
        await actor.apply(seen, plan)
    assert fake.writes() == []


async def an_actor_of_a_job(fake, api, lease, clock):
    """Return an operator that may write, and the job that it has seen."""
    await lease.acquire()
    cache = Cache()
    cache.jobs.see(fake.create("ddpjobs", a_job()))
    return an_actor(Writer(api, lease), cache, clock), cache.job(("ml", "digits"))


def see_unreachable(fake, cache, health):
    """Let the cache have an unreachable node, although it has another state by now."""
    ready = {"type": "Ready", "status": "Unknown"}
    node = {"metadata": {"name": "gpu-7", "namespace": ""}, "status": {"conditions": [ready]}}
    cache.nodes.see(fake.create("nodes", node))
    # The watch of nodes misses this.
    fake.change("nodes", "gpu-7", "", status={"conditions": [{**ready, "status": health}]})


@pytest.mark.parametrize("health", ["True", "Unknown"])
async def test_a_pod_is_deleted_by_force_only_if_the_api_server_confirms_the_state_of_its_node(
    fake, api, a_lease, clock, health
):
    actor, seen = await an_actor_of_a_job(fake, api, a_lease(), clock)
    see_unreachable(fake, actor.cache, health)
    forced = Delete("digits-0-1", "uid", 0, forced="its node is unreachable", node="gpu-7")
    await actor.apply(seen, Plan(seen.value.unpack().status, delete=(forced,)))
    deletions = [write for write in fake.writes(".*/pods/.*") if write.method == "DELETE"]
    assert bool(deletions) is (health == "Unknown")
    assert actor.cache.nodes.by_name["gpu-7"].health == health


@pytest.mark.parametrize("health", ["True", "Unknown"])
async def test_a_job_ends_by_a_lost_node_only_if_the_api_server_confirms_its_state(
    fake, api, a_lease, clock, health
):
    actor, seen = await an_actor_of_a_job(fake, api, a_lease(), clock)
    see_unreachable(fake, actor.cache, health)
    status = replace(seen.value.unpack().status, phase="Failed")
    await actor.apply(seen, Plan(status, confirm_nodes=("gpu-7",)))
    assert (fake.get("ddpjobs", "digits").get("status") is not None) is (health == "Unknown")


@pytest.mark.parametrize("finalizers", [[], ["example.org/keep"]])
async def test_a_pod_that_was_deleted_by_force_runs_no_more(fake, api, a_lease, clock, finalizers):
    lease, cache = a_lease(), Cache()
    await lease.acquire()
    job = fake.create("ddpjobs", a_job())
    cache.jobs.see(job)
    seen = cache.job(("ml", "digits"))
    actor = an_actor(Writer(api, lease), cache, clock)
    await actor.apply(seen, decide(observe(seen.value.unpack(), ()), datetime.now(UTC)))
    fake.change("pods", "digits-0-1", spec={"nodeName": "gpu-7"})
    removed = {"deletionTimestamp": "2026-11-21T12:00:30Z", "deletionGracePeriodSeconds": 0}
    kept = fake.change("pods", "digits-0-1", metadata={**removed, "finalizers": finalizers})

    async def answer(request, proceed):
        return web.json_response(kept)

    fake.fault("DELETE", ".*/pods/.*", answer)
    forced = Delete("digits-0-1", kept["metadata"]["uid"], 0, forced="its node is unreachable")
    seen = cache.job(("ml", "digits"))
    await actor.apply(seen, Plan(seen.value.unpack().status, delete=(forced,)))
    pods = [pod for pod in cache.pods_of(identity_of(seen)) if pod.name == "digits-0-1"]
    assert [pod.released for pod in pods] == [True] * len(finalizers)


async def test_a_create_that_hangs_ends_with_the_lease(fake, api, a_lease, background, clock):
    lease = a_lease()
    await lease.acquire()
    fake.fault("POST", ".*/pods", hanging_webhook())
    create = Writer(api, lease).write(Request(Verb.CREATE, PODS, "ml", body={}))
    creating = background(create)
    await until(lambda: fake.writes(".*/pods"))
    clock.now = DEADLINE - 0.1
    await lease._renew()
    clock.now += DEADLINE - 0.1
    ended, _ = await asyncio.wait([creating], timeout=0.1)
    assert not ended
    clock.now += 0.1
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(creating, 4)


async def test_an_operator_that_lost_its_lease_ends_with_a_message(fake, options):
    running = asyncio.create_task(asyncio.to_thread(asyncio.run, operate(options)))
    await until(lambda: fake.get("leases", "ddpjob-operator", "default"))
    fake.change("leases", "ddpjob-operator", "default", spec={"holderIdentity": "second"})
    with pytest.raises(CannotRun, match="another operator may lead"):
        await running
    assert fake.get("leases", "ddpjob-operator", "default")["spec"]["holderIdentity"] == "second"


async def test_an_operator_that_ends_releases_its_lease(fake, options, caplog):
    caplog.set_level("INFO")

    async def a_short_life():
        running = asyncio.create_task(operate(options))
        # The Lease exists before the operator knows that it has it.
        while "leading" not in caplog.text:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    await asyncio.to_thread(asyncio.run, a_short_life())
    assert fake.get("leases", "ddpjob-operator", "default")["spec"]["holderIdentity"] == ""


async def test_a_standby_that_cannot_read_the_lease_is_not_ready(fake, api, a_lease, background):
    """Else `helm upgrade --wait` would succeed, and the working operator be stopped for it."""
    lease = a_lease()
    probes = Probes(SimpleNamespace(synced=False), lease, SimpleNamespace())
    fake.fault("GET", LEASE, refusal(403, "Forbidden", "no role"), times=2)
    acquiring = background(lease.acquire())
    await until(lambda: any(asked.method == "GET" for asked in fake.log))
    assert probes.ready() == "the Lease cannot be read yet"
    await acquiring
    assert probes.ready() is None
    probes.leading = True
    assert probes.ready() == "jobs and pods are not listed yet"
