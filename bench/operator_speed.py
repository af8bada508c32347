"""How fast the operator brings gangs up, beside batch/v1 Indexed Jobs and a bare client that posts the same pods.

    .venv/bin/python bench/operator_speed.py                                  # five runs, about a quarter of an hour
    .venv/bin/python bench/operator_speed.py --runs 1 --large 1x10 --many 5x4 # a look whether it works

What is measured, and what is not, is in bench/README.md.
"""

import argparse
import http.client
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

from fake_cluster import (
    NODE,
    NODE_SELECTOR,
    ROOT,
    SYSTEM,
    TOLERATIONS,
    Access,
    FakeCluster,
    Object,
    Refused,
    Unavailable,
    run,
)

from ddpjob.core import names, render
from ddpjob.core.job import Job
from ddpjob.core.pod_context import Settings

NAMESPACE = "bench"
CONNECTIONS = 8
"""Of the client that creates things, in every case."""

OURS, INDEXED, FLOOR = "DDPJob", "Indexed Job", "bare client"
CASES = (OURS, INDEXED, FLOOR)

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
COLLECTIONS = {
    OURS: f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}",
    INDEXED: f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs",
    FLOOR: PODS,
}


@dataclass(frozen=True)
class Shape:
    """`jobs` jobs of `nodes` nodes each."""

    jobs: int
    nodes: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not JOBSxNODES, such as 100x4")
        return cls(int(found[1]), int(found[2]))

    @property
    def pods(self) -> int:
        return self.jobs * self.nodes

    def __str__(self) -> str:
        return f"{self.jobs} x {self.nodes}"


@dataclass
class Sample:
    """One case of one run. Times in seconds from the first create request; calls by "VERB resource", of all jobs."""

    case: str
    shape: str
    run: int
    exist: float
    running: float
    calls: dict[str, float]
    operator_rss: float
    cpu: dict[str, float]
    """Seconds of CPU by program, the operator among them; until the cluster is quiet again."""

    def writes(self) -> float:
        return sum(count for call, count in self.calls.items() if call.split()[0] in WRITES)

    def reads(self) -> float:
        return sum(count for call, count in self.calls.items() if call.split()[0] in READS)


# --- the API server


class Client:
    """One kept-alive connection, plain HTTP and JSON. Raises RuntimeError with the API server's words."""

    def __init__(self, access: Access) -> None:
        self._http = http.client.HTTPSConnection(
            access.host, access.port, context=access.tls(), timeout=60
        )
        self._http.connect()
        self._used = time.monotonic()
        self._headers = {"Accept": "application/json"}
        if access.token:
            self._headers["Authorization"] = f"Bearer {access.token}"

    def send(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> http.client.HTTPResponse:
        """`kind`: the body's media type. The answer must be read before the next call."""
        if (
            time.monotonic() - self._used > 30
        ):  # the API server closes what is idle for long; this opens it again
            self._http.close()
        self._used = time.monotonic()
        self._http.request(method, path, body, {**self._headers, "Content-Type": kind})
        answer = self._http.getresponse()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.read()[:500].decode()}")
        return answer

    def text(self, method: str, path: str, body: bytes | None = None) -> str:
        return self.send(method, path, body).read().decode()

    def json(self, method: str, path: str, body: Object | None = None) -> Object:
        answer: Object = json.loads(
            self.text(method, path, json.dumps(body).encode() if body is not None else None)
        )
        return answer


def create_all(access: Access, path: str, bodies: Sequence[bytes], connections: int) -> float:
    """POST `bodies` to `path` over open `connections`, in their order; returns time.monotonic() of the first request.

    Runs in a process of its own, so that the one that measures does not share an interpreter with it.
    """
    clients = [Client(access) for _ in range(min(connections, len(bodies)))]
    left, lock = iter(bodies), threading.Lock()

    def work(client: Client) -> None:
        while True:
            with lock:
                body = next(left, None)
            if body is None:
                return
            client.text("POST", path, body)

    with ThreadPoolExecutor(len(clients)) as pool:
        started = time.monotonic()
        for done in [pool.submit(work, client) for client in clients]:
            done.result()
    return started


