"""Recovery in place through the operator: pods that stay get another assignment."""

from datetime import UTC, datetime, timedelta

import pytest
from fake_api import refusal, unanswered
from gang import a_job, assignment, fails, is_running, pods, runs, status, until

from ddpjob.controller import act
from ddpjob.core.agent_files import agent_files, config_map_name
from ddpjob.core.decide import in_place

AGENT = config_map_name()


def patches(fake, path="/api/v1/namespaces/ml/pods/.*"):
    return [asked.path.rpartition("/")[2] for asked in fake.writes(path) if asked.method == "PATCH"]


async def has_attempt(fake, name, attempt):
    await until(lambda: assignment(fake, name)["attempt"] == attempt)


async def test_after_a_failure_only_the_pod_at_fault_is_made_anew(fake, operator):
    fake.create("ddpjobs", a_job(nodes=3, recovery="InPlace"))
    await is_running(fake, nodes=3)
    stayed = {name: fake.get("pods", name)["metadata"]["uid"] for name in pods(fake)}
    fails(fake, "digits-0-1")
    await until(lambda: "digits-1-1" in pods(fake))
    assert sorted(patches(fake)) == ["digits-0-0", "digits-0-2"]
    for name in ("digits-0-0", "digits-0-2"):
        pod = fake.get("pods", name)["metadata"]
        assert pod["uid"] == stayed[name]
        assert (pod["labels"]["ddpjob.dev/attempt"], assignment(fake, name)["attempt"]) == ("1", 1)
    flags = {
        name: assignment(fake, name)["flags"] for name in ("digits-0-0", "digits-1-1", "digits-0-2")
    }
    common = {tuple(told[:6]) for told in flags.values()}
    assert len(common) == 1, "the members of an attempt must agree"
    assert "--rdzv-endpoint=10.244.0.7:29402" in flags["digits-1-1"]


async def test_the_attempt_runs_once_every_pod_was_ready_again(fake, operator):
    fake.create("ddpjobs", a_job(recovery="InPlace"))
    await is_running(fake)
    fails(fake, "digits-0-1")
    await until(lambda: "digits-1-1" in pods(fake))
    runs(fake, "digits-1-1")
    await until(lambda: status(fake)["nodes"]["ready"] == 1)
    assert status(fake)["phase"] == "Starting"
    runs(fake, "digits-0-0")
    await until(lambda: status(fake)["phase"] == "Running")
    assert (status(fake)["attempt"]["number"], status(fake)["restarts"]) == (1, 1)


async def test_after_the_loss_of_node_0_a_pod_that_stays_hosts_the_rendezvous(fake, operator):
    fake.create("ddpjobs", a_job(nodes=3, recovery="InPlace"))
    await is_running(fake, nodes=3)
    fake.remove("pods", "digits-0-0")
    await until(lambda: "digits-1-0" in pods(fake))
    hosts = {
        name: "is_host=true" in " ".join(assignment(fake, name)["flags"]) for name in pods(fake)
    }
    assert hosts == {"digits-0-1": True, "digits-0-2": False, "digits-1-0": False}
    assert status(fake)["budget"]["disruptions"] == 1


@pytest.mark.parametrize(
    "fault", [refusal(500), refusal(403), refusal(409, "Conflict"), unanswered]
)
async def test_an_assignment_that_failed_is_repeated(fake, operator, fault):
    fake.create("ddpjobs", a_job(nodes=3, recovery="InPlace"))
    await is_running(fake, nodes=3)
    fake.fault("PATCH", ".*/pods/digits-0-0", fault)
    fails(fake, "digits-0-1")
    await has_attempt(fake, "digits-0-0", 1)
    await has_attempt(fake, "digits-0-2", 1)
    await until(lambda: "digits-1-1" in pods(fake))
    assert status(fake)["restarts"] == 1


async def test_an_assignment_that_is_not_followed_is_written_again(fake, operator, monkeypatch):
    monkeypatch.setattr(in_place, "COPY_TIMES", (timedelta(seconds=0.1), timedelta(days=1)))
    fake.create("ddpjobs", a_job(recovery="InPlace"))
    await is_running(fake)
    fails(fake, "digits-0-1")
    await has_attempt(fake, "digits-0-0", 1)
    before = fake.get("pods", "digits-0-0")["metadata"]["annotations"]["ddpjob.dev/ready-before"]
    await until(lambda: assignment(fake, "digits-0-0")["copies"] == 1)
    told = fake.get("pods", "digits-0-0")["metadata"]["annotations"]
    assert told["ddpjob.dev/ready-before"] == before
    for name in ("digits-0-0", "digits-1-1"):
        await until(lambda name=name: name in pods(fake))
        runs(fake, name)
    await until(lambda: status(fake)["phase"] == "Running")
    assert patches(fake) == ["digits-0-0", "digits-0-0"]


async def test_a_pod_that_vanishes_before_its_assignment_costs_nothing_more(fake, operator):
    fake.create("ddpjobs", a_job(nodes=3, recovery="InPlace"))
    await is_running(fake, nodes=3)

    async def vanish(request, proceed):
        fake.remove("pods", "digits-0-0")
        return await proceed()

    fake.fault("PATCH", ".*/pods/digits-0-0", vanish)
    fails(fake, "digits-0-1")
    # The others are not kept a second time.
    await until(lambda: "deletionTimestamp" in fake.get("pods", "digits-0-2")["metadata"])
    fake.remove("pods", "digits-0-2")
    await until(lambda: {"digits-2-0", "digits-2-1", "digits-2-2"} <= set(pods(fake)))
    # It is replaced with its gang, and not counted: it was probably lost with the other one.
    assert (status(fake)["budget"]["failures"], status(fake)["budget"]["disruptions"]) == (1, 0)


