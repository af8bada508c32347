"""Small builders, a kubelet in three verbs, and waiting for a state."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fake_api import FakeApi
from torchrun_summary import SUMMARY

RUNNING = {"running": {"startedAt": "2026-11-21T12:00:00Z"}}

# Each pod is ready at another second than before.
SECONDS = itertools.count(1)


def a_job(
    name: str = "digits", nodes: int = 2, recovery: str = "Recreate", **spec: Any
) -> dict[str, Any]:
    """Return a job. Each attempt has new pods, unless `recovery` is InPlace."""
    fields = {"nodes": nodes, "image": "trainer:1", "args": ["train.py"], "recovery": recovery}
    return {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name, "namespace": "ml"},
        "spec": {**fields, **spec},
    }


def pods(fake: FakeApi) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in fake.all("pods"))


def status(fake: FakeApi, name: str = "digits") -> dict[str, Any]:
    job = fake.get("ddpjobs", name)
    return (job or {}).get("status", {})


def runs(fake: FakeApi, *names: str) -> None:
    """Let a scheduler assign a node to each pod, its kubelet start it, and its workers meet."""
    for name in names:
        pod = fake.get("pods", name)
        assert pod
        spec = {**pod["spec"], "nodeName": f"node-of-{name}"}
        _report(fake, name, "Running", RUNNING, spec=spec, ready=True)


def succeeds(fake: FakeApi, *names: str) -> None:
    for name in names:
        _report(
            fake,
            name,
            "Succeeded",
            {"terminated": {"exitCode": 0, "finishedAt": "2026-11-21T12:01:00Z"}},
        )


def fails(fake: FakeApi, *names: str) -> None:
    ended = {
        "exitCode": 1,
        "reason": "Error",
        "message": SUMMARY,
        "finishedAt": "2026-11-21T12:01:00Z",
    }
    for name in names:
        _report(fake, name, "Failed", {"terminated": ended})


def _report(
    fake: FakeApi,
    name: str,
    phase: str,
    state: dict[str, Any],
    *,
    ready: bool = False,
    **fields: Any,
) -> None:
    since = datetime.fromtimestamp(next(SECONDS), UTC).isoformat()
    condition = {"type": "Ready", "status": str(ready), "reason": "", "lastTransitionTime": since}
    status = {
        "phase": phase,
        "podIP": "10.244.0.7",
        "conditions": [condition],
        "containerStatuses": [{"name": "trainer", "state": state, "ready": ready}],
    }
    fake.change("pods", name, status=status, **fields)


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition holds, and fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.01)


def assignment(fake: FakeApi, name: str) -> dict[str, Any]:
    """Return what the agent of a pod is told."""
    pod = fake.get("pods", name)
    assert pod
    found: dict[str, Any] = json.loads(pod["metadata"]["annotations"]["ddpjob.dev/assignment"])
    return found


async def is_running(fake: FakeApi, attempt: int = 0, nodes: int = 2) -> None:
    """Bring the job `digits` to Running in `attempt`."""
    names = [f"digits-{attempt}-{index}" for index in range(nodes)]
    await until(lambda: set(names) <= set(pods(fake)))
    runs(fake, *names)
    said = f"attempt {attempt} runs on {nodes} nodes"
    await until(lambda: said in [event["message"] for event in fake.all("events")])
