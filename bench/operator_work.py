"""CPU time of the operator's single steps in large clusters, in one process without an API server.

    python -m bench.operator_work                                     # ten seconds
    python -m bench.operator_work --nodes 10 --jobs 20 --pending 20   # a short try

Each row is the median of some repetitions; only the scrape runs once. A scrape works in turns, so
other work waits at most for the longest one.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from ddpjob.controller.act import Actor
from ddpjob.controller.cache import Cache, key_of_job
from ddpjob.controller.clock import wall_time
from ddpjob.controller.metrics import Metrics
from ddpjob.controller.writer import Writer
from ddpjob.core.api import names
from ddpjob.core.api.status import Status
from ddpjob.core.decide.rules import decide
from ddpjob.core.observe.observation import Pod, observe
from ddpjob.core.plan import Create, Plan, create_gang
from ddpjob.kube.kinds import NODES
from ddpjob.kube.request import Request
from tests.unit.builders.containers import ended, failed, running
from tests.unit.builders.jobs import a_job, a_manifest, a_status
from tests.unit.builders.messages import torchrun_summary
from tests.unit.builders.nodes import a_node, nodes_of
from tests.unit.builders.pods import an_agents_pod, read_pods
from tests.unit.builders.surroundings import unschedulable
from tests.unit.builders.times import at
from tests.wiring.extensions import without_extensions

REPETITIONS = 5
STATUSES = 300
TRAINER = {"name": names.TRAINER, "resources": {"requests": {"cpu": "1"}}}
ENVIRONMENT = [{"name": f"NAME_{number}", "value": "x" * 50} for number in range(20)]

# A possible end of a killed process's log.
TAIL = "epoch 1, step 200, loss 0.1234, 812 images a second\n" * 80


@dataclass(frozen=True)
class Size:
    """The nodes of a gang, and the jobs of a cluster."""

    nodes: int
    jobs: int
    pending: int


def milliseconds(function: Callable[[], object]) -> float:
    """Return the median CPU time of a call."""
    times = []
    for _ in range(REPETITIONS):
        before = time.process_time()
        function()
        times.append(time.process_time() - before)
    return statistics.median(times) * 1000


def decisions(size: Size) -> Iterator[tuple[str, str]]:
    nodes = nodes_of(*(a_node(f"node-{index}") for index in range(size.nodes)))
    job = a_job(nodes=size.nodes, recovery="InPlace", status=a_status(nodes=size.nodes))

    def gang(make_status: Callable[[int], dict[str, Any]]) -> list[Pod]:
        return list(read_pods(*(an_agents_pod(i, make_status(i)) for i in range(size.nodes))))

    scenes = {
        "all pods run": gang(lambda index: running()),
        "a rank failed, the other pods stay": gang(
            lambda index: failed(torchrun_summary(index)) if index == 5 else running()
        ),
        "all pods ended without a report": gang(lambda index: ended(137, f"{TAIL}{index}")),
    }
    for name, pods in scenes.items():
        took = milliseconds(lambda: decide(observe(job, pods, nodes=nodes), at(100)))  # noqa: B023
        yield f"decision, {size.nodes:,} nodes: {name}", f"{took:.0f} ms"


def scrape(size: Size) -> Iterator[tuple[str, str]]:
    cache = filled(size.jobs, a_status(), running(), running())
    metrics = Metrics(cache, ())
    longest = 0.0

    async def other_work() -> None:
        nonlocal longest
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest = max(longest, now - last)
            last = now

    async def measured() -> float:
        working = asyncio.create_task(other_work())
        await asyncio.sleep(0)
        before = time.process_time()
        text = await metrics.text()
        assert f'phase="Running"}} {size.jobs}'.encode() in text
        working.cancel()
        return time.process_time() - before

    took = asyncio.run(measured())
    yield (
        f"a scrape, {size.jobs:,} jobs",
        f"{took * 1000:.0f} ms, in turns of at most {longest * 1000:.0f} ms",
    )


def looks(size: Size) -> Iterator[tuple[str, str]]:
    status = a_status(latched=False, ran=False, starting_since=at(0))
    cache = filled(size.pending, status, running(), unschedulable())
    jobs = [seen.value.unpack() for seen in cache.jobs.objects.values()]
    for job in jobs:
        cache.older_gang_of(job, None)
    youngest = jobs[-1]
    assert cache.older_gang_of(youngest, None)
    took = milliseconds(lambda: cache.older_gang_of(youngest, None))
    yield f"the older gang of one of {size.pending:,} pending jobs", f"{took:.2f} ms"


def news_of_a_node(size: Size) -> Iterator[tuple[str, str]]:
    cache = filled(size.jobs, a_status(), running(), running())
    took = milliseconds(lambda: cache.keys_of(NODES, a_node("node-1")))
    yield f"the jobs of a node, {2 * size.jobs:,} pods", f"{took:.2f} ms"


class EchoWriter(Writer):
    """Answers each status write at once. Apart from the status, only the version changes."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest

    async def write(self, request: Request) -> dict[str, Any]:
        assert request.body
        version = str(int(self.manifest["metadata"]["resourceVersion"]) + 1)
        metadata = {**self.manifest["metadata"], "resourceVersion": version}
        status = request.body["status"]
        self.manifest = {**self.manifest, "metadata": metadata, "status": status}
        return self.manifest


