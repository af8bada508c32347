"""Random faults on a kind cluster against trainings with checkpoints, then a report in Markdown.

    make soak-cluster MINUTES=30
    python -m tests.cluster.soak --minutes 5 --seed 1

Faults come one after another, each when every job trains, so the expected counters of a job are
known exactly. The exit code is 1 if a counter or a result is wrong, or if a pod is left running.
KEEP_CLUSTER=1 uses the existing cluster and keeps it.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from . import hostile
from .builders import digits_with_checkpoints
from .cluster import CONTROL_PLANE, WORKERS, Cluster
from .commands import CommandFailed, Object, run, wait_until
from .namespace import Namespace, attempt_of
from .training import JOB, last_step, signal_workers

# The operator runs on the first worker. Faults of nodes hit the second.
SURVIVOR, VICTIM = WORKERS

JOBS_AT_ONCE = 2
EPOCHS = 250

# Seconds between two faults, and the longest time until every job trains again.
PAUSE = (3.0, 20.0)
RECOVERY = 300

# Later failures of one job would wait for minutes, because it backs off.
MAX_FAILURES = 3

# Shorter than the default. After its control plane was frozen, Kubernetes takes a healthy node for
# unreachable, but for a shorter time than this.
DEAD_NODE_SECONDS = 15

LIVELY_BUDGETS = {"maxRestarts": 1000, "maxDisruptions": 1000}


@dataclass
class SoakJob:
    """One training, in a namespace of its own, and its expected counters at the end."""

    namespace: Namespace
    failures: int = 0
    disruptions: int = 0
    announced: int = 0
    attempt: int = 0
    faults: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def status(self) -> Object:
        return self.namespace.status(JOB)

    @property
    def finished(self) -> bool:
        return self.status.get("phase") in ("Complete", "Failed")

    @property
    def trains(self) -> bool:
        """True if the expected attempt, or a later one, has written a checkpoint."""
        status = self.status
        attempt = attempt_of(status)
        if status.get("phase") != "Running" or attempt < self.attempt:
            return False
        return bool(self.namespace.progress_of(JOB, attempt, "checkpoint"))

    def pods_on(self, node: str) -> list[str]:
        unfinished = self.namespace.unfinished(JOB)
        places = self.namespace.nodes_of(JOB)
        return [pod for pod in unfinished if places.get(pod) == node]


@dataclass(frozen=True)
class Effect:
    """The costs of a fault for the affected jobs."""

    failures: int = 0
    disruptions: int = 0
    announced: int = 0
    attempts: int = 0


FAILURE = Effect(failures=1, attempts=1)
DISRUPTION = Effect(disruptions=1, attempts=1)
ANNOUNCED = Effect(announced=1, attempts=1)
FREE = Effect(attempts=1)
NOTHING = Effect()

# The counters of a job.
COUNTERS = ("failures", "disruptions", "announced", "attempt")

Act = Callable[["Soak", SoakJob], None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault. One `of_node` hits each job with a pod on the victim.

    `undo` is called when every job trains again.
    """

    name: str
    effect: Effect
    act: Act
    of_node: bool = False
    undo: Callable[["Soak"], None] | None = None


