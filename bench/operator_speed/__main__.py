"""Measure how fast the operator brings up gangs, beside Indexed Jobs and a bare client.

    python -m bench.operator_speed                                   # five runs, about 15 minutes
    python -m bench.operator_speed --runs 1 --large 1x10 --many 5x4  # a short try

Run it from the root of the repository. bench/README.md says what is measured and what is not.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from tests.cluster.commands import CommandFailed, Unavailable

from .cases import NAMESPACE, Shape
from .client import Client
from .cluster import Cluster
from .measure import Bench, measure_all
from .processes import PROGRAMS, CpuClock, OperatorProcess
from .recovery import measure_recovery
from .report import report, surroundings
from .targets import targets


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.operator_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=5, help="runs, in turns (default: 5)")
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
        "--idle", type=float, default=60, help="seconds to watch the idle cluster (default: 60)"
    )
    parser.add_argument("--image", help="the operator's image (default: built from this tree)")
    parser.add_argument("--keep", action="store_true", help="keep the cluster for the next call")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="write every sample to this file, and the tables beside it (.md)",
    )
    chosen = parser.parse_args()
    if chosen.runs < 1:
        parser.error(f"--runs: must be at least 1, got {chosen.runs}")
    return chosen


def measure_cluster(
    cluster: Cluster, chosen: argparse.Namespace, say: Callable[[str], None]
) -> str:
    """Measure a running cluster, write --out and return the text of the report."""
    cluster.make_namespace(NAMESPACE)
    client = Client(cluster.access())
    operator = OperatorProcess(client, *cluster.operator_process())
    in_node = {**cluster.process_ids(PROGRAMS), "operator": operator.pid}
    clock = CpuClock(in_node, {"kwok": cluster.kwok_pid})
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as creator:
        # Start the process, with its imports, before any clock runs.
        creator.submit(os.getpid).result()
        bench = Bench(cluster.access(), client, operator, clock, creator)
        # A kept cluster may hold the objects of an interrupted call.
        bench.clear()
        say(f"watching the idle cluster for {chosen.idle:g} s")
        bench.measure_idle(chosen.idle)
        shapes = (chosen.large, chosen.many)
        samples = measure_all(bench, chosen.runs, shapes, say)
        recoveries = []
        for number in range(1, chosen.runs + 1):
            recoveries.append(measure_recovery(bench, chosen.large))
            last = recoveries[-1]
            text = f"{last.seconds:.2f} s, the patches by a bare client {last.bare:.2f} s"
            say(f"run {number}/{chosen.runs}  recovery of {chosen.large}: {text}")

    goals = targets(samples, recoveries, chosen.large, chosen.many, operator.memory("VmHWM"))
    where = surroundings(client)
    text = report(samples, goals, shapes)
    text += "\n\n" + ", ".join(f"{key} {value}" for key, value in where.items())
    if chosen.out:
        found = {
            "surroundings": where,
            "targets": [{**asdict(goal), "reached": goal.reached} for goal in goals],
            "samples": [asdict(sample) for sample in samples],
            "idle per s": {
                " ".join(filter(None, call)): rate for call, rate in sorted(bench.idle.items())
            },
        }
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
        chosen.out.with_suffix(".md").write_text(text + "\n")
    return text


def main() -> int:
    chosen = arguments()
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {words}", file=sys.stderr, flush=True)

    cluster = Cluster(chosen.fake_nodes)
    try:
        say("creating the cluster, its fake nodes and the operator")
        cluster.up(chosen.image)
        print(measure_cluster(cluster, chosen, say))
    except (Unavailable, CommandFailed, RuntimeError, AssertionError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        cluster.down(chosen.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