class PodWatch:
    """One watch on the namespace's pods: when each was first seen, and first seen Running, by time.monotonic()."""

    def __init__(self, access: Access, pods: int) -> None:
        self._access, self._pods = access, pods
        self._version: str = Client(access).json("GET", f"{PODS}?limit=1")["metadata"][
            "resourceVersion"
        ]
        self._stream = self._open()
        self.exist: dict[str, float] = {}
        self.running: dict[str, float] = {}

    def _open(self) -> http.client.HTTPResponse:
        return Client(self._access).send("GET", f"{PODS}?watch=1&resourceVersion={self._version}")

    def follow(self) -> None:
        """Returns once every pod runs. Raises RuntimeError when one is lost or an unexpected one comes."""
        while len(self.running) < self._pods:
            line = self._stream.readline()
            now = time.monotonic()
            if not line:
                # A busy API server ends watches that it cannot serve in time: apiserver_terminated_watchers_total.
                self._stream = self._open()
                continue
            event = json.loads(line)
            if event["type"] == "ERROR":  # of an expired version, for example
                raise RuntimeError(f"the watch on pods: {event['object'].get('message')}")
            name, phase = (
                event["object"]["metadata"].get("name"),
                event["object"].get("status", {}).get("phase"),
            )
            self._version = event["object"]["metadata"].get("resourceVersion")
            if event["type"] not in ("ADDED", "MODIFIED") or phase not in ("Pending", "Running"):
                raise RuntimeError(
                    f"pod {name}: {event['type']} with phase {phase}; nothing may be lost here"
                )
            self.exist.setdefault(name, now)
            if phase == "Running":
                self.running.setdefault(name, now)
            if len(self.exist) > self._pods:
                raise RuntimeError(
                    f"{name} is one pod more than the {self._pods} that were asked for"
                )


# --- counting calls

Call = tuple[str, str, str, str]
"""Verb, group, resource, subresource: the labels of apiserver_request_total that tell callers apart."""