@dataclass
class Soak:
    """The state of one run."""

    cluster: Cluster
    dice: random.Random
    # The namespace of others.
    hostile: Namespace
    running: list[SoakJob] = field(default_factory=list)
    ended: list[SoakJob] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)

    # -- jobs

    def start_job(self) -> None:
        number = len(self.running) + len(self.ended)
        stamp = f"{time.time_ns():x}"[-8:]
        namespace = Namespace(self.cluster, f"soak-{number}-{stamp}")
        namespace.claim("checkpoints")
        manifest = digits_with_checkpoints(JOB, EPOCHS, failurePolicy=LIVELY_BUDGETS)
        # A hanging rank is noticed after this time.
        manifest["spec"]["args"] += ["--timeout", "10"]
        namespace.apply(manifest)
        self.running.append(SoakJob(namespace))
        say(f"{namespace.name} starts")

    def collect_ended(self) -> None:
        for job in [job for job in self.running if job.finished]:
            check(job)
            self.running.remove(job)
            self.ended.append(job)
            say(f"{job.namespace.name} ended: {'; '.join(job.problems) or 'as expected'}")

    def wait_until_all_train(self) -> None:
        """Wait until each job trains in its expected attempt, or has ended."""

        def settled() -> bool:
            return all(job.trains or job.finished for job in self.running)

        wait_until("every job trains or has ended", settled, RECOVERY, self.explain)

    def explain(self) -> str:
        return "\n".join(job.namespace.explain() for job in self.running)

    # -- faults

    def cause_fault(self) -> None:
        """Cause a random fault, wait until every job trains again, and note what it must cost."""
        target = self.dice.choice(self.running)
        fault = self._draw_fault(target)
        hit = [target]
        if fault.of_node:
            hit = [job for job in self.running if job.pods_on(VICTIM)]
        say(f"{fault.name}: {', '.join(job.namespace.name for job in hit) or 'no job'}")
        before = {job.namespace.name: attempt_of(job.status) for job in hit}
        for job in hit:
            job.attempt = before[job.namespace.name] + fault.effect.attempts
        begun = time.monotonic()
        try:
            self._act(fault, target)
            self.wait_until_all_train()
        finally:
            if fault.undo:
                fault.undo(self)
        self.recoveries.setdefault(fault.name, []).append(time.monotonic() - begun)
        for job in hit:
            self._note(fault, job, before[job.namespace.name])

    def _draw_fault(self, target: SoakJob) -> Fault:
        """Draw one of the faults with the fewest occurrences until now."""
        faults = [
            fault for fault in FAULTS if not fault.effect.failures or target.failures < MAX_FAILURES
        ]
        times = {fault.name: len(self.recoveries.get(fault.name, ())) for fault in faults}
        fewest = min(times.values())
        return self.dice.choice([fault for fault in faults if times[fault.name] == fewest])

    def _act(self, fault: Fault, target: SoakJob) -> None:
        try:
            fault.act(self, target)
        except CommandFailed:
            # A job may end just before its fault.
            if not target.finished:
                raise

    def _note(self, fault: Fault, job: SoakJob, before: int) -> None:
        """Count what the fault must cost, unless the job had ended before it."""
        status = job.status
        if fault.effect.attempts and job.finished and attempt_of(status) == before:
            job.attempt = before
            self.missed[fault.name] = self.missed.get(fault.name, 0) + 1
            return
        job.faults += 1
        job.failures += fault.effect.failures
        job.disruptions += fault.effect.disruptions
        job.announced += fault.effect.announced