def status_writes(_: Size) -> Iterator[tuple[str, str]]:
    template = {"spec": {"containers": [{"name": names.TRAINER, "env": ENVIRONMENT}]}}
    manifest = a_manifest(status=a_status().to_dict(), podTemplate=template)
    manifest["metadata"]["resourceVersion"] = "1"
    for what, create in {
        "a status write": (),
        "a status write before pods": create_gang(range(2)),
    }.items():
        took = milliseconds(lambda: asyncio.run(write_statuses(manifest, create)))  # noqa: B023
        yield what, f"{took / STATUSES * 1000:.0f} µs"


async def do_nothing(*_: object) -> None:
    pass


async def write_statuses(manifest: dict[str, Any], create: tuple[Create, ...]) -> None:
    """Carry out plans with one status write each, and all the work beside the request."""
    cache = Cache()
    cache.jobs.see(manifest)
    key = key_of_job(manifest)
    idle: Any = SimpleNamespace(create=do_nothing, delete_pods=do_nothing)
    writer = EchoWriter(manifest)
    places, pod_groups = without_extensions(writer, cache)
    actor = Actor(
        writer=writer,
        cache=cache,
        creator=idle,
        deleter=idle,
        reporter=idle,
        places=places,
        pod_groups=pod_groups,
        # Two readings of the clock are more than PROGRESS_INTERVAL apart.
        clock=itertools.count(step=10).__next__,
        metrics=Metrics(cache, ()),
        now=wall_time,
    )
    for number in range(STATUSES):
        seen = cache.job(key)
        assert seen
        status = replace(seen.value.unpack().status, reason=f"Reason{number}")
        await actor.apply(seen, Plan(status, create=create))


def filled(jobs: int, status: Status, *pods: Any) -> Cache:
    """Return a cache with jobs of this status, each with pods of these statuses."""
    cache = Cache()
    for number in range(jobs):
        name = f"job-{number}"
        manifest = a_manifest(name=name, status=status.to_dict())
        manifest["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": str(number + 1)}
        cache.jobs.see(manifest)
        for index, pod_status in enumerate(pods):
            pod = an_agents_pod(index, pod_status, containers=[TRAINER])
            owner = pod["metadata"]["ownerReferences"][0]
            owner |= {"name": name, "uid": f"uid-{number}"}
            pod["metadata"] |= {
                "name": f"{name}-0-{index}",
                "uid": f"pod-{number}-{index}",
                "resourceVersion": str(number + 1),
            }
            cache.pods.see(pod)
    return cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000, help="nodes of a gang (default: 1000)")
    parser.add_argument("--jobs", type=int, default=10_000, help="jobs (default: 10000)")
    parser.add_argument("--pending", type=int, default=5_000, help="pending jobs (default: 5000)")
    size = Size(**vars(parser.parse_args()))
    print("| step | CPU time |\n|---|---|")
    for part in (decisions, status_writes, scrape, looks, news_of_a_node):
        for name, value in part(size):
            print(f"| {name} | {value} |", flush=True)


if __name__ == "__main__":
    main()