METRIC = re.compile(r"^apiserver_request_total\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')

WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION")
READS = ("GET", "LIST")

MADE_BY_CONTROLLERS = {
    ("", "pods", ""),
    ("", "services", ""),
    ("", "events", ""),
    (names.GROUP, names.PLURAL, ""),
    (names.GROUP, names.PLURAL, "status"),
    ("batch", "jobs", ""),
    ("batch", "jobs", "status"),
}
"""What only whoever makes the pods touches while they come up, events about pods apart. Bindings are the scheduler's;
pods/status is kwok's; endpoints and their slices are Kubernetes' own, for the Service."""

NOT_THEIRS = {("LIST", "", "services", ""), ("GET", "", "events", ""), ("LIST", "", "events", "")}
"""The API server itself lists Services every few minutes, for the addresses that it gave out; events only people read."""


def count_calls(client: Client) -> Counter[Call]:
    """Requests so far by call."""
    counts: Counter[Call] = Counter()
    for labels, value in METRIC.findall(client.text("GET", "/metrics")):
        label = dict(LABEL.findall(labels))
        counts[label["verb"], label["group"], label["resource"], label["subresource"]] += round(
            float(value)
        )
    return counts


def controllers_calls(calls: Mapping[Call, float]) -> dict[str, float]:
    """Of `calls` those of the operator, the Job controller or the bare client; watches go on and are not counted."""
    return {
        f"{verb} {resource}{'/' if subresource else ''}{subresource}": count
        for (verb, group, resource, subresource), count in sorted(calls.items())
        if (group, resource, subresource) in MADE_BY_CONTROLLERS
        and verb in WRITES + READS
        and (verb, group, resource, subresource) not in NOT_THEIRS
        and abs(count) >= 0.01
    }


def wait_until_quiet(client: Client, seconds: float = 120) -> Counter[Call]:
    """Until, for two seconds, nobody writes anything but Leases and node states; returns the counts then."""
    deadline = time.monotonic() + seconds
    before = count_calls(client)
    while True:
        time.sleep(2)
        after = count_calls(client)
        writes = sum(
            count
            for (verb, _, resource, _), count in (after - before).items()
            if verb in WRITES and resource not in ("leases", "nodes")
        )
        if writes == 0:
            return after
        if time.monotonic() > deadline:
            raise RuntimeError(f"the cluster does not come to rest: {dict(after - before)}")
        before = after


# --- the kernel's account

PROGRAMS = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler")
"""What of the control plane works while pods come up."""


@dataclass
class Processor:
    """CPU of the programs that share the machine. `inside` and `outside`: process ids by name, in the node and beside it."""

    inside: Mapping[str, int]
    outside: Mapping[str, int]

    def seconds(self) -> dict[str, float]:
        """User and system time so far of all threads; the kernel counts in hundredths."""
        stats = _in_node(*(f"/proc/{pid}/stat" for pid in self.inside.values())).splitlines()
        stats += [_text(Path(f"/proc/{pid}/stat")) for pid in self.outside.values()]
        fields = [stat.rpartition(")")[2].split() for stat in stats]
        ticks = os.sysconf("SC_CLK_TCK")
        programs = [*self.inside, *self.outside]
        return {
            name: (int(f[11]) + int(f[12])) / ticks
            for name, f in zip(programs, fields, strict=True)
        }


def _in_node(*files: str) -> str:
    try:
        return run("docker", "exec", NODE, "cat", *files)
    except Refused as error:
        raise RuntimeError("a process is gone: it was restarted during the benchmark") from error


@dataclass
class OperatorProcess:
    """Memory of the operator by the kernel's account of its process, and what its /metrics say."""

    client: Client
    pod: str
    pid: int

    def memory(self, which: str) -> float:
        """Resident megabytes (10^6 bytes): VmRSS now, VmHWM the most so far."""
        lines = _in_node(f"/proc/{self.pid}/status").splitlines()
        status = {key: value for key, _, value in (line.partition(":") for line in lines)}
        return int(status[which].split()[0]) * 1024 / 1e6

    def jobs_running(self) -> int:
        """Jobs whose status the operator has written as Running."""
        text = self.client.text(
            "GET", f"/api/v1/namespaces/{SYSTEM}/pods/{self.pod}:8080/proxy/metrics"
        )
        found = re.search(r'^ddpjob_jobs\{phase="Running"\} (\S+)$', text, re.MULTILINE)
        return round(float(found[1])) if found else 0


# --- what is created


def manifest(name: str, nodes: int) -> Object:
    """The DDPJob of every case: a plain trainer that wants one core."""
    spec = {
        "nodes": nodes,
        "image": "registry.invalid/trainer:1",
        "args": ["train.py", "--epochs", "1"],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "nodeSelector": NODE_SELECTOR,
        "tolerations": TOLERATIONS,
    }
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec}


def rendered_pods(name: str, nodes: int) -> list[Object]:
    """The pods that the operator would create, but nobody's: without an owner, and not labelled as the operator's.

    With its label the operator would receive their events too, and its work slow down the cases that it has no part in.
    """
    job = manifest(name, nodes)
    job["metadata"]["uid"] = "00000000-0000-4000-8000-000000000000"
    job["status"] = {"attempt": 0, "nodes": {"desired": nodes}}
    pods = list(render.pods(Job.from_dict(job), range(nodes), Settings()))
    for pod in pods:
        del pod["metadata"]["ownerReferences"]
        labels = pod["metadata"]["labels"]
        labels["operator-speed/job"] = labels.pop(names.LABEL_JOB)
    return pods


def indexed_job(name: str, nodes: int) -> Object:
    """A batch/v1 Indexed Job with the same pod template; name, hostname and index are the Job controller's to give."""
    pod = rendered_pods(name, nodes)[0]
    del pod["spec"]["hostname"]
    metadata = {key: pod["metadata"][key] for key in ("labels", "annotations")}
    spec = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "template": {"metadata": metadata, "spec": pod["spec"]},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }


def objects_of(case: str, shape: Shape) -> list[bytes]:
    """What the client creates in this case."""
    jobs = [f"job-{number:03d}" for number in range(shape.jobs)]
    if case == OURS:
        objects: Iterable[Object] = (manifest(name, shape.nodes) for name in jobs)
    elif case == INDEXED:
        objects = (indexed_job(name, shape.nodes) for name in jobs)
    else:
        objects = (pod for name in jobs for pod in rendered_pods(name, shape.nodes))
    return [json.dumps(found).encode() for found in objects]


