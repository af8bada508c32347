"""Measure one case, and all cases in turns."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from ddpjob.core.api import names

from .api_calls import READS, WRITES, Call, calls_by_controllers, count_calls, wait_until_quiet
from .cases import CASES, COLLECTIONS, INDEXED, NAMESPACE, OURS, PODS, Shape, objects_of
from .client import Access, Client, Object, create_all
from .pod_watch import PodWatch
from .processes import CpuClock, OperatorProcess

# Connections of the creating client, the same number in every case.
CONNECTIONS = 8

WARM_UP = Shape(5, 4)

# A thousand jobs with their Workloads need four minutes.
CLEAR_SECONDS = 600


@dataclass
class Sample:
    """One case of one run.

    Times are seconds from the first create request. Calls are those of all jobs together, by
    "VERB resource". CPU seconds, by program, last until the cluster is quiet again.
    """

    case: str
    shape: str
    run: int
    exist: float
    running: float
    calls: dict[str, float]
    operator_rss: float
    cpu: dict[str, float]

    def writes(self) -> float:
        return self._sum(WRITES)

    def reads(self) -> float:
        return self._sum(READS)

    def _sum(self, verbs: Sequence[str]) -> float:
        return sum(count for call, count in self.calls.items() if call.split()[0] in verbs)


@dataclass
class Bench:
    """One cluster, with the clients and clocks of its measurement.

    - `labels`: those of each created object, such as the label of a queue.
    - `idle`: calls a second of the idle cluster.
    """

    access: Access
    client: Client
    operator: OperatorProcess
    clock: CpuClock
    creator: Executor
    labels: Mapping[str, str] = field(default_factory=dict)
    idle: dict[Call, float] = field(default_factory=dict)

    def measure_idle(self, seconds: float) -> None:
        """Measure the calls of the cluster while no job exists."""
        before = wait_until_quiet(self.client)
        time.sleep(seconds)
        after = count_calls(self.client)
        self.idle = {call: count / seconds for call, count in (after - before).items()}

    def measure(self, case: str, shape: Shape, number: int) -> Sample:
        """Create the objects of a case, wait for all pods and for the status, count and clear."""
        bodies = objects_of(case, shape, self.labels)
        calls_before = wait_until_quiet(self.client)
        cpu_before = self.clock.seconds()
        began = time.monotonic()

        # The watch is open before the first object is created.
        watch = PodWatch(self.access, shape.pods)
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(watch.follow)
            first = self.creator.submit(
                create_all, self.access, COLLECTIONS[case], bodies, CONNECTIONS
            ).result()
            following.result()
        if case == OURS:
            self.wait_for_status(shape.jobs)

        calls_after = wait_until_quiet(self.client)
        cpu_after = self.clock.seconds()
        seconds = time.monotonic() - began
        calls = self._without_others(calls_after - calls_before, case, shape, seconds)
        sample = Sample(
            case,
            str(shape),
            number,
            exist=max(watch.exist.values()) - first,
            running=max(watch.running.values()) - first,
            calls=calls_by_controllers(calls),
            operator_rss=self.operator.memory("VmRSS"),
            cpu={name: cpu_after[name] - cpu_before[name] for name in cpu_after},
        )
        self.clear()
        return sample

    def _without_others(
        self, calls: Counter[Call], case: str, shape: Shape, seconds: float
    ) -> dict[Call, float]:
        """Subtract the calls of an idle cluster in `seconds`, and the benchmark's own requests."""
        rest = {call: count - self.idle.get(call, 0) * seconds for call, count in calls.items()}
        # The watch began with one LIST.
        list_of_pods = ("LIST", "", "pods", "")
        rest[list_of_pods] = rest.get(list_of_pods, 0) - 1
        if case == OURS:
            rest["POST", names.GROUP, names.PLURAL, ""] -= shape.jobs
        if case == INDEXED:
            rest["POST", "batch", "jobs", ""] -= shape.jobs
        # If the scheduler found no newer group of events at its start, its events are counted
        # under the same labels. So the events themselves are counted by the kind of their object.
        about_jobs = self._events_about(names.KIND) + self._events_about("Job")
        rest["POST", "", "events", ""] = about_jobs
        return rest

    def _events_about(self, kind: str) -> int:
        path = f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.kind={kind}"
        return len(self.client.json("GET", path)["items"])

    def wait_for_status(self, jobs: int, seconds: float = 60) -> None:
        """Wait until the operator's metric counts every job as Running. This needs no LIST."""
        deadline = time.monotonic() + seconds
        while self.operator.jobs_running() < jobs:
            if time.monotonic() > deadline:
                found = self.operator.jobs_running()
                raise RuntimeError(f"expected {jobs} jobs with phase Running, got {found}")
            time.sleep(0.25)

    def clear(self) -> None:
        """Delete everything, and wait until it is gone and the cluster is quiet."""
        deadline = time.monotonic() + CLEAR_SECONDS
        pause = 0.5
        while not self._delete_all():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"namespace {NAMESPACE} is not empty {CLEAR_SECONDS} s after the deletion"
                )
            # Each try deletes what is left once more, at the cost of the API server.
            time.sleep(pause)
            pause = min(2 * pause, 15)
        wait_until_quiet(self.client)

    def _delete_all(self) -> bool:
        """Delete jobs, then pods and events. Return True if the namespace was empty before.

        Returns False after a failed request. The caller then tries again.
        """
        background: Object = {"propagationPolicy": "Background"}
        at_once: Object = {"gracePeriodSeconds": 0}
        options = {COLLECTIONS[OURS]: background, COLLECTIONS[INDEXED]: background, PODS: at_once}
        namespace = f"/api/v1/namespaces/{NAMESPACE}"
        try:
            left = [path for path in options if self._has_items(path)]
            for path in left:
                self.client.json("DELETE", path, options[path])
            self.client.json("DELETE", f"{namespace}/events")
            return not left and not self._has_items(f"{namespace}/services")
        except RuntimeError:
            return False

    def _has_items(self, path: str) -> bool:
        return bool(self.client.json("GET", f"{path}?limit=1")["items"])


def measure_all(
    bench: Bench, runs: int, shapes: Sequence[Shape], say: Callable[[str], None]
) -> list[Sample]:
    """Measure every case of every shape in each run. Each run begins with another case."""
    say("warming up")
    for case in CASES:
        bench.measure(case, WARM_UP, 0)
    samples = []
    for number in range(1, runs + 1):
        first = (number - 1) % len(CASES)
        in_turn = CASES[first:] + CASES[:first]
        for shape in shapes:
            for case in in_turn:
                sample = bench.measure(case, shape, number)
                samples.append(sample)
                say(
                    f"run {number}/{runs}  {shape!s:8} {case:12} "
                    f"all exist {sample.exist:6.2f} s, all Running {sample.running:6.2f} s, "
                    f"writes per job {sample.writes() / shape.jobs:6.1f}"
                )
    return samples