# The ConfigMap with the agent


async def test_jobs_share_the_config_map_of_the_agent_which_the_lease_owns(fake, operator):
    for name in ("one", "two"):
        fake.create("ddpjobs", a_job(name))
    await until(lambda: {"one-0-0", "two-0-0"} <= set(pods(fake)))
    (config_map,) = fake.all("configmaps")
    assert config_map["metadata"]["name"] == AGENT
    assert config_map["data"] == dict(agent_files())
    (owner,) = config_map["metadata"]["ownerReferences"]
    assert owner["uid"] == fake.get("leases", "ddpjob-installation")["metadata"]["uid"]


async def test_a_job_that_starts_asks_nothing_about_an_agent_that_exists(fake, operator):
    fake.create("ddpjobs", a_job("first"))
    await until(lambda: "first-0-0" in pods(fake))
    before = len(requests_for_agents(fake))
    names = [f"job-{number}" for number in range(10)]
    for name in names:
        fake.create("ddpjobs", a_job(name))
    await until(lambda: {f"{name}-0-1" for name in names} <= set(pods(fake)))
    assert len(requests_for_agents(fake)) == before == 1


async def test_jobs_that_start_at_once_share_the_request_for_the_agent(fake, operator):
    async def late(_, proceed):
        await until(lambda: len(fake.all("services")) == 10)
        return await proceed()

    fake.fault("POST", ".*/configmaps", late, float("inf"))
    names = [f"job-{number}" for number in range(10)]
    for name in names:
        fake.create("ddpjobs", a_job(name))
    await until(lambda: {f"{name}-0-1" for name in names} <= set(pods(fake)))
    assert len(requests_for_agents(fake)) == 1


def waits_for_a_container(fake, name, note=0):
    """Let a pod have had a node nearly long enough for a look at its agent."""
    scheduled = {
        "type": "PodScheduled",
        "status": "True",
        "message": str(note),
        "lastTransitionTime": (datetime.now(UTC) - timedelta(seconds=9)).isoformat(),
    }
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
    status = {"phase": "Pending", "conditions": [scheduled], "containerStatuses": [waiting]}
    fake.change("pods", name, status=status)


def requests_for_agents(fake):
    return [asked for asked in fake.log if "/configmaps" in asked.path]


async def test_an_agent_that_is_gone_is_created_again_when_a_pod_waits_for_it(fake, operator):
    fake.create("ddpjobs", a_job())
    await until(lambda: "digits-0-1" in pods(fake))
    fake.remove("configmaps", AGENT)
    waits_for_a_container(fake, "digits-0-0")
    await until(lambda: fake.get("configmaps", AGENT))


async def test_a_config_map_with_other_content_is_not_used(fake, operator):
    other = {"metadata": {"name": AGENT}, "immutable": True, "data": {"agent.py": "evil"}}
    fake.create("configmaps", other)
    fake.create("ddpjobs", a_job())
    await until(lambda: status(fake).get("reason") == "NameInUse")
    assert status(fake)["message"] == f"ConfigMap {AGENT} exists with other content; delete it"
    assert pods(fake) == []
    fake.remove("configmaps", AGENT)
    await until(lambda: "digits-0-0" in pods(fake))


async def test_an_agent_is_created_again_in_a_namespace_that_was_made_anew(fake, operator):
    fake.create("ddpjobs", a_job("first"))
    await until(lambda: "first-0-1" in pods(fake))
    fake.remove("configmaps", AGENT)
    lease = fake.get("leases", "ddpjob-installation")
    fake.remove("leases", "ddpjob-installation")
    fake.create("leases", {**lease, "metadata": {"name": lease["metadata"]["name"]}})
    waits_for_a_container(fake, "first-0-0")
    await until(lambda: fake.get("configmaps", AGENT))
    (owner,) = fake.get("configmaps", AGENT)["metadata"]["ownerReferences"]
    assert owner["uid"] == fake.get("leases", "ddpjob-installation")["metadata"]["uid"]


async def test_the_agent_is_looked_for_once_in_a_while(fake, operator):
    fake.create("ddpjobs", a_job())
    await until(lambda: "digits-0-1" in pods(fake))
    waits_for_a_container(fake, "digits-0-0")
    await until(lambda: len(requests_for_agents(fake)) == 2)
    for number in range(5):
        waits_for_a_container(fake, "digits-0-0", note=number)
        waits_for_a_container(fake, "digits-0-1", note=number)
    await until(lambda: status(fake)["nodes"]["active"] == 2)
    assert len(requests_for_agents(fake)) == 2


async def test_a_refused_assignment_is_tried_again(fake, operator, monkeypatch):
    monkeypatch.setattr(act, "REFUSED_ASSIGNMENT_RETRY", 0.1)
    fake.create("ddpjobs", a_job(recovery="InPlace"))
    await is_running(fake)
    fake.fault("PATCH", ".*/pods/digits-0-0", refusal(500, "InternalError"), times=3)
    fails(fake, "digits-0-1")
    await until(lambda: assignment(fake, "digits-0-0")["attempt"] == 1)