# --- one case


@dataclass
class Bench:
    """One cluster with everything that measures it. `idle`: calls in a second in which nothing is asked for."""

    access: Access
    client: Client
    operator: OperatorProcess
    processor: Processor
    creator: Executor
    idle: dict[Call, float] = field(default_factory=dict)

    def measure_idle(self, seconds: float) -> None:
        """What the cluster costs by itself."""
        before = wait_until_quiet(self.client)
        time.sleep(seconds)
        after = count_calls(self.client)
        self.idle = {call: count / seconds for call, count in (after - before).items()}

    def measure(self, case: str, shape: Shape, number: int) -> Sample:
        """Create, wait until all pods run and the operator has said so, count, and clear away."""
        bodies = objects_of(case, shape)
        calls_before, cpu_before, began = (
            wait_until_quiet(self.client),
            self.processor.seconds(),
            time.monotonic(),
        )
        watch = PodWatch(self.access, shape.pods)
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(watch.follow)
            first = self.creator.submit(
                create_all, self.access, COLLECTIONS[case], bodies, CONNECTIONS
            ).result()
            following.result()
        if case == OURS:
            self._wait_for_status(shape.jobs)
        calls_after = wait_until_quiet(self.client)
        cpu_after, seconds = self.processor.seconds(), time.monotonic() - began
        sample = Sample(
            case,
            str(shape),
            number,
            exist=max(watch.exist.values()) - first,
            running=max(watch.running.values()) - first,
            calls=controllers_calls(self._own(calls_after - calls_before, case, shape, seconds)),
            operator_rss=self.operator.memory("VmRSS"),
            cpu={name: cpu_after[name] - cpu_before[name] for name in cpu_after},
        )
        self.clear()
        return sample

    def _own(
        self, calls: Counter[Call], case: str, shape: Shape, seconds: float
    ) -> dict[Call, float]:
        """Without what the same seconds cost an idle cluster, and without the benchmark's own requests."""
        own = {call: count - self.idle.get(call, 0) * seconds for call, count in calls.items()}
        own["LIST", "", "pods", ""] = own.get(("LIST", "", "pods", ""), 0) - 1  # the watch's start
        if case == OURS:
            own["POST", names.GROUP, names.PLURAL, ""] -= shape.jobs
        if case == INDEXED:
            own["POST", "batch", "jobs", ""] -= shape.jobs
        # The scheduler's events are of this group too where it found no other when it started; so they are looked at.
        own["POST", "", "events", ""] = self._events_about(names.KIND) + self._events_about("Job")
        return own

    def _events_about(self, kind: str) -> int:
        path = f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.kind={kind}"
        return len(self.client.json("GET", path)["items"])

    def _wait_for_status(self, jobs: int, seconds: float = 60) -> None:
        """Until the operator has written every job as Running. Its own metric says so without a LIST."""
        deadline = time.monotonic() + seconds
        while self.operator.jobs_running() < jobs:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"only {self.operator.jobs_running()} of {jobs} jobs are said to be Running"
                )
            time.sleep(0.25)

    def clear(self) -> None:
        """Delete everything, and wait until it is gone and nobody works on it any more."""
        deadline = time.monotonic() + 180
        while not self._cleared():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the namespace {NAMESPACE} does not become empty")
            time.sleep(0.5)
        wait_until_quiet(self.client)

    def _cleared(self) -> bool:
        """Delete what is there, jobs before their pods; whether nothing was. A failed request counts as something."""
        background, at_once = {"propagationPolicy": "Background"}, {"gracePeriodSeconds": 0}
        options = {COLLECTIONS[OURS]: background, COLLECTIONS[INDEXED]: background, PODS: at_once}
        folder = f"/api/v1/namespaces/{NAMESPACE}"
        try:
            left = [path for path in options if self.client.json("GET", f"{path}?limit=1")["items"]]
            for path in left:
                self.client.json("DELETE", path, options[path])
            self.client.json("DELETE", f"{folder}/events")
            return not left and not self.client.json("GET", f"{folder}/services?limit=1")["items"]
        except RuntimeError:
            return False


