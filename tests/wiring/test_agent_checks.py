"""The look for the agent's ConfigMap, while pods may wait for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from ddpjob.controller.act import AGENT_INTERVAL, Actor
from ddpjob.controller.cache import Cache
from ddpjob.controller.errors import Refused
from ddpjob.core.api.job import Job
from ddpjob.core.api.reasons import Reason


class Cluster:
    """A cluster that refuses the ConfigMap, and the events of an operator there."""

    def __init__(self) -> None:
        self.looks: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.now = 100.0

    async def check_agent(self, namespace: str) -> None:
        self.looks.append(namespace)
        raise Refused(Reason.FORBIDDEN, "configmaps is forbidden")

    async def post_once(self, job: Job, reason: str, message: str) -> None:
        self.told.append((job.name, message))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def actor(cluster: Cluster) -> Actor:
    parts: Any = SimpleNamespace(check_agent=cluster.check_agent, post_once=cluster.post_once)
    return Actor(
        parts, Cache(), parts, parts, parts, parts, parts, lambda: cluster.now, parts, parts
    )


def a_job(name: str, namespace: str = "ml") -> Job:
    return Job.from_dict({"metadata": {"name": name, "namespace": namespace, "uid": name}})


async def test_one_look_serves_a_namespace_and_each_job_is_told(
    cluster: Cluster, actor: Actor
) -> None:
    for job in (a_job("one"), a_job("two"), a_job("three", "other")):
        await actor._check_agent(job)
    assert cluster.looks == ["ml", "other"]
    assert [name for name, _ in cluster.told] == ["one", "two", "three"]
    assert all("configmaps is forbidden" in message for _, message in cluster.told)


async def test_after_some_time_there_is_another_look(cluster: Cluster, actor: Actor) -> None:
    await actor._check_agent(a_job("one"))
    cluster.now += AGENT_INTERVAL
    await actor._check_agent(a_job("one"))
    assert cluster.looks == ["ml", "ml"]