def say(text: str) -> None:
    """Report progress on standard error. Standard output is the report."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# The faults


def random_pod(soak: Soak, job: SoakJob) -> str:
    return soak.dice.choice(sorted(job.namespace.unfinished(JOB)))


def kill_rank(soak: Soak, job: SoakJob) -> None:
    signal_workers(job.namespace, random_pod(soak, job), signal.SIGKILL)


def stop_rank(soak: Soak, job: SoakJob) -> None:
    signal_workers(job.namespace, random_pod(soak, job), signal.SIGSTOP)


def delete_pod(soak: Soak, job: SoakJob) -> None:
    job.namespace.kubectl("delete", "pod", random_pod(soak, job), "--wait=false")


def force_delete_pod(soak: Soak, job: SoakJob) -> None:
    how = ("--force", "--grace-period=0")
    job.namespace.kubectl("delete", "pod", random_pod(soak, job), *how)


def suspend_and_resume(soak: Soak, job: SoakJob) -> None:
    job.namespace.patch(JOB, suspend=True)
    job.namespace.wait_until_nothing_runs(JOB)
    assert last_step(job.namespace) > 0
    job.namespace.patch(JOB, suspend=False)


def scale(soak: Soak, job: SoakJob) -> None:
    nodes = 5 - job.namespace.job(JOB)["spec"]["nodes"]
    job.namespace.kubectl("scale", "ddpjob", JOB, f"--replicas={nodes}")


def kill_operator(soak: Soak, job: SoakJob) -> None:
    soak.cluster.kill_operator()


def freeze_control_plane(soak: Soak, job: SoakJob) -> None:
    with soak.cluster.paused(CONTROL_PLANE):
        time.sleep(soak.dice.uniform(2, 30))


def freeze_worker(soak: Soak, job: SoakJob) -> None:
    run("docker", "pause", VICTIM)


def thaw_worker(soak: Soak) -> None:
    run("docker", "unpause", VICTIM)
    soak.cluster.wait_for_node(VICTIM)


def restart_worker(soak: Soak, job: SoakJob) -> None:
    run("docker", "kill", VICTIM)
    run("docker", "start", VICTIM)
    soak.cluster.wait_for_node(VICTIM)


def drain_worker(soak: Soak, job: SoakJob) -> None:
    options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
    soak.cluster.kubectl("drain", VICTIM, f"--pod-selector=ddpjob.dev/job={JOB}", *options)


def uncordon_worker(soak: Soak) -> None:
    soak.cluster.kubectl("uncordon", VICTIM)


def be_hostile(act: hostile.Act, soak: Soak, job: SoakJob) -> None:
    act(job.namespace, JOB, soak.hostile)


FAULTS = (
    Fault("rank killed", FAILURE, kill_rank),
    # Its agent answers, so the pod is not lost: the rank hangs.
    Fault("rank stopped", FAILURE, stop_rank),
    Fault("pod deleted", DISRUPTION, delete_pod),
    Fault("pod deleted by force", DISRUPTION, force_delete_pod),
    Fault("job suspended and resumed", FREE, suspend_and_resume),
    Fault("job scaled", FREE, scale),
    Fault("operator killed", NOTHING, kill_operator),
    Fault("control plane frozen", NOTHING, freeze_control_plane),
    Fault("worker frozen", DISRUPTION, freeze_worker, of_node=True, undo=thaw_worker),
    Fault("worker restarted", DISRUPTION, restart_worker, of_node=True),
    Fault("worker drained", ANNOUNCED, drain_worker, of_node=True, undo=uncordon_worker),
    *(Fault(name, NOTHING, partial(be_hostile, act)) for name, act in hostile.ACTS.items()),
)


# The report


def check(job: SoakJob) -> None:
    """Compare an ended job with what it must be."""
    status = job.status
    counters = {**status["budget"], "attempt": attempt_of(status)}
    for key in COUNTERS:
        expected, found = getattr(job, key), counters[key]
        if found != expected:
            job.problems.append(f"{key}: expected {expected}, got {found}")
    if status["phase"] != "Complete":
        job.problems.append(f"{status['phase']}: {status.get('message')}")
    elif float(status["result"]["accuracy"]) < 0.97:
        job.problems.append(f"accuracy {status['result']['accuracy']}")
    try:
        job.namespace.wait_until_nothing_runs(JOB)
    except AssertionError:
        job.problems.append(f"still run: {', '.join(job.namespace.unfinished(JOB))}")


def report(soak: Soak, minutes: float, seed: int) -> str:
    lines = [
        f"# Soak of {minutes:g} minutes, seed {seed}",
        "",
        "| fault | times | too late | seconds until all jobs train again: median | longest |",
        "|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        times = soak.recoveries.get(fault.name, [])
        missed = soak.missed.get(fault.name, 0)
        spread = f"{statistics.median(times):.0f} | {max(times):.0f}" if times else "- | -"
        lines.append(f"| {fault.name} | {len(times)} | {missed} | {spread} |")
    lines += [
        "",
        "Counters are expected/found.",
        "",
        "| job | faults | attempts | failures | disruptions | announced | accuracy | pods left "
        "| problems |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(number, job) for number, job in enumerate(soak.ended)]
    return "\n".join(lines)


def row(number: int, job: SoakJob) -> str:
    status = job.status
    cells: Sequence[object] = (
        number,
        job.faults,
        f"{job.attempt + 1}/{attempt_of(status) + 1}",
        f"{job.failures}/{status['budget']['failures']}",
        f"{job.disruptions}/{status['budget']['disruptions']}",
        f"{job.announced}/{status['budget']['announced']}",
        status.get("result", {}).get("accuracy", "-"),
        len(job.namespace.unfinished(JOB)),
        "; ".join(job.problems) or "none",
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def soak_for(soak: Soak, minutes: float) -> None:
    """Cause faults for so long, and let the last jobs end without."""
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        while len(soak.running) < JOBS_AT_ONCE:
            soak.start_job()
        soak.wait_until_all_train()
        soak.collect_ended()
        if soak.running:
            soak.cause_fault()
            time.sleep(soak.dice.uniform(*PAUSE))
        soak.collect_ended()
    wait_until("the last jobs end", lambda: all(job.finished for job in soak.running), 600)
    soak.collect_ended()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    keep = os.environ.get("KEEP_CLUSTER") == "1"
    cluster = Cluster()
    if not keep:
        cluster.delete()
    cluster.up()
    on_survivor = {r"nodeSelector.kubernetes\.io/hostname": SURVIVOR}
    cluster.install(deadNodeSeconds=str(DEAD_NODE_SECONDS), **on_survivor)
    others = Namespace(cluster, f"hostile-{time.time_ns():x}")
    soak = Soak(cluster, random.Random(options.seed), others)
    try:
        soak_for(soak, options.minutes)
    finally:
        print(report(soak, options.minutes, options.seed))
        for namespace in (others, *(job.namespace for job in (*soak.running, *soak.ended))):
            namespace.delete()
        if not keep:
            cluster.delete()
    return int(any(job.problems for job in soak.ended) or not soak.ended)


if __name__ == "__main__":
    sys.exit(main())