def measure_all(
    bench: Bench, runs: int, shapes: Sequence[Shape], say: Callable[[str], None]
) -> list[Sample]:
    """Every case of every shape, interleaved; each run begins with another case."""
    say("warming up")
    for case in CASES:
        bench.measure(case, Shape(5, 4), 0)
    samples = []
    for number in range(1, runs + 1):
        for shape in shapes:
            for place in range(len(CASES)):
                case = CASES[(number - 1 + place) % len(CASES)]
                sample = bench.measure(case, shape, number)
                samples.append(sample)
                say(
                    f"run {number}/{runs}  {shape!s:8} {case:12} all exist {sample.exist:6.2f} s, "
                    f"all Running {sample.running:6.2f} s, writes per job {sample.writes() / shape.jobs:6.1f}"
                )
    return samples


# --- the report


@dataclass(frozen=True)
class Target:
    """A figure to reach: `values` one for each run, judged by their median."""

    text: str
    values: Sequence[float]
    limit: float
    at_least: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def reached(self) -> bool:
        """Counts that an idle cluster's share was taken from come with a small error."""
        found = round(self.median, 2)
        return found >= self.limit if self.at_least else found <= self.limit

    def row(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "reached" if self.reached else "**missed**"
        return f"| {self.text} | {sign} {self.limit:g} | {spread(self.values)} | {verdict} |"


def spread(values: Iterable[float], digits: int = 2) -> str:
    """median (min–max)"""
    found = sorted(values)
    return f"{statistics.median(found):.{digits}f} ({found[0]:.{digits}f}–{found[-1]:.{digits}f})"


def select(samples: Iterable[Sample], case: str, shape: Shape) -> list[Sample]:
    return [sample for sample in samples if sample.case == case and sample.shape == str(shape)]


def targets(samples: Sequence[Sample], large: Shape, many: Shape, peak_rss: float) -> list[Target]:
    """The figures to reach; ratios are taken within each run."""

    def ratio(shape: Shape, over: str, under: str) -> list[float]:
        pairs = zip(select(samples, over, shape), select(samples, under, shape), strict=True)
        return [a.running / b.running for a, b in pairs]

    def per_job(shape: Shape, count: Callable[[Sample], float]) -> list[float]:
        return [count(sample) / shape.jobs for sample in select(samples, OURS, shape)]

    found = [
        Target(
            f"{large}: time until Running, over the Indexed Job's",
            ratio(large, OURS, INDEXED),
            1.15,
        ),
        Target(
            f"{many}: rate of Running pods, over the Indexed Jobs'",
            ratio(many, INDEXED, OURS),
            1.25,
            True,
        ),
        Target(
            f"{many}: time until Running, over the bare client's", ratio(many, OURS, FLOOR), 1.3
        ),
    ]
    for shape in (large, many):
        found += [
            Target(f"{shape}: GET and LIST per job", per_job(shape, Sample.reads), 0),
            Target(
                f"{shape}: writes per job, at most N + 5",
                per_job(shape, Sample.writes),
                shape.nodes + 5,
            ),
        ]
    return [*found, Target("most resident memory of the operator, MB", [peak_rss], 90)]


def report(samples: Sequence[Sample], goals: Sequence[Target], large: Shape, many: Shape) -> str:
    """Markdown tables: what was measured, what it cost, what was to be reached. Medians, with the least and the most."""
    lines = [
        "| jobs x nodes | made by | all pods exist, s | all Running, s | Running pods/s | writes per job |",
        "|---|---|---|---|---|---|",
    ]
    for shape in (large, many):
        for case in CASES:
            found = select(samples, case, shape)
            cells = [
                str(shape),
                case,
                spread(s.exist for s in found),
                spread(s.running for s in found),
                spread((shape.pods / s.running for s in found), 0),
                spread((s.writes() / shape.jobs for s in found), 1),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    programs = list(samples[0].cpu)
    lines += [
        "",
        f"| CPU seconds (medians) | made by | {' | '.join(programs)} |",
        f"|---|---|{'---|' * len(programs)}",
    ]
    for shape in (large, many):
        for case in CASES:
            found = select(samples, case, shape)
            cells = [
                f"{statistics.median(s.cpu[program] for s in found):.2f}" for program in programs
            ]
            lines.append(f"| {shape} | {case} | {' | '.join(cells)} |")
    lines += [
        "",
        "| to reach | limit | median (min–max) | |",
        "|---|---|---|---|",
        *(goal.row() for goal in goals),
    ]
    lines += ["", "Calls of our jobs, medians of all jobs together:"]
    lines += [f"- {shape}: {_calls(select(samples, OURS, shape))}" for shape in (large, many)]
    return "\n".join(lines)


def _calls(samples: Sequence[Sample]) -> str:
    kinds = sorted({call for sample in samples for call in sample.calls})
    return ", ".join(
        f"{call} {statistics.median(s.calls.get(call, 0) for s in samples):.1f}" for call in kinds
    )


def surroundings(client: Client) -> Object:
    """What a figure is worth nothing without."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    cpu = re.search(r"^model name\s*: (.*)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("describe", "--always", "--dirty", "--abbrev=12"),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "kubernetes": client.json("GET", "/version")["gitVersion"],
        "kwok": run("kwok", "--version").strip(),
        "kopf": importlib.metadata.version("kopf"),
    }


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# --- the command


def arguments() -> argparse.Namespace:
    text = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="interleaved runs; medians are reported (default: 5)"
    )
    parser.add_argument(
        "--large", type=Shape.parse, default=Shape(1, 200), help="JOBSxNODES (default: 1x200)"
    )
    parser.add_argument(
        "--many", type=Shape.parse, default=Shape(100, 4), help="JOBSxNODES (default: 100x4)"
    )
    parser.add_argument(
        "--fake-nodes", type=int, default=200, help="fake nodes of the cluster (default: 200)"
    )
    parser.add_argument(
        "--idle", type=float, default=60, help="seconds to watch the idle cluster for (default: 60)"
    )
    parser.add_argument(
        "--image", help="the operator's image; without it one is built from this tree"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the cluster for the next call, which takes it as it is",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="write every sample there, the tables beside it (.md)",
    )
    chosen = parser.parse_args()
    if chosen.runs < 1:
        parser.error("--runs must be at least 1")
    return chosen


def measure_cluster(
    cluster: FakeCluster, chosen: argparse.Namespace, say: Callable[[str], None]
) -> str:
    """Everything from an empty cluster to the text of the report; writes --out."""
    cluster.make_namespace(NAMESPACE)
    client = Client(cluster.access())
    operator = OperatorProcess(client, *cluster.operator_process())
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as creator:
        creator.submit(os.getpid).result()  # started and imported before any clock runs
        processor = Processor(
            {**cluster.process_ids(PROGRAMS), "operator": operator.pid}, {"kwok": cluster.kwok}
        )
        bench = Bench(cluster.access(), client, operator, processor, creator)
        bench.clear()  # a cluster that was kept may hold what an interrupted call left
        say(f"watching the idle cluster for {chosen.idle:g} s")
        bench.measure_idle(chosen.idle)
        samples = measure_all(bench, chosen.runs, (chosen.large, chosen.many), say)
    peak = operator.memory("VmHWM")
    goals = targets(samples, chosen.large, chosen.many, peak)
    where = surroundings(client)
    text = report(samples, goals, chosen.large, chosen.many)
    text += "\n\n" + ", ".join(f"{key} {value}" for key, value in where.items())
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        judged = [{**asdict(goal), "reached": goal.reached} for goal in goals]
        idle = {" ".join(filter(None, call)): rate for call, rate in sorted(bench.idle.items())}
        found = {
            "surroundings": where,
            "targets": judged,
            "samples": [asdict(s) for s in samples],
            "idle per s": idle,
        }
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
        chosen.out.with_suffix(".md").write_text(text + "\n")
    return text


def main() -> int:
    chosen = arguments()
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {words}", file=sys.stderr, flush=True)

    cluster = FakeCluster(chosen.fake_nodes)
    try:
        say("making the cluster, its fake nodes and the operator")
        cluster.up(chosen.image)
        print(measure_cluster(cluster, chosen, say))
    except (Unavailable, Refused, RuntimeError, AssertionError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        cluster.down(chosen.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
