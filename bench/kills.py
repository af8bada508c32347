"""Kill ranks and pods of trainings on kind, and see what is left.

    python -m bench.kills --kills 60                            # at random moments, ten in each job
    python -m bench.kills --goodput --every 30 --minutes 10     # a pod at fixed times, in one job

The first command compares the weights of every job with those of an undisturbed one: they must have
the same bits. The values of `recovery` take turns. The second prints how the job's time was spent.
Both need Docker and kind. They use the tests' cluster, and delete it at the end unless
KEEP_CLUSTER=1 is set.
"""

import argparse
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.cluster.builders import digits_with_checkpoints
from tests.cluster.cluster import Cluster
from tests.cluster.commands import CommandFailed, Object
from tests.cluster.namespace import Namespace
from tests.cluster.training import JOB, assert_same_weights, signal_workers, start, weights

MODES = ("InPlace", "Recreate")

# Kills in one job, and the longest pause between two, in seconds. The pause is short, so some kills
# hit a restart.
KILLS, PAUSE = 10, 8.0

# Epochs of a job long enough for most of its kills.
LONG = 80

# Epochs of a job too long to end during `--goodput`.
ENDLESS = 100_000

# Restart at once: a back-off would be part of the lost time.
POLICY = {"maxRestarts": 1000, "maxDisruptions": 1000, "windowSeconds": 1}


@contextmanager
def namespace_on(cluster: Cluster) -> Iterator[Namespace]:
    namespace = Namespace(cluster, f"kills-{uuid.uuid4().hex[:6]}")
    try:
        yield namespace
    finally:
        namespace.delete()


def kill_rank(namespace: Namespace, pod: str) -> None:
    signal_workers(namespace, pod, signal.SIGKILL)


def delete_pod(namespace: Namespace, pod: str) -> None:
    namespace.kubectl("delete", "pod", pod, "--wait=false")


def delete_pod_by_force(namespace: Namespace, pod: str) -> None:
    namespace.kubectl("delete", "pod", pod, "--wait=false", "--force", "--grace-period=0")


WAYS: tuple[Callable[[Namespace, str], None], ...] = (kill_rank, delete_pod, delete_pod_by_force)


def undisturbed_weights(cluster: Cluster) -> Object:
    with namespace_on(cluster) as namespace:
        start(namespace, digits_with_checkpoints(JOB, LONG))
        namespace.wait_for_complete(JOB, 300)
        return weights(namespace)


def kill_at_random(namespace: Namespace, dice: random.Random, kills: int) -> int:
    """Kill something at random moments, until the job ends. Return the number of kills."""
    done = 0
    while done < kills:
        time.sleep(dice.uniform(0, PAUSE))
        pods = namespace.unfinished(JOB)
        if namespace.status(JOB).get("phase") in ("Complete", "Failed"):
            break
        if not pods:
            continue
        way, pod = dice.choice(WAYS), dice.choice(pods)
        try:
            way(namespace, pod)
        except CommandFailed:
            # The pod has ended meanwhile, has no rank yet, or is being deleted.
            continue
        print(f"  {way.__name__} {pod}", flush=True)
        done += 1
    return done


def survive(cluster: Cluster, kills: int, dice: random.Random) -> None:
    expected = undisturbed_weights(cluster)
    done = 0
    while done < kills:
        mode = MODES[(done // KILLS) % len(MODES)]
        with namespace_on(cluster) as namespace:
            job = digits_with_checkpoints(JOB, LONG, recovery=mode, failurePolicy=POLICY)
            start(namespace, job)
            done += kill_at_random(namespace, dice, min(KILLS, kills - done))
            status = namespace.wait_for_status(JOB, 300, phase="Complete")
            assert_same_weights(weights(namespace), expected)
            causes = [entry["cause"] for entry in status["attempts"]]
            print(f"{done} of {kills} survived with equal weights; {mode}: {causes}", flush=True)


def measure_goodput(cluster: Cluster, every: float, minutes: float, dice: random.Random) -> None:
    with namespace_on(cluster) as namespace:
        start(namespace, digits_with_checkpoints(JOB, ENDLESS, failurePolicy=POLICY))
        end = time.monotonic() + minutes * 60
        kills = 0
        while time.monotonic() < end:
            time.sleep(every)
            delete_pod(namespace, dice.choice(namespace.unfinished(JOB)))
            kills += 1
        namespace.patch(JOB, suspend=True)
        status = namespace.wait_for_status(JOB, phase="Suspended")
        account = status["account"]
        seconds = account["seconds"]
        lost = seconds["recovering"] / kills
        print(f"goodput {account['goodput']}, {kills} pods killed, {lost:.1f} s each: {seconds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--goodput", action="store_true")
    parser.add_argument("--every", type=float, default=30, help="seconds between two kills")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    cluster = Cluster()
    cluster.up()
    try:
        if options.goodput:
            measure_goodput(cluster, options.every, options.minutes, dice)
        else:
            survive(cluster, options.kills, dice)
    finally:
        if os.environ.get("KEEP_CLUSTER") != "1":
            cluster.delete()


if __name__ == "__main__":
    main()
